"""Random traces over random layouts, against a model that knows only bytes: who owns each byte of the pool."""

import copy
import itertools
from typing import Any

import numpy as np
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rimuru_jax.host.allocator import BUFFERS, EXPERTS, PageAllocator
from rimuru_jax.host.page_layout import PageKind, PageLayout, PlacedKind

HUGE = 240
FREE = -9
PENDING = -8


@st.composite
def layouts(draw: st.DrawFn) -> PageLayout:
    """One to four kinds: huge pages of up to three L2 pages, level-3 kinds with tails, runs and groups of layers."""
    kinds = []
    level2 = draw(st.sampled_from([("expert",), ("ssm",), ("expert", "ssm")]))
    for name in level2:
        size = HUGE // draw(st.integers(1, 3))
        kinds.append(PageKind(name=name, level=2, page_bytes=size, row_bytes=2, layers=2))
    for name in draw(st.sampled_from([(), ("kv",), ("kv", "conv")])):
        kinds.append(
            PageKind(
                name=name,
                level=3,
                page_bytes=2 * draw(st.integers(2, 20)),
                row_bytes=2,
                layers=2,
                page_tokens=16 if name == "kv" else 0,
                run=draw(st.integers(1, 3)) if name == "conv" else 1,
                groupable=name == "kv",
            )
        )
    try:
        layout = PageLayout.plan(kinds)
    except ValueError:  # a run that fits no parent
        assume(False)
        raise
    assume(layout.huge_page_multiple <= 10)
    return layout


