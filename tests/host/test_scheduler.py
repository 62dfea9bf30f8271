"""The scheduler's rules one by one. In the "kv" layout an expert page holds the KV of 8 tokens, in chunks of 4."""

import dataclasses

import numpy as np
import pytest
from scheduler_world import Setup, World

from rimuru_jax.host.request import RequestStatus
from rimuru_jax.host.residency import RANK_STEPS
from rimuru_jax.host.scheduler import SchedulerConfig, StepPlan

BUFFERS = 6
"""Pages of the loading buffers, which stay free as long as no expert is absent."""
FIXED = Setup(memory_policy="fixed", max_num_batched_tokens=64)


def _world(setup: Setup = FIXED, **changes: object) -> World:
    return World(dataclasses.replace(setup, **changes))  # type: ignore[arg-type]


def _chunks(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(chunk.request.request_id, *chunk[1:]) for chunk in plan.chunks]


def _names(world: World) -> list[str]:
    return [event.name for event in world.metrics.events()]


def test_prompts_are_chunked_under_the_token_budget():
    world = _world(max_num_batched_tokens=4)
    world.add(10, 2)
    plans = world.run(4)
    assert [_chunks(plan) for plan in plans] == [
        [("r1", 0, 4, False)],
        [("r1", 4, 4, False)],
        [("r1", 8, 2, True)],
        [("r1", 10, 1, True)],
    ]
    assert world.requests[0].finish_reason == "length"
    assert world.metrics.counters["prompt_tokens"] == 10
    assert world.metrics.counters["generation_tokens"] == 2


def test_decodes_come_before_prompts_and_admissions():
    world = _world(max_num_batched_tokens=4)
    world.add(2, 9)
    world.step()
    world.add(5, 9)
    world.add(1, 9)
    assert _chunks(world.step()) == [("r1", 2, 1, True), ("r2", 0, 3, False)]
    assert _chunks(world.step()) == [("r1", 3, 1, True), ("r2", 3, 2, True), ("r3", 0, 1, True)]


def test_planning_runs_ahead_of_the_tokens_but_not_past_the_end():
    world = _world()
    request = world.add(3, 3)
    plans = world.run(4, lag=9)
    assert [_chunks(plan) for plan in plans] == [
        [("r1", 0, 3, True)],
        [("r1", 3, 1, True)],
        [("r1", 4, 1, True)],
        [],
    ]
    assert plans[3].waiting_for == "tokens"
    assert request.num_in_flight == 3 and request.output_token_ids == []
    world.drain()
    assert request.output_token_ids == [7, 7, 7]


def test_nothing_goes_past_max_model_len():
    world = _world(max_model_len=12)
    request = world.add(9, 50)
    world.drain(lag=1)
    assert len(request.output_token_ids) == 3 and request.finish_reason == "length"


def test_a_row_that_turns_out_finished_runs_one_token_that_is_dropped():
    world = _world()
    request = world.add(3, 20)
    world.step(lag=1)
    assert _chunks(world.step(lag=1, stops=(request,))) == [("r1", 3, 1, True)]
    assert request.finish_reason == "stop"
    world.drain()
    assert request.output_token_ids == [7]
    assert world.metrics.counters["generation_tokens"] == 1
    world.check_idle()


def test_admission_is_in_order_of_arrival_or_priority():
    for policy, order in (("fcfs", ["r1", "r2", "r3"]), ("priority", ["r2", "r3", "r1"])):
        world = _world(max_num_seqs=1, policy=policy)
        for priority in (2, -1, 0):
            world.add(3, 1, priority)
        world.drain()
        admitted = [event.fields["request"] for event in world.metrics.events("admitted")]
        assert admitted == order


def test_admission_takes_all_kinds_or_none():
    """A hybrid request of one token takes 2 pages for three half-page states, 1 for convolution rows, 1 for KV.

    A second one could share the KV page and half a page of states, but needs 2 more pages.
    """
    world = _world(kind="hybrid", pages=5)
    world.add(1, 4)
    world.step()
    assert world.allocator.free_expert_pages == 1
    second = world.add(1, 4)
    ledger = world.allocator.ledger()
    plan = world.step()
    assert _chunks(plan) == [("r1", 1, 1, True)]
    assert world.allocator.ledger() == ledger
    assert second.status is RequestStatus.WAITING
    world.drain()
    world.check_idle()


