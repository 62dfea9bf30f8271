"""Gated delta rule against its recurrence in float64, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.pallas.gated_delta_rule import gated_delta_rule
from rimuru_jax.pallas.ragged import CHUNK
from tests.pallas.paged import view
from tests.pallas.recurrent import DECODES, QUICK, RAGGED, Rows, cut, stays_in_place

run = jax.jit(
    gated_delta_rule, static_argnames=("view", "max_query_len", "implementation"), compiler_options=QUICK
)
# Heads and types that differ at once: what is to be compiled stays little.
SETTINGS = {
    "float32": {},
    "bfloat16 tokens": {"key_heads": 2, "value_heads": 2, "dtype": "bfloat16"},
    "bfloat16 states": {"key_heads": 1, "value_heads": 3, "dtype": "bfloat16", "storage": "bfloat16"},
}


def case(rows, *, key_heads=2, value_heads=4, dtype="float32", storage="float32", decay=1.0):
    """Random tokens of sizes dk = 16, dv = 8; log decays are uniform in -decay .. 0."""
    given = Rows(rows, view("ssm", (value_heads, 16, 8), storage))
    q, k = (given.normal(key_heads, 16, dtype=dtype, seed=seed) for seed in (1, 2))
    v = given.normal(value_heads, 8, dtype=dtype, seed=3)
    noise = [given.normal(value_heads, seed=seed) for seed in (4, 5)]
    log_decay, beta = (1 / (1 + np.exp(-x)) for x in noise)
    return given, (q, k, v, (-decay * log_decay).astype(np.float32), beta)


def oracle(given: Rows, tokens):
    q, k, v, log_decay, beta = (x.astype(np.float64) for x in tokens)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    heads, group = v.shape[1], v.shape[1] // q.shape[1]
    for row, state in enumerate(given.states):
        state = state[0].copy()
        outputs = np.zeros((given.lengths[row], *v.shape[1:]))
        for i, t in enumerate(range(given.start[row], given.start[row + 1])):
            for h in range(heads):
                key = k[t, h // group]
                state[h] *= np.exp(log_decay[t, h])
                state[h] += np.outer(key, beta[t, h] * (v[t, h] - key @ state[h]))
                outputs[i, h] = q[t, h // group] @ state[h] / np.sqrt(q.shape[2])
        yield outputs, state[None]


def check(given: Rows, tokens, max_query_len=2):
    out, pool = run(*tokens, given.pool, given.view, *given.metadata, max_query_len=max_query_len)
    assert out.dtype == tokens[2].dtype
    given.check(out, pool, list(oracle(given, tokens)))


@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_ragged(rows, setting):
    check(*case(rows, **setting))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_decode(setting):
    check(*case(DECODES, **setting), max_query_len=1)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0])
@pytest.mark.parametrize("rows", ["chunks over a state", "three chunks"])
def test_decays(rows, decay):
    check(*case(RAGGED[rows], decay=decay))


def test_small_decays_after_a_large_one():
    """Forgetting everything leaves what follows exact: decays are no differences of large sums."""
    given, tokens = case([(True, 60), (True, 130)], decay=0.1)
    tokens[3][::7] = -3e4
    check(given, tokens)


@pytest.mark.parametrize(
    "lengths",
    [[1] * 5 + [125], [CHUNK - 1, 1, CHUNK, 2], [CHUNK, CHUNK + 1, 1], [CHUNK + 1, CHUNK + 1], [129, 1]],
    ids=str,
)
def test_any_cut_gives_the_same(lengths):
    given, tokens = case([(False, 130)])
    check(given, tokens)
    cut(given, tokens, lengths, lambda *args: run(*args, max_query_len=2), list(oracle(given, tokens)))


def test_a_row_gives_the_same_bits_in_any_company():
    given, tokens = case(RAGGED["mixed"])
    together, _ = run(*tokens, given.pool, given.view, *given.metadata, max_query_len=2)
    for row in range(len(given.rows)):
        alone = [np.roll(x, -given.start[row], axis=0) for x in tokens]
        out, _ = run(*alone, given.pool, given.view, *given.only(row), max_query_len=2)
        assert (np.asarray(out[: given.lengths[row]]) == np.asarray(together[given.tokens(row)])).all()


@pytest.mark.parametrize(("tokens", "rows", "max_query_len"), [(128, 4, 128), (16, 16, 1), (2, 2, 1)])
def test_the_pool_stays_in_place(tokens, rows, max_query_len):
    v = view("ssm", (4, 32, 32), "float32")

    def operator(pool, pages):
        q, values = jnp.ones((tokens, 2, 32), jnp.bfloat16), jnp.ones((tokens, 4, 32), jnp.bfloat16)
        beta, start = jnp.ones((tokens, 4)), jnp.minimum(jnp.arange(rows + 1), tokens)
        return gated_delta_rule(
            q, q, values, -beta, beta, pool, v, pages, start, pages > 3, max_query_len=max_query_len
        )

    stays_in_place(operator, v, rows)


def test_errors():
    given, (q, k, v, log_decay, beta) = case([(False, 3)])
    args = given.pool, given.view, *given.metadata
    with pytest.raises(ValueError, match=r"states \(4, 12, 8\) of floats do not fit ssm pages \(4, 16, 8\)"):
        run(q[..., :12], k[..., :12], v, log_decay, beta, *args, max_query_len=2)
    with pytest.raises(ValueError, match="3 value heads are no multiple of 2 key heads"):
        run(q, k, v[:, :3], log_decay[:, :3], beta[:, :3], *args, max_query_len=2)
    integers = given.pool, view("ssm", (4, 16, 8), "int32"), *given.metadata
    with pytest.raises(ValueError, match=r"pages .* of int32"):
        run(q, k, v, log_decay, beta, *integers, max_query_len=2)
    with pytest.raises(ValueError, match="cannot run as 'mosaic_gpu'"):
        run(q, k, v, log_decay, beta, *args, max_query_len=2, implementation="mosaic_gpu")
