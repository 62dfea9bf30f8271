"""A scheduler with everything around it and a simulated device, which checks every plan it is given."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rimuru_jax.host.allocator import BUFFERS, EXPERTS, PageAllocator
from rimuru_jax.host.expert_cache import HOST, ExpertCache, ExpertCopy
from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint
from rimuru_jax.host.metrics import Metrics
from rimuru_jax.host.page_layout import PageKind, PageLayout
from rimuru_jax.host.page_tables import PageTables
from rimuru_jax.host.request import Request, RequestStatus
from rimuru_jax.host.residency import residency_policy
from rimuru_jax.host.scheduler import Scheduler, SchedulerConfig, StepPlan
from rimuru_jax.host.throughput import StepCosts

PAGE_TOKENS = 4
EXPERT_BYTES = 256


def layout(kind: str, layers: int) -> PageLayout:
    """ "kv": four KV pages of 4 tokens in an expert page, two attention layers. "hybrid": also recurrent states, two in
    an expert page, and convolution rows in threes. "double": a state is as large as two expert pages.
    """
    expert = PageKind(name="expert", level=2, page_bytes=EXPERT_BYTES, row_bytes=32, layers=layers)
    kv = PageKind(name="kv", level=3, page_bytes=64, row_bytes=16, layers=2, page_tokens=PAGE_TOKENS)
    ssm_bytes = {"kv": 0, "hybrid": EXPERT_BYTES // 2, "double": 2 * EXPERT_BYTES}[kind]
    if not ssm_bytes:
        return PageLayout.plan([kv, expert])
    ssm = PageKind(name="ssm", level=2, page_bytes=ssm_bytes, row_bytes=32, layers=3)
    conv = PageKind(name="conv", level=3, page_bytes=16, row_bytes=16, layers=3, run=3)
    return PageLayout.plan([kv, expert, ssm, conv])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One world: `pages` expert-sized pages beyond those that the floor of residency and the buffers take."""

    pages: int = 16
    kind: Literal["kv", "hybrid", "double"] = "kv"
    layers: int = 2
    experts: int = 4
    matrices: int = 3
    offload: int = 3
    buffers: int = 1
    cache_policy: str = "hotset"
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    policy: Literal["fcfs", "priority"] = "fcfs"
    memory_policy: Literal["static", "fixed", "elastic"] = "elastic"
    reclaim_delay: int = 1
    expand_patience: int = 0
    adjuster_policy: Literal["watermark", "throughput"] = "watermark"


