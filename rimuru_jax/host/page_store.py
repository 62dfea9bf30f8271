"""The units of one page kind: who holds each, which parents have room, and in which order they are handed out.

`PageStore` is the same for level 2 (parents are huge pages) and level 3 (parents are L2 pages). A *unit* is addressed
here by `parent * units_per_parent + slot`, whatever its page id. A parent has an *owner*, the tenant it was cut for.
Placement follows from that: a tenant takes units from parents it owns, then from fresh parents, and from another's
only in need. So parents empty when their owner leaves, instead of living on for a few strangers' pages.
"""

import numpy as np
import numpy.typing as npt

from rimuru_jax.host.page_layout import PlacedKind

Units = npt.NDArray[np.int64]
NO_UNITS: Units = np.zeros(0, np.int64)

# Occupants of a unit beside tenants, which are numbered from -2 upwards.
FREE = -10
PENDING = -11  # freed, but not before a later pass
NOBODY = -12  # an L2 page cut for a tenant that has left, in which several others still live


class Tenant:
    """What one owner holds. Lists are indexed by kind."""

    __slots__ = ("held", "open", "owner", "room", "stale", "units")

    def __init__(self, owner: int, num_kinds: int) -> None:
        self.owner = owner
        self.units = [0] * num_kinds
        """Units held."""
        self.held: list[list[Units]] = [[] for _ in range(num_kinds)]
        """The same units in the order they came, with `stale` entries of units given back since."""
        self.stale = [0] * num_kinds
        self.room = [0] * num_kinds
        """Free units in parents this tenant owns."""
        self.open: list[dict[int, None]] = [{} for _ in range(num_kinds)]
        """Those parents, in the order they were opened."""


