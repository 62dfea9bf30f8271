"""Residency: floors, order, delays and the table of the next step, on a pool of single expert pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru_jax.host.allocator import EXPERTS, PageAllocator
from rimuru_jax.host.expert_cache import HOST, ExpertCache
from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint
from rimuru_jax.host.page_layout import PageKind, PageLayout
from rimuru_jax.host.residency import (
    RANK_STEPS,
    HotsetPolicy,
    LruPolicy,
    OnlinePolicy,
    ResidencyPolicy,
    residency_policy,
)

# Two layers of four experts, most probable first: layer 0: 2 0 3 1; layer 1: 3 2 1 0. Over both layers the
# probabilities are .5 .45 .3 .26 .14 .13 .12 .1.
COUNTS = np.array([[30, 10, 50, 12], [13, 14, 26, 45]])
LAYERS, EXPERT_COUNT, MATRICES = 2, 4, 3


def _profile(counts: np.ndarray = COUNTS) -> HotsetProfile:
    layers, experts = counts.shape
    model = ModelFingerprint(model_type="test", num_layers=layers, num_experts=experts, experts_per_token=2)
    return HotsetProfile.uniform(model).record(counts, 100)


def _allocator(pages: int) -> PageAllocator:
    kind = PageKind(name="expert", level=2, page_bytes=64, row_bytes=16, layers=LAYERS)
    return PageAllocator(PageLayout.plan([kind]), pages + 1)


def _cache(
    pages: int,
    *,
    expert_offload_limit: int = 3,
    buffer_experts: int = 0,
    policy: ResidencyPolicy | None = None,
    reclaim_delay: int = 1,
) -> tuple[ExpertCache, PageAllocator]:
    allocator = _allocator(pages)
    policy = policy or HotsetPolicy(_profile())
    layers, experts = policy.scores().shape
    cache = ExpertCache(
        num_layers=layers,
        num_experts=experts,
        matrices=MATRICES,
        allocator=allocator,
        policy=policy,
        expert_offload_limit=expert_offload_limit,
        buffer_experts=buffer_experts,
        reclaim_delay=reclaim_delay,
    )
    return cache, allocator


def _next_pass(cache: ExpertCache, allocator: PageAllocator) -> None:
    allocator.begin_pass()
    cache.begin_pass()


def _residents(cache: ExpertCache) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in cache.resident]


def test_fill_takes_the_most_probable_that_fit():
    cache, allocator = _cache(pages=14)  # 4 experts and 2 pages over
    copies = cache.fill(keep_free_pages=0)
    assert sorted((copy.layer, copy.expert) for copy in copies) == [(0, 0), (0, 2), (1, 2), (1, 3)]
    assert _residents(cache) == [[0, 2], [2, 3]]
    for copy in copies:
        assert cache.table[copy.layer, copy.expert].tolist() == list(copy.pages)
    assert (cache.table[~cache.resident] == HOST).all()
    assert allocator.free_expert_pages == 2
    assert cache.absent_experts == 4 and cache.shrinkable_experts == 2 and cache.shrinkable_pages == 6


def test_fill_keeps_pages_free_but_never_goes_below_the_floor():
    cache, allocator = _cache(pages=24)
    cache.fill(keep_free_pages=10)
    assert allocator.free_expert_pages == 12
    cache, allocator = _cache(pages=24, expert_offload_limit=1)
    cache.fill(keep_free_pages=10**6)
    assert _residents(cache) == [[0, 2, 3], [1, 2, 3]]
    assert cache.shrinkable_experts == 0


def test_fill_refuses_a_pool_below_the_floor():
    cache, _ = _cache(pages=17, expert_offload_limit=1)
    with pytest.raises(ValueError, match=r"3 of 4 experts.* 18 pages .* of the 17 .*expert_offload_limit"):
        cache.fill(keep_free_pages=0)


def test_buffers_need_room():
    with pytest.raises(ValueError, match=r"2 experts take 12 pages.*the pool has 11.*loading_buffer_experts"):
        _cache(pages=11, buffer_experts=2)


def test_limits_are_checked():
    with pytest.raises(ValueError, match="expert_offload_limit is 5"):
        _cache(pages=10, expert_offload_limit=5)
    with pytest.raises(ValueError, match="expert_cache_policy is 'mru'"):
        residency_policy("mru", _profile())


def test_shrink_takes_the_least_probable_above_the_floor():
    cache, _ = _cache(pages=24, expert_offload_limit=3)
    cache.fill(keep_free_pages=0)
    assert cache.shrink(3) == 3  # .1 (0, 1), .12 (0, 3), .13 (1, 0)
    assert _residents(cache) == [[0, 2], [1, 2, 3]]
    assert cache.shrink(9) == 3  # .14 (1, 1), .26 (1, 2), .3 (0, 0); the floor of one expert stays
    assert _residents(cache) == [[2], [3]]
    assert cache.shrink(1) == 0


def test_shrink_skips_layers_at_their_floor():
    counts = np.array([[1, 2, 3, 94], [25, 25, 25, 25]])
    cache, _ = _cache(pages=24, expert_offload_limit=2, policy=HotsetPolicy(_profile(counts)))
    cache.fill(keep_free_pages=0)
    assert cache.shrink(3) == 3
    assert _residents(cache) == [[2, 3], [0, 1, 2]]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_pages_of_a_shrunk_expert_return_after_the_delay(delay: int):
    cache, allocator = _cache(pages=24, reclaim_delay=delay)
    cache.fill(keep_free_pages=0)
    cache.shrink(2)
    for _ in range(delay):
        assert allocator.free_expert_pages == 0
        assert allocator.returning_expert_pages == 6
        allocator.begin_pass()
    assert allocator.free_expert_pages == 6
    assert allocator.returning_expert_pages == 0


def test_expanded_experts_are_shown_one_pass_later():
    cache, allocator = _cache(pages=24)
    cache.fill(keep_free_pages=0)
    cache.shrink(3)
    _next_pass(cache, allocator)
    before, version = cache.table.copy(), cache.version
    copies = cache.expand(2)
    assert [(copy.layer, copy.expert) for copy in copies] == [(1, 0), (0, 3)]
    np.testing.assert_array_equal(cache.table, before)
    assert cache.version == version
    assert allocator.free_expert_pages == 3
    assert cache.absent_experts == 1
    _next_pass(cache, allocator)
    assert cache.version != version
    for copy in copies:
        assert cache.table[copy.layer, copy.expert].tolist() == list(copy.pages)
    assert _residents(cache) == [[0, 2, 3], [0, 1, 2, 3]]


def test_expand_is_all_or_nothing():
    cache, allocator = _cache(pages=14)
    cache.fill(keep_free_pages=0)
    assert cache.expand(1) == []
    assert allocator.holds(EXPERTS)["expert"] == 12
    assert cache.absent_experts == 4


def test_an_expert_on_its_way_is_not_expanded_twice():
    cache, _ = _cache(pages=24)
    cache.fill(keep_free_pages=18)
    first, second = cache.expand(3), cache.expand(3)
    assert len({(copy.layer, copy.expert) for copy in [*first, *second]}) == 6


def test_step_tables_overlay_the_most_probable_absent_experts():
    cache, _ = _cache(pages=6 + 12, expert_offload_limit=3, buffer_experts=2)
    cache.fill(keep_free_pages=0)
    assert _residents(cache) == [[2], [3]]
    effective, loads = cache.step_tables()
    assert loads.tolist() == [[0, 3], [2, 1]]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(effective[layer, loads[layer]], cache.buffer_pages[layer % 2])
    assert (effective[0, 1] == HOST).all() and (effective[1, 0] == HOST).all()
    np.testing.assert_array_equal(effective[cache.resident], cache.table[cache.resident])
    assert (
        len(np.unique(np.concatenate([cache.buffer_pages.ravel(), cache.table[cache.resident].ravel()])))
        == 18
    )


def test_step_tables_pad_when_little_is_away():
    cache, _ = _cache(pages=24 + 12, expert_offload_limit=2, buffer_experts=2)
    cache.fill(keep_free_pages=0)
    cache.shrink(1)
    cache.fit_buffers(spare_pages=6)
    _, loads = cache.step_tables()
    assert loads.tolist() == [[1, -1], [-1, -1]]


def test_an_expert_being_expanded_is_still_loaded_in_this_step():
    cache, allocator = _cache(pages=24 + 6, buffer_experts=1)
    cache.fill(keep_free_pages=0)
    cache.shrink(1)
    cache.fit_buffers(spare_pages=6)
    _next_pass(cache, allocator)
    (copy,) = cache.expand(1)
    effective, loads = cache.step_tables()
    assert loads[copy.layer].tolist() == [copy.expert]
    np.testing.assert_array_equal(effective[copy.layer, copy.expert], cache.buffer_pages[0, 0])
    _next_pass(cache, allocator)
    effective, loads = cache.step_tables()
    assert loads.tolist() == [[-1], [-1]]
    assert effective[copy.layer, copy.expert].tolist() == list(copy.pages)


def test_tables_handed_over_are_copies():
    cache, _ = _cache(pages=24 + 6, buffer_experts=1)
    cache.fill(keep_free_pages=0)
    effective, loads = cache.step_tables()
    kept = effective.copy(), loads.copy()
    cache.shrink(4)
    cache.step_tables()
    np.testing.assert_array_equal(effective, kept[0])
    np.testing.assert_array_equal(loads, kept[1])


def test_ties_spread_over_layers():
    model = ModelFingerprint(model_type="test", num_layers=2, num_experts=4, experts_per_token=2)
    cache, _ = _cache(pages=24, policy=HotsetPolicy(HotsetProfile.uniform(model)))
    cache.fill(keep_free_pages=0)
    cache.shrink(4)
    assert _residents(cache) == [[0, 1], [0, 1]]


def test_lru_keeps_what_was_used_last():
    cache, allocator = _cache(pages=24, policy=LruPolicy(_profile(), rank_steps=1))
    cache.fill(keep_free_pages=0)
    cache.observe(np.array([[0, 4, 0, 0], [1, 0, 0, 0]]), 4, 4)
    cache.observe(np.array([[0, 0, 0, 2], [0, 0, 0, 0]]), 4, 4)
    assert cache.shrink(4) == 4  # never used: (0, 0) .3, (0, 2) .5, (1, 1) .14, (1, 2) .26, (1, 3) .45
    assert _residents(cache) == [[1, 2, 3], [0]]
    _next_pass(cache, allocator)
    cache.observe(np.array([[3, 0, 0, 0], [0, 0, 0, 0]]), 4, 4)
    assert [(copy.layer, copy.expert) for copy in cache.expand(2)] == [(0, 0), (1, 3)]


def test_the_hotset_does_not_learn():
    cache, _ = _cache(pages=24)
    cache.fill(keep_free_pages=0)
    for _ in range(2 * RANK_STEPS):
        cache.observe(np.array([[0, 99, 0, 0], [0, 0, 0, 0]]), 99, 99)
    assert cache.swap() == []
    cache.shrink(1)
    assert not cache.resident[0, 1]


@given(
    moves=st.lists(st.integers(-6, 5), max_size=40),
    offload=st.integers(0, 4),
    delay=st.integers(1, 3),
    name=st.sampled_from(["online", "hotset", "lru"]),
)
def test_cycles_return_to_the_same_capacity(moves: list[int], offload: int, delay: int, name: str):
    """Whatever moved: floors hold, pages add up, no page has two owners, and growing back restores the start."""
    policy = residency_policy(name, _profile())
    cache, allocator = _cache(
        pages=24 + 12, expert_offload_limit=offload, buffer_experts=2, policy=policy, reclaim_delay=delay
    )
    cache.fill(keep_free_pages=0)
    start = int(cache.resident.sum())
    assert start == 8
    for turn, move in enumerate(moves):
        _next_pass(cache, allocator)
        if move < 0:
            assert cache.shrink(-move) <= -move
        elif move > 0 and cache.absent_experts >= move:
            cache.expand(move)
        before = cache.resident.sum(axis=1)
        assert len(cache.swap()) <= 1
        assert (cache.resident.sum(axis=1) == before).all()
        for _ in range(RANK_STEPS):
            cache.observe((np.arange(8) == turn % 8).reshape(2, 4).astype(int), 1, 1)
        assert (cache.resident.sum(axis=1) >= cache.floor).all()
        allocator.check_ledger()
        shown = cache.table[cache.resident].ravel()
        mine = np.concatenate([shown, cache.buffer_pages.ravel()])
        assert len(np.unique(mine)) == len(mine) and 0 not in mine
        held = (8 - cache.absent_experts) * MATRICES + cache.buffer_pages.size
        assert allocator.free_expert_pages + allocator.returning_expert_pages + held == 36
    for _ in range(delay + 1):
        _next_pass(cache, allocator)
    assert len(cache.expand(cache.absent_experts)) == start - int(cache.resident.sum())
    _next_pass(cache, allocator)
    assert int(cache.resident.sum()) == start


# Swaps ------------------------------------------------------------------------------------------------------------------


def _online(layers: int, experts: int, k: int = 2) -> OnlinePolicy:
    model = ModelFingerprint(model_type="t", num_layers=layers, num_experts=experts, experts_per_token=k)
    return OnlinePolicy(HotsetProfile.uniform(model))


def _route(rng: np.random.Generator, shares: np.ndarray, k: int) -> np.ndarray:
    """Counts `int[L, E]` of one token that takes `k` experts of each layer, `shares` weighing them."""
    keys = rng.gumbel(size=shares.shape) + np.log(shares)
    counts = np.zeros(shares.shape, int)
    np.put_along_axis(counts, np.argsort(-keys, axis=1)[:, :k], 1, axis=1)
    return counts


def test_a_swap_takes_the_place_of_another():
    cache, allocator = _cache(pages=12, policy=_online(2, 4))
    cache.fill(keep_free_pages=0)
    assert _residents(cache) == [[0, 1], [0, 1]]
    pages, version, ledger = cache.table.copy(), cache.version, allocator.ledger()
    for _ in range(4 * RANK_STEPS):
        cache.observe(np.array([[1, 0, 0, 1], [1, 1, 0, 0]]), 1, 1)
    (copy,) = cache.swap()
    assert copy == (0, 3, tuple(pages[0, 1].tolist()))
    assert _residents(cache) == [[0, 3], [0, 1]] and cache.version != version
    assert cache.table[0, 3].tolist() == list(copy.pages) and (cache.table[0, 1] == HOST).all()
    assert allocator.ledger() == ledger and cache.swap() == []


def test_one_accident_swaps_nothing():
    cache, _ = _cache(pages=12, policy=_online(2, 4))
    cache.fill(keep_free_pages=0)
    for number in range(4 * RANK_STEPS):
        often = np.array([[1, 1, 0, 0], [1, 1, 0, 0]])
        cache.observe(often[:, ::-1] if number == 9 else often, 1, 1)
        assert cache.swap() == []


@given(seed=st.integers(0, 2**32 - 1), resident=st.integers(4, 12))
def test_swaps_find_what_is_hot_and_then_end(seed: int, resident: int):
    """A quarter of each layer gets nine tenths: it becomes resident, few at once, floors and ledger as they were."""
    layers, experts, k, hot = 3, 16, 2, 4
    rng = np.random.default_rng(seed)
    weights = np.repeat([0.9 / hot, 0.1 / (experts - hot)], [hot, experts - hot])
    shares = np.stack([rng.permutation(weights) for _ in range(layers)])
    cache, allocator = _cache(
        pages=layers * resident * MATRICES,
        expert_offload_limit=experts - resident,
        policy=_online(layers, experts, k),
    )
    cache.fill(keep_free_pages=0)
    ledger, swaps = allocator.ledger(), []
    for _ in range(300):
        _next_pass(cache, allocator)
        swaps.append(len(cache.swap()))
        assert (cache.resident.sum(axis=1) == resident).all() and allocator.ledger() == ledger
        cache.observe(_route(rng, shares, k), 1, 1)
    wanted = np.argsort(-shares, axis=1, kind="stable")[:, :hot]
    assert np.take_along_axis(cache.resident, wanted, axis=1).all()
    assert max(swaps) <= 1 and sum(swaps) <= 3 * layers * hot and sum(swaps[200:]) <= 4


@pytest.mark.parametrize("rows", [1, 8])
def test_noise_swaps_next_to_nothing(rows: int):
    layers, experts, k, steps = 6, 32, 4, 400
    rng, even = np.random.default_rng(rows), np.full((layers, experts), 1 / experts)
    cache, allocator = _cache(
        pages=layers * 16 * MATRICES, expert_offload_limit=16, policy=_online(layers, experts, k)
    )
    cache.fill(keep_free_pages=0)
    swaps = reads = 0
    for _ in range(steps):
        _next_pass(cache, allocator)
        swaps += len(cache.swap())
        counts = np.sum([_route(rng, even, k) for _ in range(rows)], axis=0)
        reads += np.count_nonzero(counts[~cache.resident])
        cache.observe(counts, rows, rows)
    assert swaps < 0.01 * reads


def test_no_step_swaps_more_than_an_eighth_of_what_it_reads():
    layers, experts, k = 12, 64, 8
    cache, allocator = _cache(
        pages=layers * 32 * MATRICES, expert_offload_limit=32, policy=_online(layers, experts, k)
    )
    cache.fill(keep_free_pages=0)
    absent = np.zeros((layers, experts), int)
    absent[:, -k:] = 1
    swaps = []
    for _ in range(60):
        _next_pass(cache, allocator)
        swaps.append(len(cache.swap()))
        # What is expected to be read lags behind what is: a ranking holds for eight steps.
        assert swaps[-1] <= max(1, layers * k / 8)
        cache.observe(absent, 1, 1)
    assert not absent[~cache.resident].any() and sum(swaps) == layers * k and swaps[-1] == 0


def test_copies_are_an_eighth_of_what_is_read_anyway():
    """4 layers of 64 experts, a quarter of them resident; tokens choose two evenly."""
    cache, _ = _cache(pages=4 * 16 * 3, expert_offload_limit=48, buffer_experts=0, policy=_online(4, 64))
    cache.fill(keep_free_pages=0)
    assert cache.resident_experts == 4 * 16
    # 10 tokens choose 4 x 20 experts, but for those chosen twice, and three quarters of these are away.
    assert 4 <= cache.copies_at_once(10) <= 80 * 3 / 4 / 8
    assert cache.copies_at_once(1) == 1 and cache.copies_at_once(1000) == 4 * 48 // 8


def test_what_is_not_clearly_different_is_shared_out_over_layers():
    layers, experts, k = 6, 16, 4
    policy, rng = _online(layers, experts, k), np.random.default_rng(0)
    for _ in range(8 * RANK_STEPS):
        policy.observe(_route(rng, np.full((layers, experts), 1 / experts), k), 1, 1)
    cache, allocator = _cache(pages=layers * experts * MATRICES, expert_offload_limit=experts, policy=policy)
    cache.fill(keep_free_pages=0)
    assert cache.shrink(3 * layers) == 3 * layers
    assert (cache.resident.sum(axis=1) == experts - 3).all()
    _next_pass(cache, allocator)
    cache.expand(2 * layers)
    _next_pass(cache, allocator)
    assert (cache.resident.sum(axis=1) == experts - 1).all()


def test_loading_buffers_follow_what_is_routed():
    cache, allocator = _cache(pages=6 + 6, expert_offload_limit=3, buffer_experts=1, policy=_online(2, 4))
    cache.fill(keep_free_pages=0)
    _, loads = cache.step_tables()
    assert _residents(cache) == [[0], [0]] and loads.tolist() == [[1], [1]]
    for _ in range(4 * RANK_STEPS):
        cache.observe(np.array([[1, 0, 0, 1], [1, 1, 0, 0]]), 1, 1)
    version = cache.version
    _next_pass(cache, allocator)
    assert cache.version != version
    effective, loads = cache.step_tables()
    assert loads.tolist() == [[3], [1]]
    assert cache.load_chances().tolist() == cache._policy.token_chances()[[0, 1], [3, 1]].tolist()
    assert effective[0, 3].tolist() == cache.buffer_pages[0, 0].tolist() and (effective[0, 1] == HOST).all()
    version = cache.version
    _next_pass(cache, allocator)
    assert cache.version == version