class World:
    """Drives a scheduler and plays the device: tokens arrive `lag` steps late. Every pass is checked."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.layout = layout(setup.kind, setup.layers)
        offload = 0 if setup.memory_policy == "static" else setup.offload
        buffers = min(setup.buffers, offload)
        floor = setup.layers * (setup.experts - offload) * setup.matrices + 2 * buffers * setup.matrices
        wanted = (floor + setup.pages) * EXPERT_BYTES + self.layout.huge_page_bytes
        multiple = self.layout.huge_page_multiple
        huge = -(-wanted // (self.layout.huge_page_bytes * multiple)) * multiple
        self.allocator = PageAllocator(self.layout, huge)
        self.capacity = self.allocator.free_expert_pages
        model = ModelFingerprint(
            model_type="test", num_layers=setup.layers, num_experts=setup.experts, experts_per_token=2
        )
        counts = np.random.default_rng(7).integers(0, 50, (setup.layers, setup.experts))
        self.cache = ExpertCache(
            num_layers=setup.layers,
            num_experts=setup.experts,
            matrices=setup.matrices,
            allocator=self.allocator,
            policy=residency_policy(setup.cache_policy, HotsetProfile.uniform(model).record(counts, 50)),
            expert_offload_limit=offload,
            buffer_experts=setup.buffers,
            reclaim_delay=setup.reclaim_delay,
        )
        self.tables = PageTables(self.layout, setup.max_num_seqs, setup.max_model_len)
        self.metrics = Metrics()
        config = SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            policy=setup.policy,
            memory_policy=setup.memory_policy,
            reclaim_delay=setup.reclaim_delay,
            expand_patience=setup.expand_patience,
            adjuster_policy=setup.adjuster_policy,
        )
        self.content = np.full(huge * self.layout.pages_per_huge("expert"), -1)
        """Which matrix, as (layer * experts + expert) * matrices + i, each expert-sized page of the pool holds."""
        self._copy(self.cache.fill(0 if setup.memory_policy != "fixed" else self.capacity))
        self.scheduler = Scheduler(config, self.allocator, self.tables, self.cache, self.metrics)
        # Steps that wait for one absent expert of a layer take as long as with four times the requests.
        self.scheduler.step_costs = StepCosts(
            requests=(1, 4),
            absent=(0, 1, setup.experts),
            seconds=((1, 1, setup.experts), (2, 2, setup.experts)),
        )
        self.requests: list[Request] = []
        self.arrivals = 0
        self.passes = 0
        self.operations = 0  # admissions, growth of requests, releases, experts moved
        self._calls = -1
        self._ledger = self.allocator.ledger()
        self.device = {name: table.copy() for name, table in self.tables.arrays.items()}
        self._in_flight: deque[tuple[StepPlan, list[np.ndarray], list[np.ndarray]]] = deque()
        self._computed: dict[int, int] = {}  # handle: tokens whose results are in the pool
        self._known: dict[int, int] = {}  # handle: tokens known at admission
        self._readmitted: dict[
            int, dict[int, int]
        ] = {}  # handle: tokens computed by those running at its admission
        self._slots: dict[int, int] = {}  # handle: slot
        self._slot_left: dict[int, int] = {}  # slot: last step whose plan could show it

    def request(self, prompt: int, max_tokens: int, priority: int = 0) -> Request:
        """A request that has not been added."""
        self.arrivals += 1
        return Request(f"r{self.arrivals}", list(range(prompt)), max_tokens, priority, self.arrivals)

    def add(self, prompt: int, max_tokens: int, priority: int = 0) -> Request:
        request = self.request(prompt, max_tokens, priority)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def abort(self, request: Request) -> None:
        assert self.scheduler.abort(request.request_id)
        self._forget()
        assert not any(self.allocator.holds(request.handle).values())

    def step(self, *, lag: int = 0, stops: tuple[Request, ...] = ()) -> StepPlan:
        """One pass, then delivery of the plans older than `lag`; requests in `stops` end when they get a token."""
        oldest = min(self.scheduler.running, key=lambda request: request.arrival, default=None)
        plan = self.scheduler.schedule()
        self._check(plan, oldest)
        handed = [*self.cache.step_tables()]
        for name, (index, value) in self.tables.take_updates().items():
            self.device[name][tuple(index.T)] = value
            handed += [index, value]
            assert np.array_equal(self.device[name], self.tables.arrays[name]), name
        self._check_owners(plan.expert_copies)
        for source, target in plan.page_moves:
            self.content[target] = self.content[source]
        self._copy(plan.expert_swaps)
        self._copy(plan.expert_copies)
        self._check_content()
        self._in_flight.append((plan, handed, [array.copy() for array in handed]))
        while len(self._in_flight) > lag:
            self._deliver(stops)
        return plan

    def run(self, passes: int, *, lag: int = 0) -> list[StepPlan]:
        return [self.step(lag=lag) for _ in range(passes)]

    def drain(self, *, lag: int = 0) -> None:
        """Run until everything has finished, within a bound that a livelock would exceed."""
        delay = self.setup.reclaim_delay
        unfinished = [request for request in self.requests if not request.finished]
        bound = 20 + sum(
            2 * request.length_limit(self.setup.max_model_len) + 8 * (delay + lag) for request in unfinished
        )
        for _ in range(bound):
            if not self.scheduler.has_unfinished():
                break
            self.step(lag=lag)
        assert not self.scheduler.has_unfinished(), f"{unfinished} did not finish in {bound} passes"
        while self._in_flight:
            self._deliver(())

    def check_idle(self) -> None:
        """Nothing is used but by experts, and they have grown back as far as the rule goes."""
        missing = self.cache.absent_experts
        for _ in range(2 * self.setup.reclaim_delay + missing + self.setup.expand_patience + 2):
            self.step()
        held = self.allocator.holds(EXPERTS)["expert"] + self.allocator.holds(BUFFERS)["expert"]
        assert self.allocator.returning_expert_pages == 0
        assert self.allocator.free_expert_pages + held == self.capacity
        ledger = self.allocator.ledger()
        used = {name: counts.used for name, counts in ledger.kinds.items()}
        assert used == dict.fromkeys(used, 0) | {"expert": self.allocator.holds(EXPERTS)["expert"]}
        for name, table in self.tables.arrays.items():
            assert not table.any(), name
        if self.setup.memory_policy == "elastic":
            growable = self.allocator.free_expert_pages - 3 * self.setup.matrices >= self.setup.matrices
            assert self.cache.absent_experts == 0 or not growable

    def _deliver(self, stops: tuple[Request, ...]) -> None:
        plan, handed, copies = self._in_flight.popleft()
        for array, copy in zip(handed, copies, strict=True):
            assert np.array_equal(array, copy)
        for number in self.scheduler.update(plan, [7] * len(plan.chunks)):
            request = plan.chunks[number].request
            total = len(request.prompt_token_ids) + len(request.output_token_ids)
            assert len(request.output_token_ids) <= request.max_tokens
            assert total <= self.setup.max_model_len
            if total == request.length_limit(self.setup.max_model_len):
                self.scheduler.finish(request, "length")
            elif request in stops:
                self.scheduler.finish(request, "stop")
            if request.finished:
                assert not any(self.allocator.holds(request.handle).values())
        self._forget()

    def _forget(self) -> None:
        """Requests that left the batch since: from the next step on, nothing shows their slot."""
        running = {request.handle for request in self.scheduler.running}
        for handle in [handle for handle in self._slots if handle not in running]:
            self._slot_left[self._slots.pop(handle)] = self.passes
            del self._computed[handle], self._known[handle]
            self.operations += 1

    def _check(self, plan: StepPlan, oldest: Request | None) -> None:
        """The plan against the device's own books and the laws."""
        setup, scheduler = self.setup, self.scheduler
        self.passes += 1
        waiting_before = scheduler.has_unfinished()
        # 8: a pass that plans nothing has a reason
        if waiting_before and not plan.chunks:
            assert plan.preempted or plan.rejected or plan.waiting_for in ("reclaim", "tokens")
        if plan.chunks:
            assert plan.waiting_for is None
        assert not plan.rejected
        # 19: the oldest stays, nobody comes back in the same pass
        assert oldest not in plan.preempted
        if setup.policy == "fcfs":
            self._check_progress(plan)
        planned = [chunk.request for chunk in plan.chunks]
        assert not set(planned) & set(plan.preempted)
        self._forget()
        assert len(set(planned)) == len(planned)
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= setup.max_num_batched_tokens
        assert len(scheduler.running) <= setup.max_num_seqs
        for chunk in plan.chunks:
            request = chunk.request
            if request.handle not in self._computed:
                self.operations += 1
                assert chunk.start == 0
                assert (
                    self._slot_left.get(request.slot, -setup.reclaim_delay) + setup.reclaim_delay <= plan.step
                )
                assert request.slot not in self._slots.values()
                self._slots[request.handle] = request.slot
                self._computed[request.handle] = 0
                self._known[request.handle] = request.num_tokens - chunk.samples
                running = {other.handle: other.num_computed_tokens for other in scheduler.running}
                self._readmitted[request.handle] = running
            assert chunk.start == self._computed[request.handle]
            assert chunk.num_tokens >= 1
            before = self._covered(request)
            self._computed[request.handle] += chunk.num_tokens
            self.operations += self._covered(request) > before
            assert chunk.samples == (chunk.start + chunk.num_tokens == request.num_tokens - chunk.samples)
            # never past its end, and fed only with tokens that are known or sampled by the step before
            assert request.num_tokens <= request.length_limit(setup.max_model_len)
            assert request.num_in_flight <= len(self._in_flight) + 1
        self._check_requests()
        # 1, 2
        held = self.allocator.holds(EXPERTS)["expert"]
        assert held == (self.cache.resident.size - self.cache.absent_experts) * setup.matrices
        # 10
        assert (self.cache.resident.sum(axis=1) >= self.cache.floor).all()
        moves = [event for event in self.metrics.events("shrink", "expand") if event.step == plan.step]
        assert len(moves) <= 1
        if setup.memory_policy != "elastic":
            assert not moves and not plan.expert_copies and not plan.expert_swaps
        assert len(plan.expert_swaps) <= max(1, self.cache.absent_experts // 8)
        self.operations += len(plan.expert_swaps)
        for event in moves:
            experts, shortage, surplus = (int(event.fields[name]) for name in ("experts", "r_b", "f_b"))
            self.operations += experts
            if event.name == "shrink":
                wanted = -(-(shortage + 1) // setup.matrices) if shortage else 1
                assert surplus < 2 and experts <= wanted
                if setup.adjuster_policy == "watermark":
                    assert experts == min(wanted, experts + self.cache.shrinkable_experts)
            else:
                most = 5 if setup.adjuster_policy == "watermark" else max(5, self.cache.resident.size // 8)
                assert experts == len(plan.expert_copies) <= most
                # Loading buffers may give back the pages of an expert each.
                released = 2 * setup.matrices * (self.cache.buffer_pages.shape[1] > 0)
                assert surplus + released - experts * setup.matrices >= 3 * setup.matrices
        if (ledger := self.allocator.ledger()) != self._ledger or self._calls != self.operations:
            self.allocator.check_ledger()
        self._ledger, self._calls = ledger, self.operations

    def _check_progress(self, plan: StepPlan) -> None:
        """19: before a request is preempted for the (k + 1)-th time, one of those that ran beside it when it came back
        has finished or computed about 2^k pages of tokens since: each time twice as many, so recomputation is bounded.
        """
        for request in plan.preempted:
            if (times := request.num_preemptions - 1) > 0:
                then = self._readmitted[request.handle]
                gone = any(handle not in self._computed for handle in then)
                progress = [self._computed[handle] - tokens for handle, tokens in then.items() if not gone]
                assert gone or max(progress) >= (PAGE_TOKENS << times) - 1

    def _covered(self, request: Request) -> int:
        """Columns of its KV tables that a running request must have: all tokens known at admission or computed."""
        return -(-max(self._known[request.handle], self._computed[request.handle]) // PAGE_TOKENS)

    def _check_requests(self) -> None:
        """Pages and table rows of every running request cover its tokens, no more; all other rows are scratch."""
        idle = set(range(self.setup.max_num_seqs))
        for request in self.scheduler.running:
            idle.remove(request.slot)
            assert request.status is RequestStatus.RUNNING
            holds = self.allocator.holds(request.handle)
            for placed in self.layout.sequence_kinds:
                name = placed.kind.name
                columns = self._covered(request) if placed.kind.page_tokens else 1
                assert holds[name] == columns * placed.tables
                assert int(self.tables.lengths(name)[request.slot]) == columns
                row = self.tables.arrays[name][:, request.slot]
                assert (row[:, :columns] > 0).all() and not row[:, columns:].any()
        for request in self.scheduler.waiting:
            assert request.slot == -1 and not any(self.allocator.holds(request.handle).values())
        for table in self.tables.arrays.values():
            assert not table[:, sorted(idle)].any()

    def _copy(self, copies: Iterable[ExpertCopy]) -> None:
        for layer, expert, pages in copies:
            first = (layer * self.setup.experts + expert) * self.setup.matrices
            self.content[list(pages)] = np.arange(first, first + self.setup.matrices)

    def _check_content(self) -> None:
        """The step finds every expert where the table says; what it writes for sequences ruins whatever was there."""
        table = self.cache.table.ravel()
        shown = np.flatnonzero(table != HOST)
        assert (self.content[table[shown]] == shown).all()
        page_bytes = self.layout["expert"].stride_bytes
        for name, array in self.tables.arrays.items():
            placed = self.layout[name]
            size = placed.stride_bytes * placed.kind.run
            for first in (array[array > 0].astype(np.int64) * placed.stride_bytes).tolist():
                self.content[first // page_bytes : (first + size - 1) // page_bytes + 1] = -1

    def _check_owners(self, copies: tuple[ExpertCopy, ...]) -> None:
        """3: every byte named by a table, an expert on its way or a loading buffer is named once; scratch never."""
        uses = np.zeros(self.allocator.num_huge_pages * self.layout.huge_page_bytes // 16, np.int64)
        table = self.cache.table
        arriving = np.array([copy.pages for copy in copies], np.int64)
        names = {
            "expert": np.concatenate(
                [a.ravel() for a in (table[table != HOST], self.cache.buffer_pages, arriving)]
            )
        }
        names |= {name: array[array > 0] for name, array in self.tables.arrays.items()}
        for name, ids in names.items():
            placed = self.layout[name]
            size = placed.stride_bytes // 16
            first = ids.astype(np.int64) * size
            np.add.at(uses, (first[:, None] + np.arange(size * placed.kind.run)).ravel(), 1)
        assert uses.max() <= 1
        assert not uses[: self.layout.huge_page_bytes // 16].any()
