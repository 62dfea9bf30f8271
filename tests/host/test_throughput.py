"""How many experts should be absent: by hand, against a search, and in closed loops."""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import Setup, World

from rimuru_jax.host.scheduler import REVIEW_PASSES
from rimuru_jax.host.throughput import StepCosts, most_absent

FLAT = StepCosts(requests=(1, 64), absent=(0, 8), seconds=((1.0, 1.0), (1.0, 1.0)))
"""Steps that fetch at no cost."""
STEEP = StepCosts(requests=(1, 64), absent=(0, 1, 8), seconds=((1.0, 1.0, 8.0), (1.0, 1.0, 8.0)))
"""One expert of a layer hides behind computing, each further one takes as long as the computing."""


def absent(costs: StepCosts, capacity: int, **changes: float) -> int:
    """Of 4 layers of 8 experts of 3 pages, without loading buffers, unless told otherwise."""
    sizes = {"layers": 4, "experts": 32, "matrices": 3, "buffer_experts": 0, "limit": 28}
    sizes |= {"pages_per_request": 12.0, "requests": 64}
    return most_absent(costs, capacity=capacity, **(sizes | changes))  # type: ignore[arg-type]


def test_costs_are_linear_between_what_was_measured():
    costs = StepCosts(requests=(1, 3), absent=(0, 2), seconds=((1.0, 3.0), (5.0, 9.0)))
    found = costs.of(np.array([1, 2, 3, 9, 0]), np.array([0.0, 1.0, 2.0, 2.0, 0.0]))
    np.testing.assert_allclose(found, [1.0, 4.5, 9.0, 9.0, 1.0])
    one = StepCosts(requests=(4,), absent=(0, 2), seconds=((1.0, 3.0),))
    np.testing.assert_allclose(one.of(np.array([1, 8]), np.array([1.0, 2.0])), [2.0, 3.0])


def test_free_fetching_gives_requests_all_they_want():
    # 96 pages of experts and 24 more: 2 requests fit, each 4 experts less are room for one more.
    assert absent(FLAT, 120, requests=5) == 12
    assert absent(FLAT, 120) == 28
    assert absent(FLAT, 120, requests=2) == 0


def test_where_all_fit_only_what_hides_is_given_up():
    assert absent(STEEP, 120) == 4  # one per layer
    assert absent(STEEP, 120, pages_per_request=13.0) == 5  # three requests in 1.25 beat two in 1
    assert absent(STEEP, 120, pages_per_request=13.0, requests=2) == 1


def test_where_they_do_not_fit_more_requests_win():
    # 56 pages short: steps wait for the link in any case. With 27 away there is room for two requests.
    assert absent(STEEP, 40) == 27


def test_buffers_are_paid_for():
    assert absent(FLAT, 120, requests=5, buffer_experts=2) == 16  # 2 buffers of 2 experts more: 12 pages


