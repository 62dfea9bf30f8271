"""Experts give way to requests in a burst and come back in the lull; nobody's output notices."""

import numpy as np
import pytest

from rimuru_jax import Engine, SamplingParams
from tests.models.tiny_checkpoints import write_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic")
    write_checkpoint(folder, "qwen3_moe", seed=5, num_hidden_layers=4, num_experts=16)
    return folder


def engine(model, **config) -> Engine:
    """A pool with room for all experts and one or two requests."""
    settings = {"dtype": "float32", "page_pool_bytes": 544 << 10, "max_model_len": 128, "max_num_seqs": 8}
    return Engine(model, **(settings | config))


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 96, rng.integers(20, 60)).tolist() for _ in range(count)]


def test_burst_shrinks_and_lull_grows_back(model):
    one = engine(model, expert_offload_limit=12)
    burst = prompts(8, seed=1)
    for index, prompt in enumerate(burst):
        one.add_request(str(index), prompt, PARAMS)
    resident, answers = [int(one.experts.resident.sum())], {}
    while one.has_unfinished_requests():
        for output in one.step():
            if output.finished:
                answers[output.request_id] = output.outputs[0].token_ids
        resident.append(int(one.experts.resident.sum()))
    shrunk = list(one.metrics.events("shrink"))
    assert shrunk and min(resident) < resident[0], "the burst took no experts"

    # The lull: one short request keeps the engine stepping.
    lull = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
    one.generate([5, 6, 7], lull, use_tqdm=False)
    grown = [event for event in one.metrics.events("expand") if event.step > shrunk[0].step]
    assert grown, "the lull gave no experts back"
    assert one.experts.resident.sum() > min(resident)

    # The same answers as requests that have the engine, and all experts, for themselves.
    alone = engine(model, memory_policy="static")
    for index, prompt in enumerate(burst):
        expected = alone.generate(prompt, PARAMS, use_tqdm=False)[0]
        assert answers[str(index)] == expected.outputs[0].token_ids
    one.allocator.check_ledger()


def test_more_requests_run_at_once_than_with_all_experts_resident(model):
    peaks = {}
    for policy in ("static", "elastic"):
        one = engine(model, memory_policy=policy)
        for index, prompt in enumerate(prompts(8, seed=3)):
            one.add_request(str(index), prompt, PARAMS)
        peaks[policy] = 0
        while one.has_unfinished_requests():
            one.step()
            peaks[policy] = max(peaks[policy], len(one.scheduler.running))
    assert peaks["elastic"] > peaks["static"]


def test_residency_follows_the_hotset_profile(model, tmp_path):
    from rimuru_jax.controller import fingerprint
    from rimuru_jax.host.hotset import HotsetProfile

    one = engine(model)
    counts = np.random.default_rng(0).permuted(np.tile(np.arange(1, 17), (4, 1)), axis=1) * 10
    profile = HotsetProfile.uniform(fingerprint(one.model_config)).record(counts, tokens=100)
    profile.save(tmp_path / "hotset.json")
    fixed = engine(
        model,
        memory_policy="fixed",
        expert_offload_limit=10,
        expert_hotset_path=str(tmp_path / "hotset.json"),
    )
    for layer in range(4):
        hottest = np.argsort(-counts[layer])[:6]
        assert set(np.flatnonzero(fixed.experts.resident[layer])) == set(hottest)


