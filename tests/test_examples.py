"""The examples do what they show: a new kind of state is served like any other, and steps can be driven by hand."""

import jax
import numpy as np
import pytest

from examples import own_scheduler, token_shift
from rimuru_jax import Engine, SamplingParams
from tests.pallas.paged import get, poisoned_pool, put, view

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("lengths", [(1,), (3, 0, 1), (1, 1, 1, 1), (5, 1, 64, 2)])
def test_token_shift_token_by_token(lengths):
    channels, rng = 8, np.random.default_rng(0)
    v = view("shift", (1, channels), "float32")
    pool = poisoned_pool(40, v.stride)
    tokens = sum(lengths) + 3  # and padding
    x = rng.normal(size=(tokens, channels)).astype(np.float32)
    pages = rng.permutation(np.arange(2, 40))[: len(lengths)].astype(np.int32)
    has_state = np.arange(len(lengths)) % 2 == 0
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    wanted, states = np.zeros((sum(lengths), channels), np.float32), {}
    for row, length in enumerate(lengths):
        last = np.zeros(channels, np.float32)
        if has_state[row]:
            last = rng.normal(size=channels).astype(np.float32)
            put(pool, v, pages[row], last[None])
        for token in range(start[row], start[row] + length):
            wanted[token], last = last, x[token]
        states[row] = last
    got, after = jax.jit(token_shift.token_shift, static_argnums=2)(x, pool, v, pages, start, has_state)
    np.testing.assert_array_equal(np.asarray(got)[: sum(lengths)], wanted)
    after = np.asarray(after)
    for row, length in enumerate(lengths):
        if length:
            np.testing.assert_array_equal(get(after, v, pages[row])[0], states[row])
    untouched = np.setdiff1d(np.arange(1, 40), pages[np.array(lengths) > 0])
    assert (after[untouched] == pool[untouched]).all()


def tokens(engine: Engine, requests: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(requests, GREEDY, use_tqdm=False)]


def test_a_new_kind_is_served_like_any_other():
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 512, length).tolist() for length in (1, 7, 64, 65)]
    pattern = ("shift", "attn")
    alone = token_shift.build(pattern, max_num_seqs=1, max_num_batched_tokens=16)
    expected = [tokens(alone, [prompt])[0] for prompt in prompts]
    assert len({tuple(t) for t in expected}) == len(expected)
    for policy in ("elastic", "static"):
        engine = token_shift.build(pattern, memory_policy=policy, page_pool_bytes=16 << 20)
        assert tokens(engine, prompts) == expected
        engine.step()  # pages of the last requests return in the pass after
        used = {name: kind.used for name, kind in engine.allocator.ledger().kinds.items() if name != "expert"}
        assert used == {"shift": 0, "kv": 0}


def test_steps_by_hand_give_what_the_engine_gives():
    requests = [[1, 2, 3], list(range(40))]
    by_hand = own_scheduler.generate(own_scheduler.model(), requests, max_tokens=10)
    engine = Engine(own_scheduler.model(), dtype="float32", page_pool_bytes=8 << 20, max_model_len=64)
    assert by_hand == tokens(engine, requests)


def test_what_does_not_fit_is_said(monkeypatch):
    monkeypatch.setattr(own_scheduler, "POOL_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="prompt 0 does not fit into the pool"):
        own_scheduler.generate(own_scheduler.model(), [list(range(400))], max_tokens=2)
