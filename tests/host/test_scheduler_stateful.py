"""Allocator, page tables, expert cache and scheduler together under random traffic; every pass checks the laws."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from scheduler_world import PAGE_TOKENS, Setup, World

MODEL_LEN = 48

setups = st.builds(
    Setup,
    pages=st.integers(4, 24),
    kind=st.sampled_from(["kv", "hybrid", "double"]),
    layers=st.integers(1, 3),
    experts=st.integers(3, 6),
    matrices=st.sampled_from([2, 3]),
    offload=st.integers(0, 3),
    buffers=st.integers(0, 2),
    cache_policy=st.sampled_from(["online", "hotset", "lru"]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 40),
    max_model_len=st.just(MODEL_LEN),
    policy=st.sampled_from(["fcfs", "priority"]),
    memory_policy=st.sampled_from(["static", "fixed", "elastic", "elastic", "elastic"]),
    reclaim_delay=st.integers(1, 3),
    expand_patience=st.sampled_from([0, 0, 5]),
    adjuster_policy=st.sampled_from(["watermark", "throughput"]),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(setup=setups)
    def build(self, setup: Setup) -> None:
        self.world = World(setup)

    @rule(
        lengths=st.lists(
            st.tuples(st.integers(1, MODEL_LEN - 1), st.integers(1, MODEL_LEN), st.integers(-1, 1)),
            min_size=3,
            max_size=8,
        )
    )
    def arrive(self, lengths: list[tuple[int, int, int]]) -> None:
        for prompt, max_tokens, priority in lengths:
            request = self.world.request(prompt, max_tokens, priority)
            try:
                self.world.scheduler.add(request)
            except ValueError as refusal:
                if "page_pool_bytes" not in str(refusal):
                    raise
            else:
                self.world.requests.append(request)

    @rule(passes=st.integers(1, 24), lag=st.integers(0, 1))
    def work(self, passes: int, lag: int) -> None:
        self.world.run(passes, lag=lag)

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        unfinished = [request for request in self.world.requests if not request.finished]
        if unfinished:
            self.world.abort(unfinished[pick % len(unfinished)])

    @rule(pick=st.integers(0, 100), lag=st.integers(0, 1))
    def stop(self, pick: int, lag: int) -> None:
        """A request ends early, in a pass that may already have planned its next token."""
        running = self.world.scheduler.running
        if running:
            self.world.step(lag=lag, stops=(running[pick % len(running)],))

    @rule(touched=st.lists(st.integers(0, 2**30), min_size=1, max_size=3), steps=st.sampled_from([1, 8, 30]))
    def route(self, touched: list[int], steps: int) -> None:
        """Steps of one token, over and over the same."""
        counts = self.world.cache.resident * 0
        for value in touched:
            counts.flat[value % counts.size] += 1
        for _ in range(steps):
            self.world.cache.observe(counts, 1, 1)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.drain()
        world.check_idle()
        # Each preemption of a request doubles the progress that has to lie between it and the next.
        bound = (MODEL_LEN // PAGE_TOKENS).bit_length()
        if world.setup.policy == "fcfs":
            assert all(request.num_preemptions <= bound for request in world.requests)
        else:
            assert all(request.num_preemptions <= bound * len(world.requests) for request in world.requests)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=190, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