def test_a_profile_of_something_else_is_corrected_while_requests_run(model, tmp_path):
    """Experts that the profile takes for cold replace those it takes for hot; the answers are those of all resident."""
    from rimuru_jax.controller import fingerprint
    from rimuru_jax.host.hotset import HotsetProfile

    questions = [[7] * 20]
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
    alone = engine(model, memory_policy="static")
    expected = [output.outputs[0].token_ids for output in alone.generate(questions, long, use_tqdm=False)]
    opposite = alone.router_counts.max() - alone.router_counts
    profile = HotsetProfile.uniform(fingerprint(alone.model_config)).record(opposite, tokens=100)
    profile.save(tmp_path / "hotset.json")
    reads = {}
    for policy in ("hotset", "online"):
        one = engine(
            model,
            loading_buffer_experts=1,
            expert_cache_policy=policy,
            expert_hotset_path=str(tmp_path / "hotset.json"),
        )
        # Half of the experts go, and someone else takes their pages.
        one.experts.shrink(32)
        one.allocator.begin_pass()
        one.allocator.allocate(77, {"expert": 32 * 3})
        outputs = one.generate(questions, long, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        reads[policy] = one.metrics.counters["expert_host_reads"]
        assert (one.metrics.counters["expert_swaps"] > 0) == (policy == "online")
        one.allocator.check_ledger()
        # What the tables show is there, swapped in or not.
        pool, host = np.asarray(one.loop.pool), np.asarray(one.loop.host_pages)
        pages, kept = pool.reshape(-1, host.shape[1]), np.argwhere(one.experts.resident)
        for layer, expert in kept:
            shown = pages[one.experts.table[layer, expert]]
            first = (layer * 16 + expert) * 3
            np.testing.assert_array_equal(shown, host[first : first + 3])
    assert reads["online"] < reads["hotset"]


def test_loading_buffers_hold_what_the_host_holds(model):
    """Buffered experts are really copied: their pool pages equal the host pages after a step."""
    one = engine(
        model,
        memory_policy="fixed",
        expert_offload_limit=8,
        loading_buffer_experts=3,
        expert_prefetch="all",
    )
    one.generate(prompts(1, seed=4)[0], PARAMS, use_tqdm=False)
    _, loads = one.experts.step_tables()
    assert (loads >= 0).sum() == 3 * 4
    counters = one.metrics.counters
    steps = counters["scheduler_passes"] - counters["empty_passes"]
    assert counters["expert_pages_loaded"] == steps * 4 * 3 * 3
    touched = [counters[name] for name in ("expert_hits", "expert_buffer_hits", "expert_host_reads")]
    assert min(touched) > 0
    # One token touches two experts in each of four layers; the prompt's step at most all of them.
    assert (steps - 1) * 4 * 2 < sum(touched) <= (steps - 1) * 4 * 2 + 4 * 16
    pool, host = np.asarray(one.loop.pool), np.asarray(one.loop.host_pages)
    pages = pool.reshape(-1, host.shape[1])
    # The two sets were last filled by the last two layers.
    for layer in (2, 3):
        for slot, expert in enumerate(loads[layer]):
            for matrix in range(3):
                page = one.experts.buffer_pages[layer % 2, slot, matrix]
                assert (pages[page] == host[(layer * 16 + expert) * 3 + matrix]).all()


def test_small_steps_read_in_place(model):
    """A prompt chooses nearly all experts, one token two of sixteen: "auto" loads ahead for the prompt alone."""

    def run(prefetch: str):
        settings = {"memory_policy": "fixed", "expert_offload_limit": 8, "loading_buffer_experts": 3}
        one = engine(model, expert_prefetch=prefetch, **settings)
        answer = one.generate(prompts(1, seed=4)[0], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        counts = one.metrics.counters
        places = [counts[name] for name in ("expert_hits", "expert_buffer_hits", "expert_host_reads")]
        return answer, places, counts["expert_pages_loaded"]

    everything, auto, nothing = run("all"), run("auto"), run("none")
    assert everything[0] == auto[0] == nothing[0]
    assert everything[1][0] == auto[1][0] == nothing[1][0]
    assert sum(everything[1]) == sum(auto[1]) == sum(nothing[1])
    assert everything[1][1] > auto[1][1] > nothing[1][1] == 0
    assert auto[2] == 4 * 3 * 3 and nothing[2] == 0


def test_resident_pages_hold_what_the_host_holds_after_moves(model):
    one = engine(model, expert_offload_limit=12)
    one.generate(prompts(8, seed=6), PARAMS, use_tqdm=False)
    one.generate(prompts(1, seed=7)[0], PARAMS, use_tqdm=False)
    assert any(one.metrics.events("expand"))
    pool, host = np.asarray(one.loop.pool), np.asarray(one.loop.host_pages)
    pages = pool.reshape(-1, host.shape[1])
    for layer, expert in np.argwhere(one.experts.resident):
        for matrix, page in enumerate(one.experts.table[layer, expert]):
            assert (pages[page] == host[(layer * 16 + expert) * 3 + matrix]).all()
