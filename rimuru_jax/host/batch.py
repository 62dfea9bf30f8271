"""The slots of running requests: which tokens each has computed, which pages it holds, and what it will need next."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np

from rimuru_jax.host.allocator import PageAllocator
from rimuru_jax.host.page_tables import PageTables
from rimuru_jax.host.request import Request

UNLIMITED = np.iinfo(np.int64).max
type Demand = tuple[int, dict[str, int]]
"""Owner, and units by kind."""


class ScheduledChunk(NamedTuple):
    """Consecutive tokens of one request in one step.

    `start` is the position of the first. `samples`: the chunk ends at the last token, so its logits give the next one.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


_new_chunk = partial(
    tuple.__new__, ScheduledChunk
)  # a third of the time of the constructor, which takes keywords


class Batch:
    """Slots, page tables and pages of running requests.

    Numbers that every pass needs are kept in arrays by slot, so that only requests that start a page, or still
    compute their prompt, cost more than a few nanoseconds. Pages and slots given back return after `reclaim_delay`
    passes. Demands are units by kind, as `PageAllocator.allocate` takes them.

    Attributes:
      step: number of the current pass.
      returned_by: the pass by which everything given back so far is free.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        reclaim_delay: int,
        allocator: PageAllocator,
        page_tables: PageTables,
    ):
        self.step = 0
        self.returned_by = 0
        self._max_model_len = max_model_len
        self._reclaim_delay = reclaim_delay
        self._allocator = allocator
        self._tables = page_tables
        self._free_slots = list(range(max_num_seqs))[::-1]
        self._returning_slots: deque[tuple[int, int]] = deque()  # (pass from which it is free, slot)
        self._requests = np.full(max_num_seqs, None, object)
        self._computed = np.zeros(max_num_seqs, np.int64)  # tokens
        self._covered = np.zeros(max_num_seqs, np.int64)  # tokens that the pages held can take
        self._final = np.zeros(max_num_seqs, np.int64)  # tokens computed once the last one has been sampled
        self._decoding = np.zeros(max_num_seqs, bool)  # nothing known is left to compute but the last token
        self._kinds = allocator.layout.sequence_kinds
        self._token_kinds = tuple(placed for placed in self._kinds if placed.kind.page_tokens)
        self._page_tokens = [(placed.kind.name, placed.kind.page_tokens) for placed in self._token_kinds]

    @property
    def largest_page_tokens(self) -> int:
        """Tokens of the page that covers most of them."""
        return max((tokens for _, tokens in self._page_tokens), default=1)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def slot_is_coming(self) -> bool:
        """Whether a slot is free or returning."""
        return bool(self._free_slots or self._returning_slots)

    @property
    def num_decoding(self) -> int:
        return int(np.count_nonzero(self._decoding))

    def begin_pass(self) -> None:
        """Slots that are due become free."""
        self.step += 1
        while self._returning_slots and self._returning_slots[0][0] <= self.step:
            self._free_slots.append(self._returning_slots.popleft()[1])

    def note_freed(self) -> None:
        """Pages were given back in this pass."""
        self.returned_by = self.step + self._reclaim_delay

    def demand(self, num_tokens: int) -> dict[str, int]:
        """What a request of `num_tokens` tokens needs that holds nothing."""
        return {placed.kind.name: placed.units_for(num_tokens) for placed in self._kinds}

    def growing(self) -> list[Request]:
        """Running requests whose next token has no page yet."""
        return self._requests[(self._computed >= self._covered) & (self._computed < self._final)].tolist()

    def growth(self, requests: Iterable[Request], ahead: int = 1) -> list[Demand]:
        """What running requests lack to compute `ahead` more tokens (but none beyond their ends), one by one."""
        slots = []
        demands: list[Demand] = []
        for request in requests:
            slots.append(request.slot)
            demands.append((request.handle, {}))
        if not slots:
            return demands
        tokens = np.minimum(self._computed[slots] + ahead, self._final[slots])
        for placed in self._token_kinds:
            name, kind = placed.kind.name, placed.kind
            columns = -(-tokens // kind.page_tokens) - self._tables.lengths(name)[slots]
            for (_, demand), units in zip(demands, (columns * placed.tables).tolist(), strict=True):
                if units > 0:
                    demand[name] = units
        return demands

    def next_demands(self) -> list[Demand]:
        """What running requests lack now or need in the next pass."""
        return self.growth(self.growing())

    def grow(self, requests: Sequence[Request]) -> int:
        """Take the pages that the next tokens start, up to the first request for which they are not to be had.

        Returns how many requests have them now.
        """
        return self._take([request.slot for request in requests], self.growth(requests))

    def admit(self, request: Request) -> bool:
        """A free slot and pages for all tokens known; False, and nothing changed, when pages are short."""
        slot = self._free_slots[-1]
        if not self._take([slot], [(request.handle, self.demand(request.num_tokens))]):
            return False
        request.slot = self._free_slots.pop()
        self._requests[slot] = request
        self._final[slot] = request.length_limit(self._max_model_len) - 1
        return True

    def release(self, request: Request) -> None:
        """Give back the slot and the pages of a request that no longer runs."""
        slot = request.slot
        self._allocator.release(request.handle, delay=self._reclaim_delay)
        self._tables.clear(slot)
        self.note_freed()
        self._returning_slots.append((self.returned_by, slot))
        self._requests[slot] = None
        self._computed[slot] = self._covered[slot] = self._final[slot] = self._decoding[slot] = 0
        request.slot = -1

    def is_decoding(self, request: Request) -> bool:
        return bool(self._decoding[request.slot])

    def decode_chunks(self, skip: Collection[Request]) -> list[ScheduledChunk]:
        """One token of each request that decodes, has not come to its end and is not in `skip`; by slot."""
        ready = self._decoding & (self._computed < self._final)
        ready[[request.slot for request in skip]] = False
        slots = ready.nonzero()[0]
        starts = self._computed[slots].tolist()
        self._computed[slots] += 1
        requests = self._requests[slots].tolist()
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight += 1
        return list(map(_new_chunk, zip(requests, starts, repeat(1), repeat(True), strict=False)))

    def prompt_chunk(self, request: Request, budget: int) -> ScheduledChunk:
        """Up to `budget` of the known tokens that are not computed yet; after the last one it decodes."""
        start, slot = request.num_computed_tokens, request.slot
        pending = request.num_tokens - start
        samples = pending <= budget
        num_tokens = min(pending, budget)
        request.num_computed_tokens = start + num_tokens
        request.num_in_flight += samples
        self._computed[slot] = start + num_tokens
        self._decoding[slot] = samples
        return ScheduledChunk(request, start, num_tokens, samples)

    def _take(self, slots: list[int], demands: list[Demand]) -> int:
        """Pages for one slot after another, up to the first for which they are not to be had; returns how many."""
        units = self._allocator.allocate_each(demands)
        slots = slots[: len(units)]
        if slots:
            self._tables.append_each(slots, units)
            covered = [self._tables.lengths(name)[slots] * tokens for name, tokens in self._page_tokens]
            self._covered[slots] = np.minimum.reduce(covered) if covered else UNLIMITED
        return len(slots)
