"""Continuous batching over one page pool: which tokens the next step computes, and who gives up pages for them.

One pass, in this order:

    1. pages whose reclaim delay is over become free; experts copied by the last step are shown
    2. running requests that cross a page boundary take their pages; who cannot skips this pass while pages that are
       returning or could be shrunk cover it, otherwise the youngest of the lowest priority is preempted
    3. decodes, then chunks of running prompts, are planned
    4. the head of the queue is admitted while tokens, slots and pages last: pages for all its tokens or none; where
       whole huge pages are missing for it, expert pages are moved together
    5. one signed balance of pages moves the residency of experts, and some that are chosen less are exchanged for some that
       are chosen more (`memory_policy="elastic"` only)

Every pass plans tokens, frees pages, waits for a named event, or fails one request with a reason.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rimuru_jax.host.adjuster import (
    LOW_PAGES,
    MAX_EXPANSION,
    AdjusterPolicy,
    AdjusterState,
    PageBalance,
    decide,
)
from rimuru_jax.host.allocator import BUFFERS, EXPERTS, PageAllocator
from rimuru_jax.host.batch import Batch, Demand, ScheduledChunk
from rimuru_jax.host.expert_cache import ExpertCache, ExpertCopy, PageMove
from rimuru_jax.host.metrics import Metrics
from rimuru_jax.host.page_layout import EXPERT, format_bytes
from rimuru_jax.host.page_tables import PageTables
from rimuru_jax.host.request import Request, RequestStatus
from rimuru_jax.host.throughput import StepCosts, most_absent

REVIEW_PASSES = 4
"""Passes after which "throughput" thinks again about how many experts may be absent, if no more requests come before."""
REVIEWED_REQUESTS = 8
"""Waiting requests, at most, whose size counts beside that of the running ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a pass.

    Attributes:
      max_num_seqs: requests that run at once.
      max_num_batched_tokens: tokens in one step; at least `max_num_seqs`, so that decodes always fit.
      max_model_len: tokens of one request, prompt and output together.
      policy: "fcfs" ignores priorities; "priority" serves lower values first, then by arrival.
      memory_policy: "static" keeps all experts resident, "fixed" keeps every layer at its floor, "elastic" moves
        residency with the load.
      reclaim_delay: passes after which freed pages and slots may be handed out again, at least 1.
      expand_patience: see `adjuster.decide`.
      adjuster_policy: "watermark" gives up experts for whoever needs pages; "throughput" only as far as more requests at
        once are worth the bytes that each step then fetches (`throughput.most_absent`).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    memory_policy: Literal["static", "fixed", "elastic"] = "elastic"
    reclaim_delay: int = 1
    expand_patience: int = 0
    adjuster_policy: AdjusterPolicy = "watermark"

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, it must be at least "
                f"max_num_seqs ({self.max_num_seqs}) so that every running request can decode"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling policy is {self.policy!r}, it must be 'fcfs' or 'priority'")
        if self.memory_policy not in ("static", "fixed", "elastic"):
            raise ValueError(
                f"memory_policy is {self.memory_policy!r}, it must be 'static', 'fixed' or 'elastic'"
            )
        if self.adjuster_policy not in get_args(AdjusterPolicy.__value__):
            raise ValueError(
                f"adjuster_policy is {self.adjuster_policy!r}, it must be 'watermark' or 'throughput'"
            )
        if self.reclaim_delay < 1:
            raise ValueError(f"reclaim_delay is {self.reclaim_delay} passes, it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes, and what happened while it was planned.

    Attributes:
      step: number of the pass, from 1.
      chunks: at most one per request; the first `num_decodes` are decodes: the token that was sampled last, alone.
      page_moves: pages of experts to copy elsewhere in the pool before anything else of this step.
      expert_swaps: experts to copy over others before this step, behind the moves; its table shows them.
      expert_copies: experts to copy into the pool within this step; the next pass shows them in the table.
      waiting_for: why `chunks` is empty although requests are unfinished: "reclaim" (pages or slots are returning) or
        "tokens" (sampled tokens have not been delivered); None otherwise.
      preempted: requests whose pages were taken away; they wait again.
      rejected: requests that were finished with "error" because no pages can ever serve them.
    """

    step: int
    chunks: tuple[ScheduledChunk, ...]
    num_decodes: int = 0
    page_moves: tuple[PageMove, ...] = ()
    expert_swaps: tuple[ExpertCopy, ...] = ()
    expert_copies: tuple[ExpertCopy, ...] = ()
    waiting_for: Literal["reclaim", "tokens"] | None = None
    preempted: tuple[Request, ...] = ()
    rejected: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return self.num_decodes + sum([chunk.num_tokens for chunk in self.chunks[self.num_decodes :]])


class Scheduler:
    """Owns the queue, the slots and the pages of requests; moves experts through `expert_cache`.

    Planning runs ahead of the device: `schedule` counts planned tokens as computed and the token to come as in flight,
    `update` delivers its value later. Plans must be executed and delivered in order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        page_tables: PageTables,
        expert_cache: ExpertCache,
        metrics: Metrics,
    ):
        self.config = config
        self.running: list[Request] = []  # most important first
        self.waiting: list[Request] = []
        self._allocator = allocator
        self._cache = expert_cache
        self._metrics = metrics
        self._requests: dict[str, Request] = {}
        self.step_costs: StepCosts | None = None
        """What steps cost at present, as far as the caller knows; "throughput" is "watermark" without it."""
        self._adjuster = AdjusterState()
        self._most_absent: int | None = (
            None  # experts that may be absent in all; None: as many as the floors allow
        )
        self._reviewed = 0  # requests that there were when that was settled
        self._max_expansion = MAX_EXPANSION  # experts taken back in a pass, at most
        self._last_move = 0  # sign of the last change of residency
        self._page_moves: list[PageMove] = []  # of the pass being planned
        self._batch = Batch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            reclaim_delay=config.reclaim_delay,
            allocator=allocator,
            page_tables=page_tables,
        )
        # An allocator that holds nothing but the floor of residency: what a request could ever get when alone.
        self._at_floor = PageAllocator(allocator.layout, allocator.num_huge_pages)
        buffers = expert_cache.most_buffer_pages
        self._at_floor.allocate(BUFFERS, {EXPERT: buffers})
        self._at_floor.allocate(EXPERTS, {EXPERT: expert_cache.floor_pages - buffers})

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ValueError when it can never be served: the message has the numbers and the knob.
        """
        config = self.config
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
        if not 1 <= len(request.prompt_token_ids) < config.max_model_len:
            raise ValueError(
                f"the prompt of request {request.request_id!r} has {len(request.prompt_token_ids)} tokens, it must "
                f"have at least 1 and leave room for one more below max_model_len ({config.max_model_len})"
            )
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.max_tokens}, it must be at least 1")
        tokens = request.length_limit(config.max_model_len) - 1
        short = self._at_floor.shortfall([(request.handle, self._batch.demand(tokens))])
        if short > 0:
            page = self._allocator.layout[EXPERT].stride_bytes
            capacity = self._at_floor.free_expert_pages
            raise ValueError(
                f"request {request.request_id!r} needs {capacity + short} pages "
                f"({format_bytes((capacity + short) * page)}) for its {tokens} tokens, but with "
                f"{self._cache.floor} resident experts per layer the pool gives at most {capacity} "
                f"({format_bytes(capacity * page)}): raise page_pool_bytes or expert_offload_limit, "
                "or lower max_model_len"
            )
        self._requests[request.request_id] = request
        self._enqueue(request)

    def abort(self, request_id: str) -> bool:
        """Finish a request in whatever phase it is; False when no unfinished request has that id."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.finish(request, "abort")
        return True

    def finish(self, request: Request, reason: str) -> None:
        """End a request: its pages and slot return after the reclaim delay, tokens still in flight are dropped."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._batch.release(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        counter, name = _ENDINGS.get(reason, _ENDINGS["stop"])
        self._metrics.add(counter)
        self._metrics.event(self._batch.step, name, request=request.request_id, reason=reason)

    def update(self, plan: StepPlan, tokens: npt.ArrayLike) -> list[int]:
        """Deliver the sampled tokens of a step.

        Args:
          plan: the step; steps are delivered in the order in which they were planned.
          tokens: int[chunks], one per chunk of the plan; the values of chunks that do not sample are ignored.

        Returns the numbers of the chunks whose requests, unfinished so far, got a token: the caller decides which of them
        are finished.
        """
        advanced = []
        values = np.asarray(tokens).tolist()  # plain integers, whatever came from the device
        finished = RequestStatus.FINISHED
        for number, ((request, _, _, samples), token) in enumerate(zip(plan.chunks, values, strict=True)):
            if samples and request.status is not finished:
                request.num_in_flight -= 1
                request.output_token_ids.append(token)
                advanced.append(number)
        self._metrics.add("generation_tokens", len(advanced))
        return advanced

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def schedule(self) -> StepPlan:
        """Plan the next step: one pass."""
        self._allocator.begin_pass()
        self._cache.begin_pass()
        self._batch.begin_pass()
        self._page_moves = []
        self._review()

        lacking, preempted, rejected = self._grow()
        chunks, budget, num_decodes = self._plan_running(lacking)
        short = None
        if not lacking and not preempted:
            short = self._admit(chunks, budget)
        copies, swaps = [], []
        if self.config.memory_policy == "elastic":
            copies = self._adjust(short)
            swaps = self._cache.swap()
            self._metrics.add("expert_swaps", len(swaps))

        waiting_for = None
        if not chunks and self._requests:
            waiting_for = self._waiting_for()
            if waiting_for is None and not rejected:
                rejected.append(self.waiting[0])
                self.finish(self.waiting[0], "error")
        self._count(waiting_for)
        return StepPlan(
            step=self._batch.step,
            chunks=tuple(chunks),
            num_decodes=num_decodes,
            page_moves=tuple(self._page_moves),
            expert_swaps=tuple(swaps),
            expert_copies=tuple(copies),
            waiting_for=waiting_for,
            preempted=tuple(preempted),
            rejected=tuple(rejected),
        )

    def _grow(self) -> tuple[set[Request], list[Request], list[Request]]:
        """Pages for requests whose next token starts a page: who skips this pass, was preempted, was rejected."""
        lacking: dict[Request, Demand] = {}
        preempted: list[Request] = []
        rejected: list[Request] = []
        growing = sorted(self._batch.growing(), key=self._key)
        while (grown := self._batch.grow(growing)) < len(growing):
            request, growing = growing[grown], growing[grown:]
            if self._consolidate(self._batch.growth([request])):
                continue
            growing = growing[1:]
            (lacking[request],) = self._batch.growth([request])
            while request in lacking and not self._reclaimable(list(lacking.values())):
                victim = self._youngest()
                if victim is None and self._batch.step < self._batch.returned_by:
                    break  # units return inside parents that others share, which no count of whole pages shows
                if victim is None:
                    self.finish(request, "error")
                    rejected.append(request)
                    victim = request
                else:
                    self._preempt(victim)
                    preempted.append(victim)
                lacking.pop(victim, None)
            growing = [request for request in growing if request.status is RequestStatus.RUNNING]
        for request in lacking:
            self._metrics.add("awaiting_reclaim")
            self._metrics.event(self._batch.step, "awaiting_reclaim", request=request.request_id)
        return set(lacking), preempted, rejected

    def _plan_running(self, lacking: set[Request]) -> tuple[list[ScheduledChunk], int, int]:
        """Decodes, then prompts in order; also returns the tokens left of the budget, and how many are decodes."""
        chunks = self._batch.decode_chunks(lacking)
        num_decodes = len(chunks)
        budget = self.config.max_num_batched_tokens - num_decodes
        if len(self.running) > self._batch.num_decoding:
            for request in self.running:
                if budget and not self._batch.is_decoding(request):
                    budget -= self._add_prompt_chunk(chunks, request, budget)
        return chunks, budget, num_decodes

    def _admit(self, chunks: list[ScheduledChunk], budget: int) -> int | None:
        """Admit heads of the queue while tokens, slots and pages last.

        Returns the shortfall of the head that has to wait for pages, if there is one and it was counted.
        """
        while self.waiting and budget and self._batch.has_free_slot:
            request = self.waiting[0]
            if request.num_in_flight:
                return None
            demands = self._demands_with(request)
            short = self._allocator.shortfall(demands)
            if short > 0 and self._consolidate(demands):
                short = self._allocator.shortfall(demands)
            if self.running and short + self._owed_pages() > 0:
                return short
            if not self._batch.admit(request):
                return None
            self.waiting.pop(0)
            insort(self.running, request, key=self._key)
            request.status = RequestStatus.RUNNING
            self._metrics.event(
                self._batch.step, "admitted", request=request.request_id, tokens=request.num_tokens
            )
            budget -= self._add_prompt_chunk(chunks, request, budget)
        return None

    def _add_prompt_chunk(self, chunks: list[ScheduledChunk], request: Request, budget: int) -> int:
        chunk = self._batch.prompt_chunk(request, budget)
        self._metrics.add("prompt_tokens", chunk.num_tokens)
        chunks.append(chunk)
        return chunk.num_tokens

    def _adjust(self, short_of_head: int | None) -> list[ExpertCopy]:
        """Move residency by this pass's balance; returns the copies of experts taken back.

        `short_of_head` is the shortfall of the head of the queue, if it is known already.
        """
        allocator, cache, metrics = self._allocator, self._cache, self._metrics
        free, returning = allocator.free_expert_pages, allocator.returning_expert_pages
        shrinkable = self._shrinkable()
        short = None
        if self.waiting and self._batch.slot_is_coming:
            short = short_of_head
            if short is None:
                short = allocator.shortfall(self._demands_with(self.waiting[0]))
            most = returning + shrinkable * cache.matrices
            if self.running and short > most:
                short = None  # all experts would not do: it waits for completions
            elif self._most_absent is not None:
                short = self._short_of_queue(short, most)
        if short is None:
            short = allocator.shortfall(self._batch.next_demands())
        balance = PageBalance(
            free=free,
            returning=returning,
            demand=free + short,
            shrinkable=shrinkable,
            absent=cache.absent_experts,
            released=2 * cache.matrices,
            release_after=cache.experts_to_smaller_buffers,
        )
        decision = decide(
            balance,
            self._adjuster,
            matrices=cache.matrices,
            expand_patience=self.config.expand_patience,
            max_expansion=self._max_expansion,
        )
        self._adjuster = decision.state
        metrics.set("adjuster_r_b", balance.shortage)
        metrics.set("adjuster_f_b", balance.surplus)
        shrunk = cache.shrink(-decision.experts) if decision.experts < 0 else 0
        copies = cache.expand(decision.experts) if decision.experts > 0 else []
        if decision.experts == 0:
            cache.fit_buffers(max(0, balance.surplus - LOW_PAGES))
        if shrunk:
            self._batch.note_freed()
        if shrunk or copies:
            name, counter = ("shrink", "expert_shrinks") if shrunk else ("expand", "expert_expansions")
            experts = shrunk or len(copies)
            metrics.add(counter, experts)
            metrics.event(self._batch.step, name, experts=experts, r_b=balance.shortage, f_b=balance.surplus)
            move = -1 if shrunk else 1
            metrics.add("expert_reversals", int(move == -self._last_move))
            self._last_move = move
        return copies

    def _short_of_queue(self, short: int, most: int) -> int:
        """The shortfall of as many waiting requests as one step can begin with, at most `most` pages; `short` is that of
        the first. Were it for the first alone, a burst would be let in one request per step, however long that takes.
        """
        head, *others = self.waiting
        demands, tokens = self._demands_with(head), head.num_tokens
        for request in others[: self.config.max_num_seqs - len(self.running) - 1]:
            if tokens >= self.config.max_num_batched_tokens or request.num_preemptions:
                break
            tokens += request.num_tokens
            demands.append((request.handle, self._batch.demand(request.num_tokens)))
            more = self._allocator.shortfall(demands)
            if more > most:
                break
            short = more
        return short

    def _review(self) -> None:
        """Settle how many experts may be absent for the next passes, and how fast they come back, if that is for
        "throughput" to say.
        """
        weighs = self.config.memory_policy == "elastic" and self.config.adjuster_policy == "throughput"
        costs = self.step_costs
        wanted = min(self.config.max_num_seqs, len(self.running) + len(self.waiting))
        if weighs and costs is not None and self._batch.step % REVIEW_PASSES == 0:
            copies = self._cache.copies_at_once(max(1, len(self.running)))
            self._max_expansion = max(MAX_EXPANSION, copies)
        if not weighs or costs is None or wanted < 2:
            self._most_absent = None
        elif self._most_absent is None or wanted > self._reviewed or self._batch.step % REVIEW_PASSES == 0:
            self._reviewed = wanted
            allocator, cache = self._allocator, self._cache
            held = (cache.num_experts - cache.absent_experts) * cache.matrices + cache.buffer_pages.size
            of_requests = allocator.capacity_expert_pages - held
            of_requests -= allocator.free_expert_pages + allocator.returning_expert_pages
            coming = self.waiting[:REVIEWED_REQUESTS]
            demands = [(request.handle, self._batch.demand(request.num_tokens)) for request in coming]
            of_requests += allocator.shortfall(demands) + allocator.free_expert_pages
            self._most_absent = most_absent(
                costs,
                capacity=allocator.capacity_expert_pages - LOW_PAGES - cache.matrices,
                layers=len(cache.resident),
                experts=cache.num_experts,
                matrices=cache.matrices,
                buffer_experts=cache.buffer_experts,
                limit=cache.absent_experts + cache.shrinkable_experts,
                pages_per_request=max(1, of_requests) / (len(self.running) + len(coming)),
                requests=wanted,
            )

    def _shrinkable(self) -> int:
        """Experts that may be given up now."""
        shrinkable = self._cache.shrinkable_experts
        # Whoever runs alone gets what there is: nobody else could make room.
        if self._most_absent is None or len(self.running) < 2:
            return shrinkable
        return min(shrinkable, max(0, self._most_absent - self._cache.absent_experts))

    def _owed_pages(self) -> int:
        """Expert pages that are to become resident again before anyone is admitted: those of one pass. More would lie idle
        until their turn comes, and nobody would run meanwhile.
        """
        if self._most_absent is None:
            return 0
        owed = max(0, self._cache.absent_experts - self._most_absent)
        return min(owed, self._max_expansion) * self._cache.matrices

    def _consolidate(self, demands: Sequence[Demand]) -> bool:
        """Move experts together where whole huge pages are missing; whether that made any."""
        missing = self._allocator.missing_huge_pages(demands)
        moves = self._cache.consolidate(missing) if missing else []
        if moves:
            self._page_moves += moves
            self._metrics.add("expert_pages_moved", len(moves))
            self._metrics.event(self._batch.step, "consolidate", pages=len(moves))
        return bool(moves)

    def _waiting_for(self) -> Literal["reclaim", "tokens"] | None:
        """The event an empty pass waits for; None when there is none, so that the head cannot be served."""
        if self._batch.step < self._batch.returned_by:
            return "reclaim"
        if self.running or self.waiting[0].num_in_flight:
            return "tokens"
        return None

    def _key(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.config.policy == "priority" else 0, request.arrival)

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=self._key)

    def _demands_with(self, head: Request) -> list[Demand]:
        """What must fit for the head of the queue to be admitted beside the running requests.

        Each time it was preempted doubles the tokens all of them must be able to grow by: between two preemptions of
        one request lies twice the progress of the time before, so that recomputation is bounded.
        """
        if head.num_preemptions == 0:
            return [*self._batch.next_demands(), (head.handle, self._batch.demand(head.num_tokens))]
        ahead = self._batch.largest_page_tokens << min(head.num_preemptions, 20)
        demands = self._batch.growth(self.running, ahead)
        tokens = min(head.num_tokens + ahead, head.length_limit(self.config.max_model_len) - 1)
        return [*demands, (head.handle, self._batch.demand(tokens))]

    def _reclaimable(self, demands: Sequence[Demand]) -> bool:
        """Whether free, returning and shrinkable pages together cover the demands."""
        coming = self._allocator.returning_expert_pages + self._shrinkable() * self._cache.matrices
        return self._allocator.shortfall(demands) <= coming

    def _youngest(self) -> Request | None:
        """The youngest running request of the lowest priority, the oldest of all excepted."""
        oldest = min(self.running, key=lambda request: request.arrival)
        return next((request for request in reversed(self.running) if request is not oldest), None)

    def _preempt(self, request: Request) -> None:
        self._metrics.add("num_preemptions")
        self._metrics.add("recomputed_tokens", request.num_computed_tokens)
        self._metrics.event(
            self._batch.step, "preempted", request=request.request_id, tokens=request.num_computed_tokens
        )
        self.running.remove(request)
        self._batch.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._enqueue(request)

    def _count(self, waiting_for: str | None) -> None:
        metrics = self._metrics
        metrics.add("scheduler_passes")
        metrics.add("empty_passes", int(waiting_for is not None))
        metrics.set("num_requests_running", len(self.running))
        metrics.set("num_requests_waiting", len(self.waiting))
        metrics.set("resident_experts", self._cache.resident_experts)
        metrics.set("free_expert_pages", self._allocator.free_expert_pages)
        metrics.set("returning_expert_pages", self._allocator.returning_expert_pages)


_ENDINGS = {
    "stop": ("request_success", "finished"),
    "length": ("request_success", "finished"),
    "abort": ("requests_aborted", "aborted"),
    "error": ("requests_rejected", "rejected"),
}