class ByteModel:
    """The pool as single bytes; everything else is derived from them, slowly."""

    def __init__(self, layout: PageLayout, num_huge_pages: int) -> None:
        self.layout = layout
        self.num_huge_pages = num_huge_pages
        self.owner = np.full(layout.huge_page_bytes * num_huge_pages, FREE)
        self.live: dict[tuple[str, int], int] = {}  # (kind, id) -> owner or PENDING
        self.due: list[tuple[int, str, int]] = []  # pass, kind, id
        self.now = 0
        self.least_units = {
            placed.kind.name: min(
                len(self.rows_inside(placed, parent)) for parent in range(self.parents(placed))
            )
            for placed in layout.kinds
        }

    def parents(self, placed: PlacedKind) -> int:
        return len(self.owner) // self.parent_bytes(placed)

    def parent_bytes(self, placed: PlacedKind) -> int:
        return self.layout[placed.parent].stride_bytes if placed.parent else self.layout.huge_page_bytes

    def rows_inside(self, placed: PlacedKind, parent: int) -> list[int]:
        size, stride = self.parent_bytes(placed), placed.stride_bytes
        rows = [
            row
            for row in range(parent * size // stride, (parent + 1) * size // stride + 1)
            if parent * size <= row * stride and (row + 1) * stride <= (parent + 1) * size
        ]
        return rows[: len(rows) // placed.kind.run * placed.kind.run : placed.kind.run]

    def span(self, name: str, page: int) -> slice:
        placed = self.layout[name]
        return slice(page * placed.stride_bytes, (page + placed.kind.run) * placed.stride_bytes)

    def take(self, owner: int, name: str, page: int) -> None:
        placed, span = self.layout[name], self.span(name, page)
        assert self.layout.huge_page_bytes <= span.start and span.stop <= len(self.owner), (
            "scratch or outside"
        )
        parent_bytes = self.parent_bytes(placed)
        assert span.start // parent_bytes == (span.stop - 1) // parent_bytes, "a unit straddles two parents"
        assert (self.owner[span] == FREE).all(), (
            f"{name} {page}: bytes owned by {set(self.owner[span].tolist())}"
        )
        self.owner[span] = owner
        self.live[name, page] = owner

    def free(self, name: str, page: int, delay: int) -> None:
        if delay:
            self.owner[self.span(name, page)] = PENDING
            self.live[name, page] = PENDING
            self.due.append((self.now + delay, name, page))
        else:
            self.owner[self.span(name, page)] = FREE
            del self.live[name, page]

    def begin_pass(self) -> None:
        self.now += 1
        for _, name, page in [entry for entry in self.due if entry[0] == self.now]:
            self.free(name, page, 0)
        self.due = [entry for entry in self.due if entry[0] > self.now]

    def open_parents(self) -> tuple[dict[str, dict[int, int]], int]:
        """For each kind, units in use per split parent, and the number of free huge pages."""
        inside: dict[str, dict[int, int]] = {placed.kind.name: {} for placed in self.layout.kinds}
        for name, page in self.live:
            placed = self.layout[name]
            parent = page * placed.stride_bytes // self.parent_bytes(placed)
            inside[name][parent] = inside[name].get(parent, 0) + 1
        for placed in self.layout.kinds:
            if placed.parent:
                above = self.layout[placed.parent]
                for page in inside[placed.kind.name]:
                    parent = page * above.stride_bytes // self.layout.huge_page_bytes
                    inside[placed.parent][parent] = inside[placed.parent].get(parent, 0) + 1
        split = sum(len(inside[placed.kind.name]) for placed in self.layout.kinds if not placed.parent)
        return inside, self.num_huge_pages - 1 - split

    def missing_huge_pages(self, demand: dict[str, int]) -> int:
        """Fewest further huge pages with which `demand` fits, by trying every split of the free ones."""
        inside, free_huge = self.open_parents()
        room = {
            name: sum(self.least_units[name] - used for used in parents.values())
            for name, parents in inside.items()
        }
        level2 = [placed.kind.name for placed in self.layout.kinds if not placed.parent]
        need = {name: demand.get(name, 0) for name in level2}
        for placed in self.layout.kinds:
            if placed.parent:
                parents = 0
                while room[placed.kind.name] + parents * self.least_units[placed.kind.name] < demand.get(
                    placed.kind.name, 0
                ):
                    parents += 1
                need[placed.parent] += parents
        for more in itertools.count():
            for split in itertools.product(range(free_huge + more + 1), repeat=len(level2)):
                if sum(split) <= free_huge + more and all(
                    room[name] + huge * self.least_units[name] >= need[name]
                    for name, huge in zip(level2, split, strict=True)
                ):
                    return more
        raise AssertionError

    def emptiable_by_moving_experts(self) -> int:
        """Huge pages that moving pages of experts within the others that hold such pages can make free."""
        if self.least_units.get("expert", 1) == 1:
            return 0
        tenants: dict[int, set[tuple[str, int]]] = {}
        for (name, page), who in self.live.items():
            huge = self.span(name, page).start // self.layout.huge_page_bytes
            tenants.setdefault(huge, set()).add((name, who))
        inside = self.open_parents()[0]["expert"]
        room = sum(self.least_units["expert"] - used for used in inside.values())
        emptied = 0
        for used in sorted(used for huge, used in inside.items() if tenants[huge] == {("expert", EXPERTS)}):
            room -= self.least_units["expert"]  # its free units are gone, and its used ones go elsewhere
            if room < 0 or used == self.least_units["expert"]:
                break
            emptied += 1
        return emptied

    def free_expert_pages(self) -> int:
        inside, free_huge = self.open_parents()
        if "expert" not in inside:
            return free_huge
        per_huge = self.least_units["expert"]
        return sum(per_huge - used for used in inside["expert"].values()) + per_huge * free_huge


class AllocatorTraces(RuleBasedStateMachine):
    @initialize(layout=layouts(), huge_pages=st.integers(3, 9))
    def start(self, layout: PageLayout, huge_pages: int) -> None:
        multiple = layout.huge_page_multiple
        count = -(-huge_pages // multiple) * multiple
        self.layout = layout
        self.allocator = PageAllocator(layout, count)
        self.model = ByteModel(layout, count)
        self.initial = self.allocator.ledger()

    def demand(self, data: st.DataObject, most: int = 12) -> dict[str, int]:
        names = [placed.kind.name for placed in self.layout.kinds]
        units = st.one_of(st.integers(0, 4), st.integers(0, most))
        return data.draw(st.dictionaries(st.sampled_from(names), units, max_size=len(names)))

    @rule(data=st.data(), owner=st.sampled_from([BUFFERS, EXPERTS, 0, 0, 1, 2, 3, 4]))
    def allocate(self, data: st.DataObject, owner: int) -> None:
        demand = self.demand(data)
        before = snapshot(self.allocator)
        shortfall = self.allocator.shortfall([(owner, demand)])
        missing = self.model.missing_huge_pages(demand)
        assert (shortfall <= 0) == (missing == 0)
        if self.layout.kinds[0].kind.name != "expert" or self.layout.pages_per_huge("expert") == 1:
            assert max(0, shortfall) == missing
        taken = self.allocator.allocate(owner, demand)
        if taken is None:
            assert shortfall > 0
            assert snapshot(self.allocator) == before
            return
        assert shortfall == -self.allocator.free_expert_pages
        assert {name: len(ids) for name, ids in taken.items()} == demand
        for name, ids in taken.items():
            assert ids.dtype == np.int32
            for page in ids.tolist():
                self.model.take(owner, name, page)

    def held(self, owner: int | None = None) -> list[tuple[str, int, int]]:
        live = [(name, page, who) for (name, page), who in self.model.live.items() if who != PENDING]
        return sorted(entry for entry in live if owner in (None, entry[2]))

    @precondition(lambda self: self.held())
    @rule(data=st.data(), delay=st.integers(0, 3))
    def free(self, data: st.DataObject, delay: int) -> None:
        name, _, owner = data.draw(st.sampled_from(self.held()))
        pages = [page for kind, page, _ in self.held(owner) if kind == name]
        chosen = data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
        self.allocator.free(owner, name, np.array(chosen, np.int32), delay=delay)
        for page in chosen:
            self.model.free(name, page, delay)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), delay=st.integers(0, 3))
    def release(self, data: st.DataObject, delay: int) -> None:
        owner = data.draw(st.sampled_from(sorted({who for *_, who in self.held()})))
        self.allocator.release(owner, delay=delay)
        for name, page, _ in self.held(owner):
            self.model.free(name, page, delay)

    @rule(count=st.integers(1, 4))
    def consolidate(self, count: int) -> None:
        """As many huge pages become free as emptying those with the fewest experts, and nothing else, can give."""
        most = self.model.emptiable_by_moving_experts()
        before = self.allocator.ledger().free_huge_pages
        left, taken = self.allocator.consolidate(count)
        assert self.allocator.ledger().free_huge_pages - before == min(count, most)
        assert all(self.model.live["expert", page] == EXPERTS for page in left.tolist())
        for page in taken.tolist():
            self.model.take(EXPERTS, "expert", page)
        for page in left.tolist():
            self.model.free("expert", page, 0)

    @rule()
    def begin_pass(self) -> None:
        self.allocator.begin_pass()
        self.model.begin_pass()

    @rule(data=st.data())
    def what_fits_together_can_be_taken_one_by_one(self, data: st.DataObject) -> None:
        owners = data.draw(
            st.lists(st.sampled_from([EXPERTS, 0, 1, 2, 3, 4, 5]), min_size=2, max_size=5, unique=True)
        )
        demands = [(owner, self.demand(data, most=5)) for owner in owners]
        trial = copy.deepcopy(self.allocator)
        shortfall = trial.shortfall(demands)
        total = {
            placed.kind.name: sum(demand.get(placed.kind.name, 0) for _, demand in demands)
            for placed in self.layout.kinds
        }
        missing = self.model.missing_huge_pages(total)
        if shortfall <= 0:
            assert all(trial.allocate(owner, demand) is not None for owner, demand in demands)
            assert trial.free_expert_pages >= -shortfall
            trial.check_ledger()
        else:
            assert missing or sum(1 for units in total.values() if units) > 1
        assert missing == 0 or shortfall > 0

    @rule(data=st.data())
    def taken_together_they_get_the_same(self, data: st.DataObject) -> None:
        owners = data.draw(st.permutations([EXPERTS, 0, 1, 2, 3, 4, 5]))
        demands = [(owner, self.demand(data, most=5)) for owner in owners[: data.draw(st.integers(1, 7))]]
        alone, together = copy.deepcopy(self.allocator), copy.deepcopy(self.allocator)
        expected = []
        for owner, demand in demands:
            if (taken := alone.allocate(owner, demand)) is None:
                break
            expected.append({name: ids.tolist() for name, ids in taken.items()})
        taken = together.allocate_each(demands)
        assert [{name: ids.tolist() for name, ids in each.items()} for each in taken] == expected
        together.check_ledger()
        assert snapshot(together) == snapshot(alone)

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_ledger()
        ledger = self.allocator.ledger()
        inside, free_huge = self.model.open_parents()
        assert ledger.free_huge_pages == free_huge
        assert self.allocator.free_expert_pages == self.model.free_expert_pages()
        for name, counts in ledger.kinds.items():
            live = [who for (kind, _), who in self.model.live.items() if kind == name]
            assert counts.total == len(inside[name]) * self.model.least_units[name]
            assert counts.pending == live.count(PENDING)
            assert counts.pinned == live.count(BUFFERS)
            assert counts.used == len(live) - counts.pending - counts.pinned
            for owner in {*live} - {PENDING}:
                assert self.allocator.holds(owner)[name] == live.count(owner)

    @invariant()
    def returning_pages_return(self) -> None:
        if not hasattr(self, "allocator"):
            return
        later = copy.deepcopy(self.model)
        while later.due:
            later.begin_pass()
        returning = later.free_expert_pages() - self.model.free_expert_pages()
        assert self.allocator.returning_expert_pages == returning

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for owner in {who for *_, who in self.held()}:
            self.allocator.release(owner, delay=owner % 2)
        for _ in range(3):
            self.allocator.begin_pass()
        self.allocator.check_ledger()
        assert self.allocator.ledger() == self.initial


def snapshot(allocator: PageAllocator) -> dict[str, Any]:
    """Everything a failed allocation must not touch."""
    return {
        "ledger": allocator.ledger(),
        "holds": [allocator.holds(owner) for owner in range(-2, 6)],
        "occupants": [store.occupant.tolist() for store in allocator._stores],
        "owners": [store.owner.tolist() for store in allocator._stores],
        "tenants": sorted(allocator._tenants),
    }


TestAllocatorTraces = AllocatorTraces.TestCase
TestAllocatorTraces.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