class PageStore:
    """Units of one kind, cut from `above`: the store of the parent kind, or the stack of free huge pages."""

    def __init__(
        self,
        index: int,
        placed: PlacedKind,
        num_parents: int,
        tenants: dict[int, Tenant],
        above: "PageStore | list[int]",
    ) -> None:
        self.index = index
        self.name = placed.kind.name
        self.level = placed.kind.level
        self.run = placed.kind.run
        self.units_per_parent = placed.units_per_parent
        self.above = above
        self._placed = placed
        self._tenants = tenants
        parents = np.arange(num_parents)
        self._first_page = placed.first_page(parents)
        self._offset = self._first_page - parents * (self.units_per_parent * self.run)

        self.occupant = np.full((num_parents, self.units_per_parent), FREE, np.int64)
        self.cut = np.zeros(self.occupant.size, bool)
        """Level 2: pages that are parents of L3 pages. Their occupant is the owner of that parent."""
        self.split = np.zeros(num_parents, bool)
        """Parents cut into units of this kind."""
        self.owner = np.full(num_parents, NOBODY, np.int64)
        """Who a parent was cut for, or who alone is left in it. An owner always occupies a unit of it."""
        self.free = np.zeros(num_parents, np.int64)
        """Free units of each split parent."""
        self.pending = np.zeros(num_parents, np.int64)
        """Pending units of each split parent."""
        self.open: dict[int, None] = {}
        """Split parents with free units."""
        self._reserved: list[
            tuple[int, int, int, int]
        ] = []  # parent, units, its free units before, new occupant
        self.num_split = self.num_free = self.num_held = self.num_pending = self.num_cut = 0

    @property
    def flat(self) -> Units:
        """`occupant` by unit, a view."""
        return self.occupant.reshape(-1)

    def page_ids(self, units: Units) -> npt.NDArray[np.int32]:
        """Id of the first page of each unit."""
        if self.level == 2:
            return units.astype(np.int32)
        return (units * self.run + self._offset[units // self.units_per_parent]).astype(np.int32)

    def units_of(self, page_ids: npt.ArrayLike) -> Units:
        """The inverse of `page_ids`. Raises ValueError for ids that name no unit."""
        ids = np.asarray(page_ids, np.int64)
        if self.level == 2:
            units, ok = ids, (ids >= 0) & (ids < self.cut.size)
        else:
            parents, slots = self._placed.locate(ids)
            units = parents * self.units_per_parent + slots
            ok = (ids >= 0) & (parents < len(self.split)) & (slots >= 0) & (slots < self.units_per_parent)
            if ok.all():
                ok = self._first_page[parents] + slots * self.run == ids
        if not ok.all():
            raise ValueError(f"{ids[~ok][:4].tolist()} are no ids of {self.name!r} units of this pool")
        return units

    def reserve(self, tenant: Tenant, count: int, fresh: list[int]) -> None:
        """Promise `count` units to `tenant`: of its own parents, then of all `fresh` ones, then of others'.

        The caller has made sure that they are there and that every fresh parent is needed. All counts change now; which
        units it are, and that they are no longer free, follows with the next `occupy`.
        """
        own = tenant.open[self.index]
        while count and own:
            count -= self._reserve_in(next(iter(own)), tenant, count)
        size = self.units_per_parent
        for parent in fresh:
            taken = min(count, size)
            count -= taken
            self.split[parent] = True
            self.owner[parent] = tenant.owner
            self._reserved.append((parent, taken, size, tenant.owner))
            if taken < size:
                self._add_free(parent, size - taken)
        self.num_split += len(fresh)
        if count:
            for parent in self._others(tenant)[:count].tolist():
                count -= self._reserve_in(parent, tenant, count)
                if tenant.owner >= 0 > self.owner[parent] > FREE:
                    # Weights own a huge page only while it holds nothing else.
                    self._hand_over(np.array([parent]), np.array([tenant.owner]))
                if not count:
                    break

    def occupy(self) -> Units:
        """Let the tenants have what was reserved since the last call. Returns the units, in the order of reservation."""
        parents, counts, free, owners = np.array(self._reserved).T
        self._reserved.clear()
        if self.units_per_parent == 1:
            self.flat[parents] = owners
            return parents
        # Of a parent's free units, `free` is how many earlier reservations had left.
        vacant = self.occupant[parents] == FREE
        number = vacant.cumsum(1)
        first = (number[:, -1] - free)[:, None]
        rows, slots = (vacant & (number > first) & (number <= first + counts[:, None])).nonzero()
        units = parents[rows] * self.units_per_parent + slots
        self.flat[units] = owners[rows]
        return units

    def vacate(self, units: Units, *, later: bool) -> tuple[Units, Units, Units]:
        """End the occupation of `units`: they become free now, or pending. Returns what `put` takes later."""
        parents, counts = self._group(units)
        if later:
            self.flat[units] = PENDING
            self.pending[parents] += counts
            self.num_pending += len(units)
        else:
            self._put(units, parents, counts)
        self._settle(parents)
        return units, parents, counts

    def put(self, units: Units, parents: Units, counts: Units) -> None:
        """Pending units, as `vacate` returned them, become free."""
        self.pending[parents] -= counts
        self.num_pending -= len(units)
        self._put(units, parents, counts)

    def emptying(self, leaving: Units) -> Units:
        """Parents that would be whole if their pending units and the units `leaving` (live ones) were free."""
        coming = self.pending
        if len(leaving):
            parents, counts = self._group(leaving)
            coming = coming.copy()
            coming[parents] += counts
        parents = coming.nonzero()[0]
        return parents[self.free[parents] + coming[parents] == self.units_per_parent]

    def plan_moves(self, owner: int, num_parents: int) -> tuple[Units, Units]:
        """Units of `owner` to move, and free units to move them to, that leave up to `num_parents` parents empty.

        Only parents that hold nothing but whole units of `owner` are emptied, those that hold the fewest first.
        """
        parents = np.fromiter(self.open, np.int64, len(self.open))
        rows, cut = self.occupant[parents], self.cut.reshape(self.occupant.shape)[parents]
        movable = ((rows == FREE) | ((rows == owner) & ~cut)).all(1)
        order = (self.free[parents] - movable * self.units_per_parent * 2).argsort(kind="stable")
        parents, movable = parents[order], movable[order]
        # From here: the movable parents, fullest first, then the others. Victims are the last of the movable ones.
        free, last = self.free[parents], int(movable.sum())
        moved = (self.units_per_parent - free[:last][::-1]).cumsum()
        room = self.num_free - free[:last][::-1].cumsum()
        count = min(num_parents, int((moved <= room).sum()))
        if count <= 0:
            return NO_UNITS, NO_UNITS
        victims, others = parents[last - count : last], np.r_[parents[: last - count], parents[last:]]
        rows, units = self._units(victims)
        sources = units[rows == owner]
        rows, units = self._units(others)
        return sources, units[rows == FREE][: len(sources)]

    def move(self, tenant: Tenant, sources: Units, targets: Units) -> None:
        """Units of `tenant` change places, as `plan_moves` has it; what they leave is free at once."""
        for parent, count in zip(*(part.tolist() for part in self._group(targets)), strict=True):
            self._add_free(parent, -count)
        self.flat[targets] = tenant.owner
        tenant.held[self.index].append(targets)
        tenant.stale[self.index] += len(sources)
        self.vacate(sources, later=False)

    def _units(self, parents: Units) -> tuple[Units, Units]:
        """Occupants and numbers of all units of some parents, in the order of the parents."""
        units = parents[:, None] * self.units_per_parent + np.arange(self.units_per_parent)
        return self.occupant[parents].ravel(), units.ravel()

    def _reserve_in(self, parent: int, tenant: Tenant, count: int) -> int:
        """Up to `count` of the free units of a parent; returns how many."""
        free = int(self.free[parent])
        count = min(count, free)
        self._reserved.append((parent, count, free, tenant.owner))
        self._add_free(parent, -count)
        return count

    def _others(self, tenant: Tenant) -> Units:
        """Open parents in the order to take them when nothing better is left.

        First those the tenant already lives in, then nobody's, then of its like (sequences or weights), then the rest;
        among equals those with most room, so that it spreads over few.
        """
        parents = np.fromiter(self.open, np.int64, len(self.open))
        owners = self.owner[parents]
        away = ~(self.occupant[parents] == tenant.owner).any(1)
        unlike = (owners >= 0) != (tenant.owner >= 0)
        rank = np.where(owners == NOBODY, 0, 1 + unlike) + 3 * away
        return parents[(rank * self.units_per_parent - self.free[parents]).argsort(kind="stable")]

    def _add_free(self, parent: int, delta: int) -> None:
        free = int(self.free[parent]) + delta
        owner = int(self.owner[parent])
        self.free[parent] = free
        self.num_free += delta
        if free:
            self.open[parent] = None
        else:
            del self.open[parent]
        if owner != NOBODY:
            tenant = self._tenants[owner]
            tenant.room[self.index] += delta
            if free:
                tenant.open[self.index][parent] = None
            else:
                del tenant.open[self.index][parent]

    def _group(self, units: Units) -> tuple[Units, Units]:
        """Parents of `units` and how many of the units lie in each."""
        if self.units_per_parent == 1:
            return units, np.ones_like(units)
        return np.unique(units // self.units_per_parent, return_counts=True)

    def _put(self, units: Units, parents: Units, counts: Units) -> None:
        self.flat[units] = FREE
        whole = self.free[parents] + counts == self.units_per_parent
        if not whole.all():
            for parent, count in zip(parents[~whole].tolist(), counts[~whole].tolist(), strict=True):
                self._add_free(parent, count)
            parents = parents[whole]
        if len(parents):
            self._merge(parents)

    def _merge(self, parents: Units) -> None:
        """Parents of which all units are free go back to where they were cut from."""
        for parent in parents[self.free[parents] > 0].tolist():
            self._add_free(parent, -int(self.free[parent]))
        self.split[parents] = False
        self.owner[parents] = NOBODY
        self.num_split -= len(parents)
        above = self.above
        if isinstance(above, PageStore):
            above.cut[parents] = False
            above.num_cut -= len(parents)
            above.vacate(parents, later=False)
        else:
            above.extend(parents.tolist())

    def _settle(self, parents: Units) -> None:
        """Parents whose owner has left go to the only occupant left, or to nobody."""
        parents = parents[self.split[parents]]
        if not len(parents):
            return
        if self.units_per_parent == 1:
            occupants = self.flat[parents]
            self._hand_over(parents, np.where(occupants > FREE, occupants, NOBODY))
            return
        rows = self.occupant[parents]
        left = ~(rows == self.owner[parents, None]).any(1)
        if not left.any():
            return
        parents, rows = parents[left], rows[left]
        vacant = (rows == FREE) | (rows == PENDING)
        first = np.take_along_axis(rows, vacant.argmin(1)[:, None], 1)
        heirs = np.where((vacant | (rows == first)).all(1) & ~vacant.all(1), first[:, 0], NOBODY)
        self._hand_over(parents, heirs)

    def _hand_over(self, parents: Units, heirs: Units) -> None:
        """Parents get other owners, and with them the room that is left in them."""
        owners = self.owner[parents]
        changed = owners != heirs
        parents, heirs, owners = parents[changed], heirs[changed], owners[changed]
        if not len(parents):
            return
        free = self.free[parents]
        for i in free.nonzero()[0].tolist():
            parent, owner, heir = int(parents[i]), int(owners[i]), int(heirs[i])
            if owner != NOBODY:
                self._tenants[owner].room[self.index] -= int(free[i])
                del self._tenants[owner].open[self.index][parent]
            if heir != NOBODY:
                self._tenants[heir].room[self.index] += int(free[i])
                self._tenants[heir].open[self.index][parent] = None
        self.owner[parents] = heirs
        if isinstance(self.above, PageStore):
            self.above.flat[parents] = heirs
            above = (
                parents
                if self.above.units_per_parent == 1
                else np.unique(parents // self.above.units_per_parent)
            )
            self.above._settle(above)
