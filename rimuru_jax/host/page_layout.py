"""Where pages of every kind lie in the page pool: the plan of sizes, strides and parents.

The pool is cut on demand, one level at a time, and every level sees it as one array of rows:

    L1   | huge page 0 (scratch)   | huge page 1             | ...        P_h = lcm of the L2 strides
    L2   | expert     | expert     | ssm | ssm | ssm | ssm   | ...        whole pages: each stride divides P_h
    L3   |k|k|k|k|k|k||            |c|c|c.c|c|c|             | ...        rows wholly inside their L2 page

A page's id is its row number in the view `[pool_bytes / stride_bytes, stride_bytes]` of its kind, whichever
parent it was cut from, so one integer names a page to every kernel. At L3 a row that straddles two parents
belongs to neither: that tail is the price of strides that need not divide their parent.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import numpy as np
import numpy.typing as npt

EXPERT = "expert"
"""Name of the kind that holds expert weights; every other kind belongs to sequences."""

MAX_HUGE_PAGE_RATIO = 8
"""Largest huge page, in pages of the largest L2 kind; above it L2 sequence pages are padded.

Published models have a ratio of 1 or 2 (Qwen3-Next: 2 over 2 MiB; Qwen3.5-122B: 12 over 6 MiB), except for
Nemotron-3-Nano's 64 and 128 (609 MiB and 1.19 GiB over 9.516 MiB); 8 is midway between these groups.
"""

WORD_BYTES = 2
"""The pool is an array of uint16 words."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageKind:
    """One kind of page a model needs, before placement.

    Raises ValueError for sizes that no pool could hold.
    """

    name: str
    """ "expert", "kv", "ssm", "conv", or one of your own."""
    level: int
    """2: a whole L2 page; 3: cut from an L2 page."""
    page_bytes: int
    """Bytes one page must hold (one layer)."""
    row_bytes: int
    """Innermost row of the kernel view, bytes: a padded stride stays a multiple of it."""
    layers: int
    """Layers that own such pages (for "expert": MoE layers)."""
    page_tokens: int = 0
    """Tokens one page covers; 0: constant per sequence (or, for "expert", not per sequence)."""
    run: int = 1
    """Consecutive pages that make one unit (a conv state: kernel - 1 rows)."""
    groupable: bool = False
    """Whether one page may hold several layers."""

    def __post_init__(self) -> None:
        for field in ("page_bytes", "row_bytes", "layers", "run"):
            if getattr(self, field) <= 0:
                raise ValueError(
                    f"{field} of page kind {self.name!r} is {getattr(self, field)}, it must be positive"
                )
        if self.page_tokens < 0:
            raise ValueError(
                f"page_tokens of page kind {self.name!r} is {self.page_tokens}, it must not be negative"
            )
        if self.level not in (2, 3):
            raise ValueError(f"level of page kind {self.name!r} is {self.level}, it must be 2 or 3")
        if self.level == 2 and (self.run > 1 or self.groupable):
            raise ValueError(
                f"page kind {self.name!r} is of level 2: only level 3 has runs of pages or groups layers"
            )
        if self.name == EXPERT and (self.level != 2 or self.page_tokens):
            raise ValueError(f"page kind {EXPERT!r} holds weights: it must be of level 2 with page_tokens 0")
        if self.page_bytes % self.row_bytes:
            raise ValueError(
                f"page_bytes of page kind {self.name!r} is {self.page_bytes}, "
                f"it must be a multiple of its row_bytes, {self.row_bytes}"
            )
        if self.page_bytes % WORD_BYTES:
            raise ValueError(
                f"page_bytes of page kind {self.name!r} is {self.page_bytes}, "
                f"it must be a multiple of the pool's words of {WORD_BYTES} bytes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedKind:
    """A page kind with its place in the pool, and the arithmetic between its ids and its parents' ids.

    A *parent* is an L2 page of kind `parent` for level 3, a huge page for level 2. A *unit* is what is
    allocated: `kind.run` consecutive pages, named by the id of the first. Ids may come as any integer array;
    the arithmetic is int64, because byte offsets exceed int32.
    """

    kind: PageKind
    stride_bytes: int
    """Distance between pages of the kind in the pool, bytes; the pool is a whole number of strides."""
    layers_per_page: int
    """Layers g that share a page: g one-layer pages, of which layer i has the one-layer id `id * g + i`."""
    parent: str | None
    """Level 3: the L2 kind whose pages it is cut from; level 2: None, the parent is a huge page."""
    parent_bytes: int
    """Distance between parents in the pool, bytes."""

    @property
    def layer_stride_bytes(self) -> int:
        """Distance between one-layer pages, bytes: the row of a kernel's view of the pool."""
        return self.stride_bytes // self.layers_per_page

    @property
    def tables(self) -> int:
        """Page tables per sequence (for "expert": per model)."""
        return self.kind.layers // self.layers_per_page

    @property
    def units_per_parent(self) -> int:
        """Units every parent holds, wherever in the pool it lies."""
        return _least_units(self.parent_bytes, self.stride_bytes, self.kind.run)

    @property
    def waste(self) -> float:
        """Share of the worst placed parent's bytes that holds nothing, tail and padding together."""
        content = self.units_per_parent * self.kind.run * self.layers_per_page * self.kind.page_bytes
        return 1 - content / self.parent_bytes

    def units_for(self, num_tokens: int) -> int:
        """Units one sequence of `num_tokens` tokens needs, over all its tables (0 for "expert")."""
        if self.kind.name == EXPERT:
            return 0
        if self.kind.page_tokens == 0:
            return self.tables
        return self.tables * -(-num_tokens // self.kind.page_tokens)

    def first_page(self, parents: npt.ArrayLike) -> Ids:
        """First page that lies wholly inside each parent: ids `[...]` of parents to ids `[...]`."""
        return -(-np.asarray(parents, np.int64) * self.parent_bytes // self.stride_bytes)

    def unit_ids(self, parents: npt.ArrayLike) -> Ids:
        """Ids of all units of each parent: `[...]` to `[..., units_per_parent]`, ascending."""
        return self.first_page(parents)[..., None] + self.kind.run * np.arange(self.units_per_parent)

    def locate(self, units: npt.ArrayLike) -> tuple[Ids, Ids]:
        """The inverse of `unit_ids`: unit ids `[...]` to parents' ids and indices in them, both `[...]`."""
        units = np.asarray(units, np.int64)
        parents = units * self.stride_bytes // self.parent_bytes
        return parents, (units - self.first_page(parents)) // self.kind.run


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """The plan of a page pool: made by `PageLayout.plan`, independent of the pool's size."""

    huge_page_bytes: int
    """Size of a huge page: the least common multiple of the L2 strides."""
    kinds: tuple[PlacedKind, ...]
    """All kinds, "expert" first when present."""

    @classmethod
    def plan(cls, kinds: Iterable[PageKind]) -> Self:
        """Choose strides, parents and grouping with the least waste.

        - L2: unpadded while the least common multiple is at most `MAX_HUGE_PAGE_RATIO` pages of the largest
          kind. Otherwise the huge page is the smallest multiple of the expert page (without one: of the
          largest page) that every other kind divides when padded by at most a quarter, all layers together;
          if there is none, the one that pads least. The expert page itself is never padded.
        - L3: never padded. The parent is the L2 kind that wastes the least, "expert" on a tie.
        - A groupable kind shares its page between as many layers as waste no more than one layer alone, neither
          in a parent nor by making the pool's size coarser.

        Raises ValueError, in one sentence with the sizes, when no such plan exists.
        """
        kinds = sorted(kinds, key=lambda kind: kind.name != EXPERT)
        names = [kind.name for kind in kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"page kinds must have distinct names, got {', '.join(names)}")
        level2 = [kind for kind in kinds if kind.level == 2]
        if not level2:
            raise ValueError(
                f"a page pool needs at least one kind of level 2, got {', '.join(names) or 'no kind'}"
            )

        strides = _level2_strides(level2)
        huge_page_bytes = math.lcm(*strides.values())
        return cls(
            huge_page_bytes=huge_page_bytes,
            kinds=tuple(
                PlacedKind(
                    kind=kind,
                    stride_bytes=strides[kind.name],
                    layers_per_page=1,
                    parent=None,
                    parent_bytes=huge_page_bytes,
                )
                if kind.level == 2
                else _place_level3(kind, strides, huge_page_bytes)
                for kind in kinds
            ),
        )

    def __getitem__(self, name: str) -> PlacedKind:
        for placed in self.kinds:
            if placed.kind.name == name:
                return placed
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return any(placed.kind.name == name for placed in self.kinds)

    @property
    def sequence_kinds(self) -> tuple[PlacedKind, ...]:
        """The kinds that belong to sequences: all but "expert"."""
        return tuple(placed for placed in self.kinds if placed.kind.name != EXPERT)

    def pages_per_huge(self, name: str) -> int:
        """Pages of a level-2 kind in one huge page."""
        placed = self[name]
        if placed.parent is not None:
            raise ValueError(f"{name!r} pages are cut from {placed.parent!r} pages, not from huge pages")
        return placed.units_per_parent

    @property
    def huge_page_multiple(self) -> int:
        """A pool's number of huge pages is a multiple of this, so that every stride divides the pool."""
        return math.lcm(*(_rounding(placed.stride_bytes, self.huge_page_bytes) for placed in self.kinds))

    def num_huge_pages(self, pool_bytes: int) -> int:
        """Huge pages, scratch page included, of the largest pool within `pool_bytes` bytes.

        Raises ValueError when less than the scratch page and one more fit.
        """
        multiple = self.huge_page_multiple
        count = pool_bytes // (self.huge_page_bytes * multiple) * multiple
        if count < 2:
            least = max(2, multiple) * self.huge_page_bytes
            raise ValueError(
                f"page_pool_bytes is {pool_bytes}, it must be at least {least} ({format_bytes(least)}): "
                f"a multiple of {multiple} huge pages of {self.huge_page_bytes} bytes, one of them scratch"
            )
        return count

    def describe(self) -> str:
        """The plan in words, one aligned line per kind, for the log at start-up."""
        header = ("kind", "level", "page", "stride", "parent", "units/parent", "waste", "tables", "why")
        rows = [header, *(self._describe_kind(placed) for placed in self.kinds)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        contents = " or ".join(
            f"{placed.units_per_parent} {placed.kind.name}" for placed in self.kinds if placed.parent is None
        )
        multiple = self.huge_page_multiple
        pool = f"pool in steps of {multiple} ({format_bytes(multiple * self.huge_page_bytes)})"
        summary = [f"huge page {format_bytes(self.huge_page_bytes)} = {contents}; {pool}"]
        if self.sequence_kinds:
            demand = {placed.kind.name: placed.units_for(1) for placed in self.sequence_kinds}
            least = sum(
                demand[placed.kind.name] * placed.kind.run * placed.stride_bytes
                for placed in self.sequence_kinds
            )
            units = " + ".join(f"{count} {name}" for name, count in demand.items())
            summary.append(f"shortest sequence {format_bytes(least)} = {units} units")
        return "\n".join([*summary, *lines])

    def to_json(self) -> dict[str, Any]:
        """The plan as plain numbers and strings, sizes in bytes."""
        kinds = []
        for placed in self.kinds:
            fields = dataclasses.asdict(placed)
            derived = {name: getattr(placed, name) for name in ("units_per_parent", "tables", "waste")}
            kinds.append({**fields.pop("kind"), **fields, **derived})
        return {
            "huge_page_bytes": self.huge_page_bytes,
            "huge_page_multiple": self.huge_page_multiple,
            "kinds": kinds,
        }

    def _describe_kind(self, placed: PlacedKind) -> tuple[str, ...]:
        kind = placed.kind
        page = format_bytes(kind.page_bytes)
        padding = placed.layer_stride_bytes - kind.page_bytes
        return (
            kind.name,
            f"L{kind.level}",
            f"{kind.run} x {page}" if kind.run > 1 else page,
            format_bytes(placed.stride_bytes) + (f" (+{format_bytes(padding)})" if padding else ""),
            placed.parent or "huge page",
            str(placed.units_per_parent),
            f"{placed.waste:.2%}",
            "-" if kind.name == EXPERT else str(placed.tables),
            self._why_level2(placed) if placed.parent is None else self._why_level3(placed),
        )

    def _why_level2(self, placed: PlacedKind) -> str:
        sizes = [other.kind.page_bytes for other in self.kinds if other.parent is None]
        if placed.stride_bytes > placed.kind.page_bytes:
            return f"padded: the least common multiple would be {format_bytes(math.lcm(*sizes))}"
        if len(sizes) == 1:
            return "the only L2 kind is the huge page"
        if math.lcm(*sizes) == self.huge_page_bytes:
            return f"not padded: the least common multiple is {format_bytes(self.huge_page_bytes)}"
        return "not padded: other kinds are padded to it"

    def _why_level3(self, placed: PlacedKind) -> str:
        kind = placed.kind
        others = [
            f"{other.kind.name} (waste {float(1 - _use(other.stride_bytes, kind)):.2%})"
            for other in self.kinds
            if other.parent is None and other.kind.name != placed.parent
        ]
        reasons = [f"rather than {' or '.join(others)}" if others else "the only L2 kind"]
        if placed.parent_bytes % placed.stride_bytes:
            reasons.append("does not divide it, rows at its ends are lost")
        elif placed.waste:
            reasons.append(f"runs of {kind.run} leave a rest")
        if placed.layers_per_page > 1:
            reasons.append(f"{placed.layers_per_page} of {kind.layers} layers share a page at no more waste")
        elif kind.groupable and kind.layers > 1:
            reasons.append("layers that share a page would waste more")
        return "; ".join(reasons)


def format_bytes(num_bytes: int) -> str:
    """A size for people, four digits: `format_bytes(9977856) == "9.516 MiB"`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"


def _least_units(parent_bytes: int, stride_bytes: int, run: int) -> int:
    """Runs of whole rows inside the worst placed parent.

    Parents start at all multiples of gcd(parent, stride) modulo the stride; the worst, just after a row did.
    """
    lost = (stride_bytes - math.gcd(parent_bytes, stride_bytes)) if parent_bytes % stride_bytes else 0
    return max(0, parent_bytes - lost) // stride_bytes // run


def _rounding(stride_bytes: int, huge_page_bytes: int) -> int:
    """Least number of huge pages that is a whole number of strides."""
    return stride_bytes // math.gcd(stride_bytes, huge_page_bytes)


def _use(parent_bytes: int, kind: PageKind) -> Fraction:
    """Share of a parent that pages of one layer each fill, exactly: parents are compared by it."""
    return Fraction(
        _least_units(parent_bytes, kind.page_bytes, kind.run) * kind.run * kind.page_bytes, parent_bytes
    )


def _place_level3(kind: PageKind, parents: dict[str, int], huge_page_bytes: int) -> PlacedKind:
    """Place a level-3 kind; `parents` gives the strides of the L2 kinds, "expert" first."""
    parent = max(parents, key=lambda name: _use(parents[name], kind))  # the first of equals
    parent_bytes = parents[parent]
    units = _least_units(parent_bytes, kind.page_bytes, kind.run)
    if units == 0:
        sizes = ", ".join(f"{name} {stride} bytes" for name, stride in parents.items())
        raise ValueError(
            f"{kind.name!r} needs {kind.run} whole pages of {kind.page_bytes} bytes in a row, for which every "
            f"L2 page is too small ({sizes}): give its page fewer tokens or make it a kind of level 2"
        )

    def costs_nothing(layers: int) -> bool:
        stride = layers * kind.page_bytes
        same_rounding = _rounding(stride, huge_page_bytes) == _rounding(kind.page_bytes, huge_page_bytes)
        return same_rounding and layers * _least_units(parent_bytes, stride, kind.run) >= units

    sizes = (
        layers for layers in range(kind.layers, 1, -1) if kind.layers % layers == 0 and costs_nothing(layers)
    )
    layers_per_page = next(sizes, 1) if kind.groupable else 1
    return PlacedKind(
        kind=kind,
        stride_bytes=layers_per_page * kind.page_bytes,
        layers_per_page=layers_per_page,
        parent=parent,
        parent_bytes=parent_bytes,
    )


def _level2_strides(kinds: Sequence[PageKind]) -> dict[str, int]:
    """Strides of the L2 kinds, in bytes ("expert" first when present): see `PageLayout.plan` for the rule."""
    sizes = {kind.name: kind.page_bytes for kind in kinds}
    largest = max(sizes.values())
    limit = MAX_HUGE_PAGE_RATIO * largest
    if math.lcm(*sizes.values()) <= limit:
        return sizes

    anchor = kinds[0] if kinds[0].name == EXPERT else max(kinds, key=lambda kind: kind.page_bytes)
    padded = [kind for kind in kinds if kind is not anchor]
    content = sum(kind.layers * kind.page_bytes for kind in padded)
    best: tuple[tuple[int, int], dict[str, int]] | None = None
    first = -(-largest // anchor.page_bytes) * anchor.page_bytes
    for huge_page_bytes in range(first, limit + 1, anchor.page_bytes):
        strides = {kind.name: _smallest_stride(kind, huge_page_bytes) for kind in padded}
        if not all(strides.values()):
            continue
        total = sum(kind.layers * strides[kind.name] for kind in padded)
        # Up to a quarter of padding all strides count alike, so that the smaller huge page wins.
        cost = (max(4 * total, 5 * content), huge_page_bytes)
        if best is None or cost < best[0]:
            best = cost, strides
    if best is None:
        rows = ", ".join(f"{kind.name!r} {kind.page_bytes} in rows of {kind.row_bytes}" for kind in kinds)
        raise ValueError(
            f"L2 pages have no common huge page within {limit} bytes ({MAX_HUGE_PAGE_RATIO} x the largest), "
            f"even padded by whole rows: {rows} (bytes); change a dtype or the model's sharding"
        )
    return sizes | best[1]


def _smallest_stride(kind: PageKind, huge_page_bytes: int) -> int:
    """Least stride that holds a page, is a multiple of the row and divides the huge page; 0: there is none."""
    row = math.lcm(kind.row_bytes, WORD_BYTES)
    if huge_page_bytes % row:
        return 0
    pages = huge_page_bytes // kind.page_bytes
    while huge_page_bytes // row % pages:
        pages -= 1
    return huge_page_bytes // pages
