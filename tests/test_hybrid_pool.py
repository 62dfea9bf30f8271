"""Experts, keys and values, recurrent states and convolution inputs in one pool, through the whole engine.

The model's states are as large as two expert pages, so that room for them has to be made by moving experts together.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax import Engine, RequestOutput, SamplingParams
from rimuru_jax.host.allocator import BUFFERS
from rimuru_jax.models.config import Attention, GatedDeltaNet, Moe, Rotary
from rimuru_jax.models.hybrid import hybrid, random_model

VOCAB = 160
MODEL = hybrid(
    ("gdn", "attn"),
    hidden_size=64,
    vocab_size=VOCAB,
    moe=Moe(num_experts=16, num_experts_per_tok=2, intermediate_size=32, normalize=True),
    mixers={
        "gdn": GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=64, kernel=4),
        "attn": Attention(
            num_heads=4, num_kv_heads=4, head_dim=16, scale=0.25, rotary=Rotary(theta=1e4), qk_norm="head"
        ),
    },
)
EXPERT_PAGE = 32 * 64 * 4
ALL_EXPERTS = 2 * 16 * 3  # pages
MAX_MODEL_LEN = 96


def engine(pages: int, **config) -> Engine:
    """An engine with a pool of so many expert pages, scratch included."""
    settings = {
        "dtype": "float32",
        "page_pool_bytes": pages * EXPERT_PAGE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "loading_buffer_experts": 2,
    }
    return Engine(random_model(MODEL, "float32"), **(settings | config))


def poison(one: Engine) -> None:
    """Fill every byte of the pool that nobody holds with NaN patterns: free pages, tails, padding and scratch."""
    pool = np.array(one.loop.pool)
    dead = np.ones(pool.nbytes, bool)
    for store, placed in zip(one.allocator._stores, one.plan.layout.kinds, strict=True):
        held = np.flatnonzero((store.flat >= BUFFERS) & ~store.cut)
        size = placed.stride_bytes * placed.kind.run
        for first in (store.page_ids(held).astype(np.int64) * placed.stride_bytes).tolist():
            dead[first : first + size] = False
    assert dead[: one.plan.layout.huge_page_bytes].all()
    pool.reshape(-1)[dead.reshape(-1, 2).any(axis=1)] = 0xFFFF
    one.loop.pool = jnp.asarray(pool)


def serve(one: Engine, requests: dict[str, tuple[list[int], SamplingParams]], after_step=lambda one: None):
    """Every request's output; a new one arrives every second step."""
    waiting, outputs = dict(requests), {}
    steps = 0
    while waiting or one.has_unfinished_requests():
        if waiting and steps % 2 == 0:
            request_id = next(iter(waiting))
            one.add_request(request_id, *waiting.pop(request_id))
        for output in one.step():
            if output.finished:
                outputs[output.request_id] = output
        after_step(one)
        steps += 1
    return outputs


