"""Who holds which pages of the pool: allocation of all kinds at once, delayed frees, and the ledger.

    L1  huge pages   stack of free ones; huge page 0 is scratch and never handed out
    L2  whole pages  expert weights, recurrent states, or a parent that is cut further
    L3  cut pages    KV, convolution rows

Pages are split on demand, one level at a time, and merge upward as soon as all children of a parent are free. An
allocation is first decided in numbers and then carried out, so that it happens wholly or not at all. Placement
(`page_store`) prefers parents the owner already has, then new ones, then another's; only the last is a last resort.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rimuru_jax.host.ledger import Ledger, PageCounts
from rimuru_jax.host.page_layout import EXPERT, PageLayout
from rimuru_jax.host.page_store import FREE, NO_UNITS, NOBODY, PENDING, PageStore, Tenant, Units

Ids = npt.NDArray[np.int32]
_NO_IDS: Ids = np.zeros(0, np.int32)
type _Taker = tuple[Tenant, list[int], dict[str, Ids]]  # units by kind, their ids by name

EXPERTS = -1
"""Owner of the resident expert pages."""
BUFFERS = -2
"""Owner of the loading buffers; what it holds counts as pinned. Sequences are owners from 0 upwards."""


class PageAllocator:
    """Hands out the pages of a pool of `num_huge_pages` huge pages, scratch page included.

    Raises ValueError for a pool that is smaller than two huge pages or on which some stride does not fit evenly.
    """

    def __init__(self, layout: PageLayout, num_huge_pages: int) -> None:
        multiple = layout.huge_page_multiple
        if num_huge_pages < 2 or num_huge_pages % multiple:
            raise ValueError(
                f"a pool of {num_huge_pages} huge pages was asked for, it needs at least 2 and a multiple of {multiple}: "
                "take PageLayout.num_huge_pages(page_pool_bytes)"
            )
        self.layout = layout
        self.num_huge_pages = num_huge_pages
        self._free_huge = list(range(num_huge_pages - 1, 0, -1))
        self._tenants: dict[int, Tenant] = {}
        self._index = {placed.kind.name: index for index, placed in enumerate(layout.kinds)}
        self._stores: list[PageStore] = [None] * len(layout.kinds)  # type: ignore[list-item]
        for index, placed in sorted(enumerate(layout.kinds), key=lambda item: item[1].kind.level):
            above = self._free_huge if placed.parent is None else self._stores[self._index[placed.parent]]
            parents = num_huge_pages if isinstance(above, list) else above.flat.size
            self._stores[index] = PageStore(index, placed, parents, self._tenants, above)
        self._level2 = [(store.index, store.units_per_parent) for store in self._stores if store.level == 2]
        self._level3 = [
            (store.index, store.units_per_parent, store.above.index)
            for store in self._stores
            if isinstance(store.above, PageStore)
        ]
        self._expert = self._index.get(EXPERT, -1)
        self._experts_per_huge = layout.pages_per_huge(EXPERT) if self._expert >= 0 else 1
        self._pending: deque[list[tuple[PageStore, tuple[Units, Units, Units]]]] = deque()

    @property
    def capacity_expert_pages(self) -> int:
        """Expert pages that the whole pool holds, scratch aside."""
        return (self.num_huge_pages - 1) * self.layout.pages_per_huge(EXPERT)

    @property
    def free_expert_pages(self) -> int:
        """Expert-sized pages that can be had right now (huge pages, in a layout without experts)."""
        loose = self._stores[self._expert].num_free if self._expert >= 0 else 0
        return loose + self._experts_per_huge * len(self._free_huge)

    @property
    def returning_expert_pages(self) -> int:
        """What `free_expert_pages` will grow by when all pending frees have come due and nothing else happens."""
        leaving: list[list[Units]] = [[] for _ in self._stores]
        for index, _, above in self._level3:
            if self._stores[index].num_pending:
                leaving[above].append(self._stores[index].emptying(NO_UNITS))
        pages = 0
        for index, _ in self._level2:
            store = self._stores[index]
            cut = np.concatenate([*leaving[index], NO_UNITS])
            if index == self._expert:
                pages += store.num_pending + len(cut)
            elif store.num_pending or len(cut):
                pages += self._experts_per_huge * len(store.emptying(cut))
        return pages

    def allocate(self, owner: int, demand: Mapping[str, int]) -> dict[str, Ids] | None:
        """Give `owner` units of several kinds, all or nothing.

        Returns for each kind in `demand` the id of the first page of each unit, `[units]`; None, with nothing changed,
        when they are not to be had. Raises KeyError for unknown kinds and ValueError for negative numbers.
        """
        taken = self.allocate_each([(owner, demand)])
        return taken[0] if taken else None

    def allocate_each(self, demands: Sequence[tuple[int, Mapping[str, int]]]) -> list[dict[str, Ids]]:
        """`allocate` for one (owner, units by kind) after another, at less cost, up to the first that fails.

        Returns what `allocate` would have, for those before that one.
        """
        taken: list[dict[str, Ids]] = []
        takers: list[_Taker] = []
        wanted_by_each = [self._wanted(owner, demand) for owner, demand in demands]
        for (owner, demand), wanted in zip(demands, wanted_by_each, strict=True):
            tenant = self._tenants.get(owner) or Tenant(owner, len(self._stores))
            plan = self._plan(tenant.room, wanted)
            if plan is None:
                break
            taken.append(dict.fromkeys(demand, _NO_IDS))
            if any(wanted):
                self._tenants[owner] = tenant
                taker = tenant, wanted, taken[-1]
                takers.append(taker)
                self._reserve(taker, *plan)
        for i, *_ in self._level3:
            if theirs := [taker for taker in takers if taker[1][i]]:
                self._hand_out(self._stores[i], self._stores[i].occupy(), theirs)
        return taken

    def shortfall(self, demands: Sequence[tuple[int, Mapping[str, int]]]) -> int:
        """Expert-sized pages missing to allocate all `demands` (owner, units by kind), one after another in any order
        but those of one owner together.

        At most 0 when they fit: then minus the `free_expert_pages` that will be left. It is exact for one owner, and
        for any number of owners that want the same single kind, but for what is left when they fit only with the help
        of each other's parents (then 0). For several owners and kinds it counts on parents of their own for each, so
        that it may report a lack where they would just fit, and never the reverse.
        """
        return self._shortfall(demands)[0]

    def missing_huge_pages(self, demands: Sequence[tuple[int, Mapping[str, int]]]) -> int:
        """Huge pages that `shortfall` finds missing and that `consolidate` may be able to make, at least 0."""
        if self._experts_per_huge == 1:
            return 0
        return max(0, self._shortfall(demands)[1])

    def consolidate(self, num_huge_pages: int) -> tuple[Ids, Ids]:
        """Move resident expert pages closer together until up to `num_huge_pages` more huge pages are free.

        Returns the page ids that were left and those taken instead, in the same order; the former are free at once.
        Where a huge page holds a single expert page nothing can be gained.
        """
        if self._expert < 0 or self._experts_per_huge == 1 or EXPERTS not in self._tenants:
            return _NO_IDS, _NO_IDS
        store = self._stores[self._expert]
        sources, targets = store.plan_moves(EXPERTS, num_huge_pages)
        if len(sources):
            store.move(self._tenants[EXPERTS], sources, targets)
        return store.page_ids(sources), store.page_ids(targets)

    def free(self, owner: int, kind: str, ids: npt.ArrayLike, *, delay: int = 0) -> None:
        """Take back the units of `kind` named by `ids`, at once or at the `delay`-th `begin_pass` from now.

        Raises ValueError, with nothing changed, unless each id is a unit that `owner` holds, named once.
        """
        tenant = self._tenant(owner)
        store = self._stores[self._index[kind]]
        units = store.units_of(ids)
        if len(set(units.tolist())) < len(units):
            raise ValueError(f"some {kind!r} unit of owner {owner} is freed twice in one call")
        theirs = (store.flat[units] == owner) & ~store.cut[units]
        if not theirs.all():
            wrong = np.asarray(ids)[~theirs][:4].tolist()
            raise ValueError(f"owner {owner} does not hold the {kind!r} units {wrong}")
        i = store.index
        tenant.units[i] -= len(units)
        tenant.stale[i] += len(units)
        if tenant.stale[i] > tenant.units[i] + 256:
            tenant.held[i], tenant.stale[i] = [self._held(tenant, store, leaving=units)], 0
        self._vacate(store, units, delay)
        if not any(tenant.units):
            del self._tenants[owner]

    def release(self, owner: int, *, delay: int = 0) -> None:
        """Take back everything `owner` holds. Raises ValueError when it holds nothing."""
        tenant = self._tenant(owner)
        held = [(store, self._held(tenant, store)) for store in self._stores if tenant.units[store.index]]
        for store, units in sorted(held, key=lambda item: -item[0].level):
            self._vacate(store, units, delay)
        del self._tenants[owner]

    def begin_pass(self) -> None:
        """A scheduler pass begins: frees that are due take effect."""
        if self._pending:
            for store, freed in self._pending.popleft():
                store.put(*freed)

    def holds(self, owner: int) -> dict[str, int]:
        """Units that `owner` holds, by kind."""
        tenant = self._tenants.get(owner)
        return {name: tenant.units[index] if tenant else 0 for name, index in self._index.items()}

    def ledger(self) -> Ledger:
        """How many units of each kind are in which state."""
        buffers = self.holds(BUFFERS)
        return Ledger(
            huge_pages=self.num_huge_pages - 1,
            free_huge_pages=len(self._free_huge),
            split_huge_pages=sum(self._stores[index].num_split for index, _ in self._level2),
            kinds={
                store.name: PageCounts(
                    level=store.level,
                    total=store.num_split * store.units_per_parent,
                    free=store.num_free,
                    used=store.num_held - buffers[store.name],
                    pinned=buffers[store.name],
                    cached=0,
                    pending=store.num_pending,
                    cut=store.num_cut,
                )
                for store in self._stores
            },
        )

    def huge_page_uses(self) -> list[str]:
        """What each huge page mostly holds: a kind, "buffer" (loading buffers), "pending", "free", or "scratch"."""
        uses = np.array(["free"] * self.num_huge_pages, dtype=object)
        uses[0] = "scratch"
        for index, _ in self._level2:
            store = self._stores[index]
            parents = store.split.nonzero()[0]
            rows = store.occupant[parents]
            # What an L2 page holds: its own kind, or the level-3 kind whose parent it is.
            held = np.full(store.occupant.shape, index, np.int64)
            for below, _, above in self._level3:
                if above == index:
                    held.reshape(-1)[self._stores[below].split.nonzero()[0]] = below
            choices = [(store.name, (rows > FREE) & (held[parents] == index) & (rows != BUFFERS))]
            choices += [
                (self._stores[below].name, (rows > FREE) & (held[parents] == below))
                for below, _, above in self._level3
                if above == index
            ]
            choices += [("buffer", rows == BUFFERS), ("pending", rows == PENDING)]
            counts = np.stack([mask.sum(axis=1) for _, mask in choices])
            names = np.array([name for name, _ in choices], dtype=object)
            uses[parents] = names[counts.argmax(axis=0)]
        return uses.tolist()

    def check_ledger(self) -> None:
        """Recount everything from the single pages. Raises AssertionError with the numbers that disagree."""
        ledger = self.ledger()
        assert ledger.free_huge_pages + ledger.split_huge_pages == ledger.huge_pages, f"L1: {ledger}"
        assert len(set(self._free_huge)) == len(self._free_huge) and 0 not in self._free_huge, (
            "free huge pages"
        )
        uses = np.zeros(self.num_huge_pages, np.int64)
        uses[self._free_huge] += 1
        uses += sum(self._stores[index].split for index, _ in self._level2)
        assert (uses == np.r_[0, np.ones(self.num_huge_pages - 1)]).all(), (
            f"uses of huge pages {uses.tolist()}"
        )
        for store in self._stores:
            counts = ledger.kinds[store.name]
            inside = store.occupant[store.split]
            free = int((inside == FREE).sum())
            pending = int((inside == PENDING).sum())
            cut = int(store.cut.sum())
            held = inside.size - free - pending - cut
            seen = (free, held, pending, cut, inside.size)
            booked = (counts.free, counts.used + counts.pinned, counts.pending, counts.cut, counts.total)
            assert seen == booked, (
                f"{store.name}: (free, held, pending, cut, total) {seen} but booked {booked}"
            )
            assert (store.occupant[~store.split] == FREE).all(), (
                f"{store.name}: a unit outside of split parents"
            )
            assert ((store.occupant == FREE).sum(1) * store.split == store.free).all(), f"{store.name}: free"
            assert ((store.occupant == PENDING).sum(1) == store.pending).all(), f"{store.name}: pending"
            assert (store.free < store.units_per_parent).all(), f"{store.name}: a free parent was not merged"
            assert set(store.open) == set(store.free.nonzero()[0].tolist()), f"{store.name}: open parents"
            owned = store.owner != NOBODY
            lives = (store.occupant == store.owner[:, None]).any(1)
            assert (lives | ~owned).all() and not owned[~store.split].any(), (
                f"{store.name}: owner without units"
            )
            if isinstance(store.above, PageStore):
                agrees = store.above.flat == store.owner
                assert (agrees | ~store.split).all(), f"{store.name}: owners differ between levels"
            for tenant in self._tenants.values():
                mine = int(((store.flat == tenant.owner) & ~store.cut).sum())
                assert mine == tenant.units[store.index], f"{store.name}: {tenant.owner} holds {mine}"
                open_parents = (store.owner == tenant.owner) & (store.free > 0)
                room = int(store.free[open_parents].sum())
                assert room == tenant.room[store.index], f"{store.name}: {tenant.owner} has room for {room}"
                assert set(tenant.open[store.index]) == set(open_parents.nonzero()[0].tolist()), store.name

    def _tenant(self, owner: int) -> Tenant:
        tenant = self._tenants.get(owner)
        if tenant is None:
            raise ValueError(f"owner {owner} holds no pages")
        return tenant

    def _room(self, owner: int) -> list[int]:
        tenant = self._tenants.get(owner)
        return tenant.room if tenant else [0] * len(self._stores)

    def _wanted(self, owner: int, demand: Mapping[str, int]) -> list[int]:
        """A demand as a list by kind, checked."""
        if owner < BUFFERS:
            raise ValueError(f"owner {owner}: owners are {BUFFERS}, {EXPERTS} and sequences from 0 upwards")
        wanted = [0] * len(self._stores)
        for name, units in demand.items():
            if units < 0:
                raise ValueError(f"{units} units of {name!r} were asked for, it must not be negative")
            wanted[self._index[name]] = units
        return wanted

    def _wish(self, room: list[int], wanted: list[int]) -> tuple[list[int], list[int], int]:
        """An allocation as it should be: from the owner's parents, which have `room`, and fresh ones.

        Returns, by kind, the units to take including parents for level-3 kinds, and the fresh parents to open; and how
        many huge pages that takes.
        """
        pages, fresh, num_huge = wanted.copy(), [0] * len(wanted), 0
        for i, units_per_parent, above in self._level3:
            if wanted[i] > room[i]:
                fresh[i] = -(-(wanted[i] - room[i]) // units_per_parent)
                pages[above] += fresh[i]
        for i, per_huge in self._level2:
            if pages[i] > room[i]:
                fresh[i] = -(-(pages[i] - room[i]) // per_huge)
                num_huge += fresh[i]
        return pages, fresh, num_huge

    def _plan(self, room: list[int], wanted: list[int]) -> tuple[list[int], list[int]] | None:
        """What can be had of `_wish`: its first two; None when the units are not there."""
        pages, fresh, num_huge = self._wish(room, wanted)
        if num_huge <= len(self._free_huge):
            return pages, fresh

        # Not everything as it should be: begin with the fewest new pages, then come as near as the free ones go.
        wish, (pages, fresh) = fresh, self._least(wanted)
        num_free = len(self._free_huge) - sum(fresh[i] for i, _ in self._level2)
        if num_free < 0:
            return None
        per_huge = dict(self._level2)
        for i, _, above in self._level3:
            spare = self._stores[above].num_free + fresh[above] * per_huge[above] - pages[above]
            more = min(wish[i] - fresh[i], spare + num_free * per_huge[above])
            huge = max(0, -(-(more - spare) // per_huge[above]))
            fresh[i] += more
            pages[above] += more
            fresh[above] += huge
            num_free -= huge
        for i, units_per_huge in self._level2:
            more = min(max(0, -(-(pages[i] - room[i]) // units_per_huge)) - fresh[i], num_free)
            fresh[i] += more
            num_free -= more
        return pages, fresh

    def _least(self, wanted: list[int]) -> tuple[list[int], list[int]]:
        """Like `_wish`, the fewest parents that do when every free unit is used, whosever parent it is in."""
        pages, fresh = wanted.copy(), [0] * len(wanted)
        for i, units_per_parent, above in self._level3:
            fresh[i] = max(0, -(-(wanted[i] - self._stores[i].num_free) // units_per_parent))
            pages[above] += fresh[i]
        for i, per_huge in self._level2:
            fresh[i] = max(0, -(-(pages[i] - self._stores[i].num_free) // per_huge))
        return pages, fresh

    def _least_missing(self, wanted: list[int]) -> tuple[int, int]:
        """Expert-sized pages missing for units in all, by kind, when every free unit is used; and huge pages."""
        pages, fresh = self._least(wanted)
        lacking = self._huge_for_others(fresh) - len(self._free_huge)
        if lacking <= 0 or self._expert < 0:
            return self._balance(pages, fresh), lacking
        loose = self._stores[self._expert].num_free  # no help for kinds that need whole huge pages
        return lacking * self._experts_per_huge + max(0, pages[self._expert] - loose), lacking

    def _shortfall(self, demands: Sequence[tuple[int, Mapping[str, int]]]) -> tuple[int, int]:
        """`shortfall`, and how many huge pages of it are missing (negative: left)."""
        merged: dict[int, list[int]] = {}
        index, size = self._index, len(self._stores)
        for owner, demand in demands:
            for name, units in demand.items():
                if units:
                    if (row := merged.get(owner)) is None:
                        row = merged[owner] = [0] * size
                    row[index[name]] += units
        num_free = len(self._free_huge)
        if not merged:
            return -self.free_expert_pages, -num_free
        total, pages, fresh, num_huge = [0] * size, [0] * size, [0] * size, -num_free
        for owner, wanted in merged.items():
            own_pages, own_fresh, own_huge = self._wish(self._room(owner), wanted)
            num_huge += own_huge
            for i in range(size):
                total[i] += wanted[i]
                pages[i] += own_pages[i]
                fresh[i] += own_fresh[i]
        if num_huge <= 0:
            return self._balance(pages, fresh), num_huge
        if len(merged) == 1 and (plan := self._plan(self._room(next(iter(merged))), total)):
            return self._balance(*plan), 0
        if len(merged) == 1 or sum(1 for units in total if units) == 1:
            short, num_huge = self._least_missing(total)
            return (short if len(merged) == 1 else max(0, short)), num_huge
        return self._experts_per_huge * num_huge, num_huge

    def _balance(self, pages: list[int], fresh: list[int]) -> int:
        """Expert-sized pages that `_wish` or the like takes, less those that are free."""
        experts = pages[self._expert] if self._expert >= 0 else 0
        return experts + self._experts_per_huge * self._huge_for_others(fresh) - self.free_expert_pages

    def _huge_for_others(self, fresh: list[int]) -> int:
        """Fresh huge pages for kinds other than experts."""
        return sum([fresh[i] for i, _ in self._level2 if i != self._expert])

    def _reserve(self, taker: _Taker, pages: list[int], fresh: list[int]) -> None:
        """Take the level-2 pages that `_plan` has decided on, and reserve the units in them."""
        tenant, wanted, _ = taker
        parents: list[list[int]] = [[] for _ in wanted]
        for i, _ in self._level2:
            if pages[i]:
                huge = []
                if fresh[i]:
                    huge = self._free_huge[: -fresh[i] - 1 : -1]
                    del self._free_huge[-fresh[i] :]
                self._stores[i].reserve(tenant, pages[i], huge)
                units = self._stores[i].occupy()
                if wanted[i]:
                    self._hand_out(self._stores[i], units[: wanted[i]], [taker])
                parents[i] = units[wanted[i] :].tolist()
        for i, _, above in self._level3:
            if wanted[i]:
                opened = []
                if fresh[i]:
                    opened, parents[above] = parents[above][: fresh[i]], parents[above][fresh[i] :]
                    self._stores[above].cut[opened] = True
                    self._stores[above].num_cut += fresh[i]
                self._stores[i].reserve(tenant, wanted[i], opened)

    def _hand_out(self, store: PageStore, units: Units, takers: Sequence[_Taker]) -> None:
        """Book units, one taker's after another's, and note their page ids."""
        i, end = store.index, 0
        ids = store.page_ids(units)
        store.num_held += len(units)
        for tenant, wanted, by_name in takers:
            start, end = end, end + wanted[i]
            tenant.units[i] += wanted[i]
            tenant.held[i].append(units[start:end])
            by_name[store.name] = ids[start:end]

    def _held(self, tenant: Tenant, store: PageStore, leaving: Units | None = None) -> Units:
        """The units of a kind that `tenant` holds, less those about to leave."""
        units = np.concatenate(tenant.held[store.index])
        if tenant.stale[store.index]:
            units = np.unique(units)
            units = units[(store.flat[units] == tenant.owner) & ~store.cut[units]]
        return units if leaving is None else np.setdiff1d(units, leaving, assume_unique=True)

    def _vacate(self, store: PageStore, units: Units, delay: int) -> None:
        store.num_held -= len(units)
        freed = store.vacate(units, later=delay > 0)
        if delay > 0:
            while len(self._pending) < delay:
                self._pending.append([])
            self._pending[delay - 1].append((store, freed))
