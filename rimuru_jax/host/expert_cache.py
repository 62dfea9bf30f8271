"""Which experts live in the page pool, on which pages, and what the next step is shown of them.

pass p       expand: pages are taken and the copy is listed in step p      shrink: gone from the table of step p
step p       reads the expert where it was (loading buffer or host)        no longer reads the pages
pass p + 1   the table shows the pages                                     pages come back after `reclaim_delay`

Where a huge page holds several expert pages, `consolidate` moves experts together so that whole huge pages become free.

Within a layer, `swap` lets an absent expert take the place of a resident one: the same pages, copied over before step p,
whose table shows the newcomer on them. No pages change hands, so that nobody ever waits for a swap.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rimuru_jax.host.allocator import BUFFERS, EXPERTS, PageAllocator
from rimuru_jax.host.page_layout import EXPERT, format_bytes
from rimuru_jax.host.residency import ResidencyPolicy

HOST = -1
"""In an expert table: read this matrix from page-locked host memory."""

COPIED_SHARE = 1 / 8
"""Experts copied before or within a step, of those that it will read from the host: no step takes much longer for it."""
MOST_COPIES = 32


class ExpertCopy(NamedTuple):
    """One expert to copy from host memory into the pool: page ids of its matrices, in order."""

    layer: int
    expert: int
    pages: tuple[int, ...]


class PageMove(NamedTuple):
    """One expert matrix to copy from a page of the pool to another."""

    source: int
    target: int


class ExpertCache:
    """Owns the pages of resident experts and of the loading buffers, and the expert table.

    Every layer keeps at least `floor` = num_experts - expert_offload_limit experts resident once `fill` has run. Two
    sets of loading buffers hold as many experts as a layer lacks on average, up to `buffer_experts` each; layer l uses
    set l % 2.

    Attributes:
      table: int32[L, E, m], page id or HOST per matrix: resident experts only, as the next step sees them.
      resident: bool[L, E], experts shown in `table`.
      buffer_pages: int32[2, B, m], pages of the loading buffers as the next step sees them.
      version: changes whenever `step_tables` would return something else.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        matrices: int,
        allocator: PageAllocator,
        policy: ResidencyPolicy,
        expert_offload_limit: int,
        buffer_experts: int,
        reclaim_delay: int = 1,
    ):
        if not 0 <= expert_offload_limit <= num_experts:
            raise ValueError(
                f"expert_offload_limit is {expert_offload_limit}, "
                f"it must be between 0 and the {num_experts} experts of a layer"
            )
        if policy.scores().shape != (num_layers, num_experts):
            raise ValueError(
                f"the residency policy ranks experts of shape {policy.scores().shape}, "
                f"the model has {(num_layers, num_experts)}"
            )
        self.matrices = matrices
        self.floor = num_experts - expert_offload_limit
        self.buffer_experts = min(buffer_experts, expert_offload_limit)
        self.table = np.full((num_layers, num_experts, matrices), HOST, np.int32)
        self.resident = np.zeros((num_layers, num_experts), bool)
        self.version = 0
        self._allocator = allocator
        self._policy = policy
        self._reclaim_delay = reclaim_delay
        self._per_layer = np.zeros(num_layers, np.int64)  # resident experts of each layer
        self._held = self.resident.copy()  # resident, or copied in the step being planned
        self._arriving: list[ExpertCopy] = []
        self._effective = self.table.copy()
        self._loads = np.full((num_layers, self.buffer_experts), -1, np.int32)
        self._stale_layers = np.ones(num_layers, bool)  # rows of _effective and _loads to be made anew
        self._ranked: tuple[int, np.ndarray] | None = None
        self._swaps: list[tuple[int, int, int]] = []  # layer, comes, goes: those that pay, the worst first
        self._swaps_at_once = 0
        self._swaps_of = self._loads_of = policy.version  # that `_swaps` and `_loads` follow
        self._load_chances: tuple[int, np.ndarray] | None = None  # of a version of the policy
        self.buffer_pages = np.zeros((2, 0, matrices), np.int32)
        need, free = self.most_buffer_pages, allocator.free_expert_pages
        if need > free:
            page = allocator.layout[EXPERT].stride_bytes
            raise ValueError(
                f"two loading buffers of {self.buffer_experts} experts take {need} pages "
                f"({format_bytes(need * page)}), but the pool has {free}: "
                "raise page_pool_bytes or lower loading_buffer_experts"
            )

    @property
    def floor_pages(self) -> int:
        """Expert pages held when every layer is at its floor, loading buffers included."""
        return len(self.resident) * self.floor * self.matrices + self.most_buffer_pages

    @property
    def most_buffer_pages(self) -> int:
        """Pages of the loading buffers when they are largest."""
        return 2 * self.buffer_experts * self.matrices

    @property
    def shrinkable_experts(self) -> int:
        """Resident experts above the floor of their layers."""
        return int(np.maximum(self._per_layer - self.floor, 0).sum())

    @property
    def shrinkable_pages(self) -> int:
        """Expert pages that giving up all shrinkable experts would return."""
        return self.shrinkable_experts * self.matrices

    @property
    def resident_experts(self) -> int:
        """Experts shown in `table`."""
        return int(self._per_layer.sum())

    @property
    def num_experts(self) -> int:
        """Experts of all layers."""
        return self._held.size

    @property
    def absent_experts(self) -> int:
        """Experts that hold no pages."""
        return int(self._held.size - np.count_nonzero(self._held))

    @property
    def experts_to_smaller_buffers(self) -> int:
        """Experts that must become resident for each loading buffer to need one expert less; 0 if none can."""
        held = self.buffer_pages.shape[1]
        return max(0, self.absent_experts - len(self.resident) * (held - 1)) if held else 0

    def copies_at_once(self, tokens: int) -> int:
        """Experts whose copies a step of `tokens` tokens can bear beside what it reads from the host."""
        reads = np.minimum(tokens * self._policy.token_chances()[~self._held], 1).sum()
        return min(MOST_COPIES, max(1, int(reads * COPIED_SHARE)))

    def fill(self, keep_free_pages: int) -> list[ExpertCopy]:
        """Start-up: make experts resident, most probable first, and return the copies to do before the first step.

        Every layer gets its floor in any case; beyond it, as many experts as leave `keep_free_pages` expert-sized
        pages free. Raises ValueError when the floor does not fit.
        """
        layers, experts = self.resident.shape
        order = self._order()
        per_layer = order[np.argsort(order // experts, kind="stable")].reshape(layers, experts)
        floor = per_layer[:, : self.floor].ravel()
        above = order[~np.isin(order, floor)]
        free = self._allocator.free_expert_pages
        chosen, buffers = floor, 0
        for buffers in range(self.buffer_experts + 1):
            room = free - keep_free_pages - 2 * buffers * self.matrices
            chosen = np.concatenate([floor, above[: max(0, room // self.matrices - len(floor))]])
            if len(order) - len(chosen) <= buffers * layers:
                break
        copies = self._take(chosen)
        if copies is None or not self._resize_buffers(buffers):
            page = self._allocator.layout[EXPERT].stride_bytes
            need = len(floor) * self.matrices + self.most_buffer_pages
            raise ValueError(
                f"{self.floor} of {experts} experts per layer must be resident, which takes {need} pages "
                f"({format_bytes(need * page)}) of the {free} ({format_bytes(free * page)}) left in the pool: "
                "raise page_pool_bytes or expert_offload_limit"
            )
        self._show(copies)
        return copies

    def begin_pass(self) -> None:
        """Show the experts whose copies the previous pass listed."""
        if self._arriving:
            self._show(self._arriving)
            self._arriving = []
        self.fit_buffers(0)
        self._follow_policy()

    def expand(self, n: int) -> list[ExpertCopy]:
        """Take pages for the `n` most probable absent experts (see `_choose`); shown in the table from the next pass on.

        Returns the copies for the step being planned; none when fewer experts are absent or fewer pages are free.
        """
        absent = self._choose(n, ~self._held, likely=True)
        copies = self._take(absent) if len(absent) == n else None
        self._arriving += copies or []
        return copies or []

    def shrink(self, n: int) -> int:
        """Give up the `n` least probable resident experts that are above their layer's floor; return how many."""
        victims = self._choose(n, self.resident, likely=False)
        if len(victims):
            where = np.divmod(victims, self.resident.shape[1])
            self._allocator.free(EXPERTS, EXPERT, self.table[where].ravel(), delay=self._reclaim_delay)
            self.table[where] = HOST
            self.resident[where] = self._held[where] = False
            self._per_layer -= np.bincount(where[0], minlength=len(self._per_layer))
            self._stale_layers[where[0]] = True
            self.version += 1
        return len(victims)

    def swap(self) -> list[ExpertCopy]:
        """Exchange resident experts for absent ones of their layers where the policy says it pays; few at once.

        Returns the copies to make before the step being planned, whose table shows them: over pages that every earlier
        step has read by then, after the page moves.
        """
        if self._swaps_of != self._policy.version:
            self._swaps_of, self._swaps = self._policy.version, self._paying_swaps()
            reads = self._policy.scores()[~self._held].sum() if self._swaps else 0
            self._swaps_at_once = min(MOST_COPIES, max(1, int(reads * COPIED_SHARE)))
        copies: list[ExpertCopy] = []
        while self._swaps and len(copies) < self._swaps_at_once:
            layer, comes, goes = self._swaps.pop()
            if self._held[layer, comes] or not self.resident[layer, goes]:
                continue  # moved since
            pages = self.table[layer, goes].copy()
            for shown in (self.resident, self._held):
                shown[layer, goes], shown[layer, comes] = False, True
            self.table[layer, goes], self.table[layer, comes] = HOST, pages
            self._stale_layers[layer] = True
            copies.append(ExpertCopy(layer, comes, tuple(pages.tolist())))
        self.version += bool(copies)
        return copies

    def fit_buffers(self, spare_pages: int) -> None:
        """Size the loading buffers by the experts that a layer lacks on average; they grow within `spare_pages`."""
        layers, experts = self.resident.shape
        absent = layers * experts - self.resident_experts
        affordable = self.buffer_pages.shape[1] + spare_pages // (2 * self.matrices)
        self._resize_buffers(min(self.buffer_experts, -(-absent // layers), affordable))

    def consolidate(self, num_huge_pages: int) -> list[PageMove]:
        """Move pages of resident experts together until up to `num_huge_pages` more huge pages are free.

        Returns the copies to make before the step being planned, in which the experts are on their new pages. Pages
        that are left are free at once, since that step comes after everything that read them.
        """
        assert not self._arriving, "pages move before experts are taken back in a pass"
        sources, targets = (ids.tolist() for ids in self._allocator.consolidate(num_huge_pages))
        if sources:
            moved = dict(zip(sources, targets, strict=True))
            for layer, expert, matrix in np.argwhere(np.isin(self.table, sources)).tolist():
                self.table[layer, expert, matrix] = moved[int(self.table[layer, expert, matrix])]
                self._stale_layers[layer] = True
            self.version += 1
        return list(map(PageMove, sources, targets))

    def observe(self, counts: np.ndarray, tokens: int, rows: int) -> None:
        """Pass the router counts `int[L, E]` of a step over `tokens` tokens of `rows` requests to the policy."""
        self._policy.observe(counts, tokens, rows)

    def step_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """What the step being planned reads, as copies.

        Returns:
          int32[L, E, m]: `table` with the loading buffers overlaid.
          int32[L, B]: experts to copy into set l % 2 before layer l computes, -1 where there are fewer: the absent
            experts of the layer, most probable first. Absent experts beyond B are read from the host in place. The
            order is the policy's when the residency of the layer last changed, or when it last made a clear difference.
        """
        layers, buffers = np.flatnonzero(self._stale_layers), self.buffer_pages.shape[1]
        resident = self.resident[layers]
        absent_first = np.where(resident, np.inf, -self._policy.scores()[layers])
        away = np.argsort(absent_first, axis=1, kind="stable")[:, :buffers]
        is_away = ~np.take_along_axis(resident, away, axis=1)
        self._loads[layers] = -1
        self._loads[layers, :buffers] = np.where(is_away, away, -1)
        self._effective[layers] = self.table[layers]
        row, place = np.nonzero(is_away)
        self._effective[layers[row], away[row, place]] = self.buffer_pages[layers[row] % 2, place]
        self._stale_layers[:] = False
        self._load_chances = None
        return self._effective.copy(), self._loads.copy()

    def load_chances(self) -> np.ndarray:
        """float64[n]: the chance that one token chooses each expert that the last `step_tables` has in loading buffers."""
        version = self._policy.version
        if self._load_chances is None or self._load_chances[0] != version:
            layer, place = np.nonzero(self._loads >= 0)
            chances = self._policy.token_chances()[layer, self._loads[layer, place]]
            self._load_chances = (version, chances)
        return self._load_chances[1]

    def _follow_policy(self) -> None:
        """Mark layers where an expert that is read in place has clearly become likelier than one in a loading buffer."""
        if self._loads_of == self._policy.version:
            return
        self._loads_of, scores = self._policy.version, self._policy.scores()
        loaded = np.zeros_like(self.resident)
        layer, place = np.nonzero(self._loads >= 0)
        loaded[layer, self._loads[layer, place]] = True
        in_place = np.where(self.resident | loaded, 0.0, scores).max(axis=1)
        stale = self._policy.worth_swapping(in_place, np.where(loaded, scores, 1.0).min(axis=1))
        if stale.any():
            self._stale_layers |= stale
            self.version += 1

    def _paying_swaps(self) -> list[tuple[int, int, int]]:
        """(layer, expert that comes, expert that goes) of all swaps that pay, those that pay most at the end."""
        scores, pays = self._policy.scores(), self._policy.worth_swapping
        coming, going = np.where(self._held, 0.0, scores), np.where(self.resident, scores, 1.0)
        layers = np.flatnonzero(pays(coming.max(axis=1), going.min(axis=1)))
        if not len(layers):
            return []
        # The likeliest of the absent for the least likely of the resident, the second for the second, ...
        coming, going = coming[layers], going[layers]
        comes, goes = np.argsort(-coming, axis=1, kind="stable"), np.argsort(going, axis=1, kind="stable")
        coming, going = np.take_along_axis(coming, comes, 1), np.take_along_axis(going, goes, 1)
        where = np.nonzero(pays(coming, going))
        order = np.argsort((coming - going)[where], kind="stable")
        found = (layers[where[0]], comes[where], goes[where])
        return list(zip(*(values[order].tolist() for values in found), strict=True))

    def _resize_buffers(self, experts: int) -> bool:
        """Make each set of loading buffers as large as `experts`, if there are pages for it; whether it now is."""
        held = self.buffer_pages.shape[1]
        if experts < held:
            leaving = self.buffer_pages[:, experts:].ravel()
            self._allocator.free(BUFFERS, EXPERT, leaving, delay=self._reclaim_delay)
            self.buffer_pages = self.buffer_pages[:, :experts].copy()
        elif experts > held:
            ids = self._allocator.allocate(BUFFERS, {EXPERT: 2 * (experts - held) * self.matrices})
            if ids is None:
                return False
            more = ids[EXPERT].reshape(2, experts - held, self.matrices).astype(np.int32)
            self.buffer_pages = np.concatenate([self.buffer_pages, more], axis=1)
        if experts != held:
            self._stale_layers[:] = True
            self.version += 1
        return True

    def _order(self) -> np.ndarray:
        """All experts as layer * E + expert, most worth keeping first."""
        layers, experts = self.resident.shape
        expert, layer = np.divmod(np.argsort(-self._policy.scores().T, axis=None, kind="stable"), layers)
        return layer * experts + expert

    def _choose(self, n: int, candidates: np.ndarray, *, likely: bool) -> np.ndarray:
        """Up to `n` of the candidates as layer * E + expert: most worth keeping first if `likely`, else last.

        Where the policy sees no clear difference the layer decides that has the fewest experts, or the most: what a
        layer fetches hides behind what one layer computes, so that many absent from one cost more than few from each.
        """
        scores = self._policy.scores()
        if self._ranked is None or self._ranked[0] != self._policy.version:
            self._ranked = (self._policy.version, np.argsort(-scores, axis=1, kind="stable"))
        order = self._ranked[1] if likely else self._ranked[1][:, ::-1]
        left = np.take_along_axis(candidates, order, axis=1)
        held = self._held.sum(axis=1) if likely else self._per_layer.copy()
        sign = 1 if likely else -1
        head = left.argmax(axis=1)
        rows = np.arange(len(left))
        expert = order[rows, head]
        score = scores[rows, expert]
        chosen: list[int] = []
        for _ in range(n):
            usable = left[rows, head] if likely else left[rows, head] & (held > self.floor)
            layers = np.flatnonzero(usable)
            if not len(layers):
                break
            values = score[layers]
            if likely:
                equal = layers[~self._policy.clearly_above(values.max(), values)]
            else:
                equal = layers[~self._policy.clearly_above(values, values.min())]
            layer = equal[np.lexsort((sign * equal, -sign * score[equal], sign * held[equal]))[0]]
            chosen.append(layer * left.shape[1] + expert[layer])
            left[layer, head[layer]] = False
            head[layer] = left[layer].argmax()
            expert[layer] = order[layer, head[layer]]
            score[layer] = scores[layer, expert[layer]]
            held[layer] += sign
        return np.array(chosen, np.int64)

    def _take(self, chosen: np.ndarray) -> list[ExpertCopy] | None:
        """Pages for the chosen experts (layer * E + expert), all or none."""
        if not len(chosen):
            return []
        ids = self._allocator.allocate(EXPERTS, {EXPERT: len(chosen) * self.matrices})
        if ids is None:
            return None
        layers, experts = np.divmod(chosen, self.resident.shape[1])
        self._held[layers, experts] = True
        pages = ids[EXPERT].reshape(-1, self.matrices).tolist()
        return [
            ExpertCopy(layer, expert, tuple(page))
            for layer, expert, page in zip(layers.tolist(), experts.tolist(), pages, strict=True)
        ]

    def _show(self, copies: Iterable[ExpertCopy]) -> None:
        for layer, expert, pages in copies:
            self.table[layer, expert] = pages
            self.resident[layer, expert] = True
            self._stale_layers[layer] = True
        self._per_layer = self.resident.sum(axis=1)
        self.version += 1