def requests(count: int, seed: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Half of them greedy, half sampled with a seed."""
    rng = np.random.default_rng(seed)
    made = {}
    for number in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
        params = SamplingParams(
            temperature=float(number % 2),
            seed=number,
            max_tokens=int(rng.integers(1, 56)),
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
        )
        made[f"r{number}"] = prompt, params
    return made


def check_idle(one: Engine) -> None:
    one.step()  # pages of the last requests return in the pass after
    one.step()
    one.allocator.check_ledger()
    used = {name: counts.used for name, counts in one.allocator.ledger().kinds.items()}
    assert used == dict.fromkeys(used, 0) | {"expert": int(one.experts._held.sum()) * one.experts.matrices}


def test_states_are_as_large_as_two_expert_pages():
    layout = engine(80).plan.layout
    assert layout["ssm"].stride_bytes == 2 * layout["expert"].stride_bytes == layout.huge_page_bytes
    assert {placed.kind.name for placed in layout.kinds} == {"expert", "ssm", "conv", "kv"}


def test_nothing_stale_reaches_an_output():
    """Law 4: NaN patterns in every byte that nobody holds, after every step."""
    clean, poisoned = engine(ALL_EXPERTS + 16), engine(ALL_EXPERTS + 16)
    expected = serve(clean, requests(16, seed=1))
    got = serve(poisoned, requests(16, seed=1), after_step=poison)
    assert poisoned.metrics.counters["expert_shrinks"] > 0
    assert clean.metrics.counters == poisoned.metrics.counters
    for request_id, output in expected.items():
        assert got[request_id].outputs[0].token_ids == output.outputs[0].token_ids
        assert got[request_id].outputs[0].logprobs == output.outputs[0].logprobs


def test_states_stored_in_bfloat16_take_half_and_cost_little():
    outputs = {}
    for dtype in ("float32", "bfloat16"):
        one = engine(200, mamba_ssm_cache_dtype=dtype)
        assert one.plan.layout["ssm"].kind.page_bytes == 4 * 16 * 64 * (4 if dtype == "float32" else 2)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB, detokenize=False)
        prompt = np.random.default_rng(3).integers(0, VOCAB, 90).tolist()
        (output,) = one.generate(
            [prompt], params, use_tqdm=False
        )  # in two chunks: the state is stored in between
        assert output.prompt_logprobs is not None
        outputs[dtype] = np.array(
            [
                [entry[token].logprob for token in range(VOCAB)]
                for entry in output.prompt_logprobs[1:]
                if entry
            ]
        )
    error = np.abs(outputs["float32"] - outputs["bfloat16"])
    assert (error[:63] == 0).all()  # the first chunk stores, but does not read
    assert 0 < np.median(error[64:]) < 0.02  # a state is rounded to 8 bits once


def test_experts_give_way_to_states_and_keys_and_come_back():
    """From the event log and the ledger: a burst of requests shrinks experts, the lull grows them back."""
    one = engine(ALL_EXPERTS + 24, loading_buffer_experts=0)
    assert one.experts.resident.all()
    for request_id, request in requests(12, seed=2).items():
        one.add_request(request_id, *request)
    most = {"ssm": 0, "kv": 0, "conv": 0}
    while one.has_unfinished_requests():
        one.step()
        for name, counts in one.allocator.ledger().kinds.items():
            if name != "expert":
                most[name] = max(most[name], counts.used)
    # The 23 pages that were free hold 11 states at most, and nothing else.
    assert most["ssm"] == 8 and most["conv"] == 8 and most["kv"] > 8
    shrunk, admitted = list(one.metrics.events("shrink")), list(one.metrics.events("admitted"))
    assert shrunk and any(event.step > shrunk[0].step for event in admitted)
    one.generate([1, 2], SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False), use_tqdm=False)
    grown = list(one.metrics.events("expand"))
    assert grown and grown[-1].step > shrunk[-1].step
    check_idle(one)
    assert one.experts.resident.all()


def same_tokens(got: RequestOutput, alone: RequestOutput) -> bool:
    """Equal but where the two best were closer than rounding: a batch of another size sums in another order."""
    ours, theirs = got.outputs[0], alone.outputs[0]
    assert theirs.logprobs is not None
    for index, (token, wanted) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)):
        if token != wanted:
            best, second = sorted((entry.logprob for entry in theirs.logprobs[index].values()), reverse=True)[
                :2
            ]
            return best - second < 1e-4
    return len(ours.token_ids) <= len(theirs.token_ids)


ONE_REQUEST = 2 + 1 + MAX_MODEL_LEN // 16
"""Pages of a request of full length: a state, convolution inputs, keys and values."""
WANTED = ALL_EXPERTS + 16 * ONE_REQUEST


@pytest.fixture(scope="module")
def alone() -> dict[str, RequestOutput]:
    """What every request gets that has the engine for itself."""
    one = engine(2 * WANTED, memory_policy="static", max_num_seqs=1)
    return {
        request_id: one.generate([prompt], params, use_tqdm=False)[0]
        for request_id, (prompt, params) in requests(200, seed=6).items()
    }


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_two_hundred_requests_in_a_third_of_the_memory(policy, alone):
    """Random arrivals, aborts and preemptions; whoever finishes has what it would have had alone."""
    limits = {"max_num_seqs": 16, "expert_offload_limit": 12, "loading_buffer_experts": 1}
    one = engine(int(0.3 * WANTED), scheduling_policy=policy, **limits)
    rng = np.random.default_rng(5)
    waiting, finished, aborted = requests(200, seed=6), {}, set()
    while waiting or one.has_unfinished_requests():
        for _ in range(rng.poisson(1.0)):
            if waiting:
                request_id = next(iter(waiting))
                one.add_request(request_id, *waiting.pop(request_id), priority=int(rng.integers(3)))
        if rng.random() < 0.05 and one._states:
            request_id = str(rng.choice(sorted(one._states)))
            if one.abort(request_id):
                aborted.add(request_id)
        for output in one.step():
            if output.finished:
                finished[output.request_id] = output
    assert set(finished) == set(alone) and 5 < len(aborted) < 60
    assert one.metrics.counters["num_preemptions"] > 5
    assert one.metrics.counters["expert_pages_moved"] > 0
    check_idle(one)
    for request_id, expected in alone.items():
        cut = request_id in aborted
        assert finished[request_id].outputs[0].finish_reason == ("abort" if cut else "length")
        assert same_tokens(finished[request_id], expected), request_id
        if not cut:
            assert len(finished[request_id].outputs[0].token_ids) == len(expected.outputs[0].token_ids)