def test_experts_make_way_for_states_as_large_as_two_of_their_pages():
    """States take 3 huge pages, convolution rows and KV a page each: 8 expert pages, and the rule asks for one more."""
    for matrices in (3, 1):
        experts = 18 // matrices
        world = _world(
            memory_policy="elastic", kind="double", layers=3, experts=experts, offload=experts - 1, matrices=matrices,
            pages=(experts - 1) * 3 * matrices, cache_policy="lru",
        )  # fmt: skip
        assert world.cache.absent_experts == 0
        if spare := world.allocator.free_expert_pages:
            world.allocator.allocate(77, {"expert": spare})
        # Used last are all but every third expert: those that go are scattered over the huge pages.
        counts = np.ones((3, experts), int)
        counts[:, ::3] = 0
        for _ in range(RANK_STEPS):
            world.cache.observe(counts, 2, 1)
        request = world.add(2, 6)
        world.step()
        (shrink,) = world.metrics.events("shrink")
        assert shrink.fields["experts"] == -(-9 // matrices)  # in one step, and no more than that
        plan = world.step()
        assert _chunks(plan) == [("r1", 0, 2, True)]
        assert len(plan.page_moves) == world.metrics.counters["expert_pages_moved"]
        # Three pages in a row hold a whole huge page, so three experts are enough; single pages have to move.
        assert bool(plan.page_moves) == (matrices == 1)
        while not request.finished:
            world.step()


def test_the_youngest_is_preempted_and_resumes_with_its_tokens():
    """4 pages are 32 tokens: two requests fill them at 16 tokens each, then one has to go."""
    world = _world(pages=4)
    first, second = world.add(15, 8), world.add(15, 8)
    world.run(2)
    plan = world.step()
    assert plan.preempted == (second,) and plan.chunks == () and plan.waiting_for == "reclaim"
    assert second.status is RequestStatus.PREEMPTED and second.num_computed_tokens == 0
    assert len(second.output_token_ids) == 2
    assert world.scheduler.waiting == [second]
    assert _chunks(world.step()) == [("r1", 16, 1, True)]
    while not first.finished:
        world.step()
    assert _chunks(world.step()) == [("r2", 0, 17, True)]
    world.drain()
    assert first.num_preemptions == 0 and second.num_preemptions == 1
    assert len(second.output_token_ids) == 8
    assert world.metrics.counters["num_preemptions"] == 1
    assert world.metrics.counters["recomputed_tokens"] == 16
    assert _names(world).count("preempted") == 1
    world.check_idle()


def test_a_preempted_row_keeps_its_token_in_flight():
    """Its pages would fit at once, but its last token has not arrived."""
    world = _world(pages=4)
    first, second = world.add(15, 17), world.add(15, 17)
    world.run(3, lag=1)
    assert second.status is RequestStatus.PREEMPTED
    assert (second.num_in_flight, len(second.output_token_ids)) == (0, 2)
    world = _world(pages=4)
    first, second = world.add(15, 17), world.add(15, 17)
    world.run(3, lag=9)
    assert (second.num_in_flight, len(second.output_token_ids)) == (2, 0)
    world.abort(first)
    plan = world.step(lag=9)
    assert plan.chunks == () and plan.waiting_for == "tokens"
    world.step()
    assert (second.num_in_flight, len(second.output_token_ids)) == (0, 2)
    assert _chunks(world.step()) == [("r2", 0, 17, True)]


def test_the_lowest_priority_goes_first_but_never_the_oldest():
    """6 pages for three requests of 16 tokens; then 3 each for two requests of 24."""
    world = _world(pages=6, policy="priority")
    oldest, important, third = world.add(15, 30, 1), world.add(15, 30, 0), world.add(15, 30, 1)
    preempted = []
    while not preempted:
        preempted += world.step().preempted
    assert preempted == [third]
    while len(preempted) == 1:
        preempted += world.step().preempted
    assert preempted == [third, important]
    assert world.scheduler.running == [oldest]
    assert world.scheduler.waiting == [important, third]
    world.drain()


def test_recomputation_is_bounded():
    """Ten requests grow into 37 pages while the youngest is due; were it readmitted whenever its own pages fit, it would
    be preempted five times over. The world checks that the progress in between doubles.
    """
    world = _world(pages=37, max_num_seqs=12, max_num_batched_tokens=256, max_model_len=128)
    sizes = [
        (6, 77),
        (7, 73),
        (4, 35),
        (8, 95),
        (7, 21),
        (7, 28),
        (4, 13),
        (8, 32),
        (1, 82),
        (5, 99),
        (30, 60),
    ]
    for prompt, max_tokens in sizes:
        world.add(prompt, max_tokens)
    world.drain()
    assert world.metrics.counters["num_preemptions"] >= 1
    assert max(request.num_preemptions for request in world.requests) <= 2
    world.check_idle()


def test_what_can_never_fit_is_refused_with_numbers():
    world = _world(pages=4)
    with pytest.raises(
        ValueError, match=r"needs 7 pages .* for its 49 tokens.* 1 resident .* at most 4 .*page_pool"
    ):
        world.add(20, 30)
    assert not world.scheduler.has_unfinished()
    request = world.add(20, 13)  # 32 tokens are computed, the 33rd is only sampled
    world.drain()
    assert len(request.output_token_ids) == 13 and request.num_preemptions == 0


def test_other_requests_that_make_no_sense_are_refused():
    world = _world(max_model_len=16)
    with pytest.raises(ValueError, match=r"has 16 tokens.*max_model_len \(16\)"):
        world.add(16, 1)
    with pytest.raises(ValueError, match="has 0 tokens"):
        world.add(0, 1)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        world.add(3, 0)
    request = world.add(3, 3)
    with pytest.raises(ValueError, match="'r4' is in use"):
        world.scheduler.add(request)


@pytest.mark.parametrize("phase", ["waiting", "prompt", "decode", "in flight", "preempted"])
@pytest.mark.parametrize("delay", [1, 3])
def test_abort_returns_every_page(phase: str, delay: int):
    world = _world(pages=4, reclaim_delay=delay, max_num_batched_tokens=15 if phase == "prompt" else 64)
    if phase == "preempted":
        world.add(15, 17)
        request = world.add(15, 17)
        world.run(3)
        assert request.status is RequestStatus.PREEMPTED
    else:
        request = world.add(20, 8)
        lag = 1 if phase == "in flight" else 0
        world.run({"waiting": 0, "prompt": 1, "decode": 3, "in flight": 2}[phase], lag=lag)
    world.abort(request)
    assert request.finish_reason == "abort"
    assert not world.scheduler.abort(request.request_id)
    tokens = list(request.output_token_ids)
    world.drain()
    assert request.output_token_ids == tokens
    world.check_idle()


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_slots_come_back_after_the_delay(delay: int):
    world = _world(max_num_seqs=1, reclaim_delay=delay)
    world.add(3, 1)
    world.add(3, 1)
    plans = world.run(delay + 1)
    assert [plan.waiting_for for plan in plans] == [None, *["reclaim"] * (delay - 1), None]
    assert _chunks(plans[-1]) == [("r2", 0, 3, True)]


def test_a_running_request_waits_for_pages_that_experts_give_up():
    """Four requests start a page in the same pass; the free page serves two, three more are on their way."""
    world = _world(memory_policy="elastic", pages=18 + 5 - BUFFERS, reclaim_delay=3)
    for _ in range(4):
        world.add(7, 12)
    plans = world.run(3)
    assert [len(plan.chunks) for plan in plans] == [4, 4, 2]
    assert world.metrics.counters["awaiting_reclaim"] == 2
    assert world.metrics.counters["num_preemptions"] == 0
    waiting = [event.fields["request"] for event in world.metrics.events("awaiting_reclaim")]
    assert waiting == ["r3", "r4"]
    world.drain()
    assert world.metrics.counters["num_preemptions"] == 0


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_experts_shrink_once_for_the_same_pages(delay: int):
    """5 pages are free, the request needs 8: R_b = 3 takes two experts, whose pages are then waited for."""
    world = _world(
        memory_policy="elastic", pages=18 + 5 - BUFFERS, reclaim_delay=delay, max_num_batched_tokens=64
    )
    world.add(60, 2)
    plans = world.run(delay + 1)
    assert [plan.waiting_for for plan in plans] == [*["reclaim"] * delay, None]
    shrinks = [(event.step, event.fields["experts"]) for event in world.metrics.events("shrink")]
    assert shrinks == [(1, 2)]
    world.drain()
    world.check_idle()


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_burst_shrinks_the_experts_and_the_lull_grows_them_back(delay: int):
    """All experts and 12 pages: six requests of 5 pages, four at a time, need 8 more."""
    world = _world(memory_policy="elastic", pages=18 + 12 - BUFFERS, reclaim_delay=delay)
    assert world.cache.absent_experts == 0
    for _ in range(6):
        world.add(20, 20)
    world.drain()
    low = world.cache.absent_experts
    world.check_idle()
    moves = [event.name for event in world.metrics.events("shrink", "expand")]
    assert moves[0] == "shrink" and moves[-1] == "expand"
    assert low >= 1 and world.cache.absent_experts == 0
    counters = world.metrics.counters
    assert counters["expert_shrinks"] == counters["expert_expansions"] >= 3
    assert counters["expert_reversals"] >= 1
    assert counters["num_preemptions"] == 0


def test_experts_do_not_shrink_for_a_head_they_cannot_help():
    """Two requests of 8 pages leave 7 of 23 for experts; the third needs 8 and waits for a completion."""
    world = _world(memory_policy="elastic", pages=23, buffers=0, max_num_batched_tokens=256)
    first = world.add(60, 4)
    world.add(60, 4)
    while len(world.scheduler.running) < 2:
        world.step()
    third = world.add(60, 4)
    while not first.finished:
        world.step()
        assert world.cache.shrinkable_experts >= 1
        assert third.status is RequestStatus.WAITING
    world.drain()


@pytest.mark.parametrize(("memory_policy", "residents"), [("static", 8), ("fixed", 2)])
def test_residency_moves_only_in_elastic_mode(memory_policy: str, residents: int):
    world = _world(memory_policy=memory_policy, pages=12)
    for _ in range(5):
        world.add(20, 20)
    world.drain()
    world.check_idle()
    assert int(world.cache.resident.sum()) == residents
    assert not list(world.metrics.events("shrink", "expand"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_batched_tokens": 3}, r"max_num_batched_tokens is 3.*max_num_seqs \(4\)"),
        ({"policy": "lifo"}, "'lifo'"),
        ({"memory_policy": "rigid"}, "'rigid'"),
        ({"reclaim_delay": 0}, "reclaim_delay is 0"),
    ],
)
def test_configuration_is_checked(changes: dict[str, object], message: str):
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def test_units_that_return_inside_a_shared_page_are_waited_for():
    """The oldest request lacks units that a finished one gives back in a page which both have units of."""
    world = World(
        Setup(pages=6, memory_policy="static", max_num_seqs=2, max_num_batched_tokens=48, max_model_len=48)
    )
    oldest = world.add(40, 6)
    for prompt, tokens in ((1, 1), (1, 5)):
        world.add(prompt, tokens)
    world.drain()
    assert oldest.finish_reason == "length" and len(oldest.output_token_ids) == 6


@pytest.mark.parametrize("kind", ["hybrid", "double"])
@pytest.mark.parametrize("hoard", ["expert", "ssm", "kv"])
def test_every_kind_gets_its_minimum_whoever_holds_the_rest(kind, hoard):
    """Law 6: experts, states or keys and values have taken everything above the floors when a newcomer arrives."""
    world = _world(
        kind=kind, memory_policy="elastic", pages=30 - BUFFERS, layers=2, experts=6, offload=5, matrices=3,
        max_num_seqs=16, max_num_batched_tokens=64,
    )  # fmt: skip
    needs = {placed.kind.name: placed.units_for(2) for placed in world.layout.sequence_kinds}
    if hoard != "expert":
        # Sequences of few tokens are nearly all state, long ones nearly all keys and values.
        for _ in range(12 if hoard == "ssm" else 4):
            world.add(*((1, 20) if hoard == "ssm" else (20, 44)))
        world.run(3)
        while world.cache.shrinkable_experts or world.allocator.shortfall([(99, needs)]) <= 0:
            assert len(world.scheduler.running) > 1, "they ended without taking everything"
            world.step()
    assert world.allocator.shortfall([(99, needs)]) > 0
    newcomer = world.add(2, 3)
    passes = 0
    while not newcomer.finished:
        world.step()
        passes += 1
        assert (world.cache.resident.sum(axis=1) >= world.cache.floor).all()
        assert passes < 300
    assert len(newcomer.output_token_ids) == 3
    world.drain()
    world.check_idle()


def test_nobody_waits_for_swaps():
    """Step by step the same tokens for the same requests, whether experts are exchanged under them or not."""
    plans: dict[str, list[list[tuple[str, int, int, bool]]]] = {}
    for policy in ("hotset", "online"):
        world = _world(memory_policy="elastic", layers=3, experts=8, offload=6, pages=40, cache_policy=policy)
        rng = np.random.default_rng(3)
        plans[policy] = []
        for number in range(120):
            if number % 10 == 0:
                world.add(int(rng.integers(2, 30)), int(rng.integers(4, 30)))
            plans[policy].append(_chunks(world.step()))
            # What is chosen moves on to other experts, of which some are away.
            counts = np.zeros((3, 8), int)
            counts[:, [number // 40, 7 - number // 40]] = 1
            world.cache.observe(counts, 1, 1)
        assert (world.metrics.counters["expert_swaps"] > 0) == (policy == "online")
        assert world.metrics.counters["expert_shrinks"] > 0
    assert plans["online"] == plans["hotset"]