@given(
    capacity=st.integers(0, 200),
    pages=st.floats(0.5, 30),
    requests=st.integers(1, 64),
    limit=st.integers(0, 32),
    buffers=st.integers(0, 4),
    rows=st.lists(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), min_size=2, max_size=2),
)
def test_nothing_else_gives_more(capacity, pages, requests, limit, buffers, rows):
    costs = StepCosts(requests=(1, 64), absent=(0, 2, 8), seconds=tuple(tuple(np.sort(r)) for r in rows))

    def rate(away: int) -> float:
        held = (32 - away) * 3 + 6 * min(-(-away // 4), buffers)
        at_once = min(max(0, capacity - held) // pages, requests)
        return at_once / float(costs.of(np.array([at_once]), np.array([away / 4]))[0])

    chosen = absent(
        costs, capacity, pages_per_request=pages, requests=requests, limit=limit, buffer_experts=buffers
    )
    best = max(rate(away) for away in range(limit + 1))
    assert rate(chosen) >= best * (1 - 1e-9)


def busy_world(policy: str, seconds: tuple[float, ...], **changes: Any) -> World:
    """All experts and pages for two requests; eight come, each of which takes two experts' worth."""
    setup = Setup(
        pages=18 + 12, layers=2, experts=4, offload=3, buffers=0, max_num_seqs=8, max_num_batched_tokens=64,
        adjuster_policy=policy,  # type: ignore[arg-type]
    )  # fmt: skip
    world = World(dataclasses.replace(setup, **changes))
    world.scheduler.step_costs = StepCosts(requests=(1, 8), absent=(0, 1, 4), seconds=(seconds, seconds))
    for _ in range(8):
        world.add(20, 20)
    return world


def most_at_once(world: World) -> tuple[int, int]:
    """Requests that ran at once, and experts that were absent, at most."""
    running = away = 0
    while world.scheduler.has_unfinished():
        world.step()
        running = max(running, len(world.scheduler.running))
        away = max(away, world.cache.absent_experts)
    world.check_idle()
    return running, away


def test_experts_stay_while_fetching_them_costs_more_than_requests_bring():
    """Law 18 the other way round: the same load shrinks under "watermark" and not under "throughput"."""
    dear = (1.0, 50.0, 200.0)
    greedy, frugal = (most_at_once(busy_world(policy, dear)) for policy in ("watermark", "throughput"))
    assert greedy[1] >= 5 and greedy[0] > frugal[0]
    assert frugal[1] <= 2  # the first request, while it is alone, gets what it needs


def test_where_residency_does_not_move_nobody_waits_for_it():
    dear = (1.0, 50.0, 200.0)
    worlds = [busy_world(policy, dear, memory_policy="fixed") for policy in ("watermark", "throughput")]
    greedy, frugal = map(most_at_once, worlds)
    assert frugal == greedy and greedy[0] > 2


def test_experts_go_while_fetching_them_hides():
    cheap = (1.0, 1.0, 1.0)
    greedy, frugal = (most_at_once(busy_world(policy, cheap)) for policy in ("watermark", "throughput"))
    assert frugal[0] == greedy[0] and frugal[1] >= 4


def passes_to_take_in(burst: int, policy: str, max_num_batched_tokens: int) -> int:
    """Until a burst of 40-token prompts runs, in a pool that is full of experts when it comes; fetching hides."""
    setup = Setup(
        pages=72, layers=4, experts=8, offload=7, buffers=0, max_num_seqs=8, max_model_len=64,
        max_num_batched_tokens=max_num_batched_tokens, adjuster_policy=policy,  # type: ignore[arg-type]
    )  # fmt: skip
    world = World(setup)
    seconds = (1.0, 1.0, 1.0)
    world.scheduler.step_costs = StepCosts(requests=(1, 8), absent=(0, 1, 8), seconds=(seconds, seconds))
    for _ in range(2):
        world.add(4, 40)
    world.run(20)
    for _ in range(burst):
        world.add(40, 20)
    passes = 0
    while len(world.scheduler.running) < 2 + burst and passes < 30:
        world.step()
        passes += 1
    world.drain()
    world.check_idle()
    return passes


def test_a_burst_gets_room_for_as_many_as_a_step_begins():
    """Not for one after another: pages come back a pass after they were given up."""
    assert passes_to_take_in(6, "throughput", 256) <= 4
    assert passes_to_take_in(6, "watermark", 256) >= 6
    assert passes_to_take_in(6, "throughput", 42) >= 6  # a prompt a step


def test_nobody_waits_for_all_experts_to_come_back():
    """A burst ends in a pool that lacks most experts: the next requests run while these are taken back, a few per pass."""
    setup = Setup(
        pages=3 * 64 + 12, layers=4, experts=16, offload=15, buffers=0, max_num_seqs=32, max_model_len=64,
        max_num_batched_tokens=1024, adjuster_policy="throughput",
    )  # fmt: skip
    world = World(setup)
    cheap, dear = (1.0, 1.0, 1.0), (1.0, 50.0, 200.0)
    world.scheduler.step_costs = StepCosts(requests=(1, 32), absent=(0, 1, 16), seconds=(cheap, cheap))
    burst = [world.add(40, 20) for _ in range(32)]
    while world.cache.absent_experts < 50:
        world.step()
    for request in burst[10:]:
        world.abort(request)
    world.scheduler.step_costs = StepCosts(requests=(1, 32), absent=(0, 1, 16), seconds=(dear, dear))
    world.run(REVIEW_PASSES)
    more = [world.add(20, 5) for _ in range(4)]
    away = world.cache.absent_experts
    assert away * setup.matrices > world.allocator.free_expert_pages
    world.run(2)
    assert all(request.slot >= 0 for request in more) and 0 < world.cache.absent_experts < away
    while world.scheduler.has_unfinished():
        world.step()
    world.check_idle()
