"""Selective scan against its recurrence in float64, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.pallas.ragged import CHUNK
from rimuru_jax.pallas.selective_scan import selective_scan
from tests.pallas.paged import view
from tests.pallas.recurrent import DECODES, QUICK, RAGGED, Rows, cut, stays_in_place

run = jax.jit(
    selective_scan, static_argnames=("view", "max_query_len", "implementation"), compiler_options=QUICK
)
# Groups and types that differ at once: what is to be compiled stays little.
SETTINGS = {
    "float32": {},
    "bfloat16 tokens": {"groups": 1, "dtype": "bfloat16"},
    "bfloat16 states": {"groups": 4, "dtype": "bfloat16", "storage": "bfloat16"},
}


def case(rows, *, groups=2, dtype="float32", storage="float32", step=1.0):
    """Random tokens of 4 heads of 8, states 12 wide; dt is uniform in 0 .. step. Returns (rows, tokens, A and D)."""
    given = Rows(rows, view("ssm", (4, 8, 12), storage))
    x = given.normal(4, 8, dtype=dtype, seed=1)
    dt = (step / (1 + np.exp(-given.normal(4, seed=2)))).astype(np.float32)
    B, C = (given.normal(groups, 12, dtype=dtype, seed=seed) for seed in (3, 4))
    A = np.array([-0.1, -1.0, -4.0, -16.0], np.float32)
    D = np.array([0.5, -1.0, 0.0, 2.0]).astype(x.dtype)
    return given, (x, dt, B, C), (A, D)


def call(tokens, weights, *args, max_query_len=2, **options):
    (x, dt, B, C), (A, D) = tokens, weights
    return run(x, dt, A, B, C, D, *args, max_query_len=max_query_len, **options)


def oracle(given: Rows, tokens, weights):
    x, dt, B, C = (values.astype(np.float64) for values in tokens)
    A, D = (values.astype(np.float64) for values in weights)
    heads, shared = x.shape[1], x.shape[1] // B.shape[1]
    for row, state in enumerate(given.states):
        state = state[0].copy()
        outputs = np.zeros((given.lengths[row], *x.shape[1:]))
        for i, t in enumerate(range(given.start[row], given.start[row + 1])):
            for h in range(heads):
                state[h] *= np.exp(dt[t, h] * A[h])
                state[h] += dt[t, h] * np.outer(x[t, h], B[t, h // shared])
                outputs[i, h] = state[h] @ C[t, h // shared] + D[h] * x[t, h]
        yield outputs, state[None]


def check(given: Rows, tokens, weights, max_query_len=2):
    out, pool = call(tokens, weights, given.pool, given.view, *given.metadata, max_query_len=max_query_len)
    assert out.dtype == tokens[0].dtype
    given.check(out, pool, list(oracle(given, tokens, weights)))


@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_ragged(rows, setting):
    check(*case(rows, **setting))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_decode(setting):
    check(*case(DECODES, **setting), max_query_len=1)


@pytest.mark.parametrize("step", [1e-4, 1e-2, 10.0])
@pytest.mark.parametrize("rows", ["chunks over a state", "three chunks"])
def test_steps_of_any_size(rows, step):
    """Also below the limit that some implementations clamp dt to."""
    check(*case(RAGGED[rows], step=step))


@pytest.mark.parametrize(
    "lengths",
    [[1] * 5 + [125], [CHUNK - 1, 1, CHUNK, 2], [CHUNK, CHUNK + 1, 1], [CHUNK + 1, CHUNK + 1], [129, 1]],
    ids=str,
)
def test_any_cut_gives_the_same(lengths):
    given, tokens, weights = case([(False, 130)])
    check(given, tokens, weights)
    expected = list(oracle(given, tokens, weights))
    cut(given, tokens, lengths, lambda *args: call(args[:4], weights, *args[4:]), expected)


def test_a_row_gives_the_same_bits_in_any_company():
    given, tokens, weights = case(RAGGED["mixed"])
    together, _ = call(tokens, weights, given.pool, given.view, *given.metadata)
    for row in range(len(given.rows)):
        alone = [np.roll(values, -given.start[row], axis=0) for values in tokens]
        out, _ = call(alone, weights, given.pool, given.view, *given.only(row))
        assert (np.asarray(out[: given.lengths[row]]) == np.asarray(together[given.tokens(row)])).all()


@pytest.mark.parametrize(("tokens", "rows", "max_query_len"), [(128, 4, 128), (16, 16, 1), (2, 2, 1)])
def test_the_pool_stays_in_place(tokens, rows, max_query_len):
    v = view("ssm", (4, 32, 32), "float32")

    def operator(pool, pages):
        x, B, dt = jnp.ones((tokens, 4, 32), jnp.bfloat16), jnp.ones((tokens, 2, 32)), jnp.ones((tokens, 4))
        start = jnp.minimum(jnp.arange(rows + 1), tokens)
        return selective_scan(
            x, dt, -dt[0], B, B, dt[0], pool, v, pages, start, pages > 3, max_query_len=max_query_len
        )

    stays_in_place(operator, v, rows)


def test_errors():
    given, (x, dt, B, C), (A, D) = case([(False, 3)])
    args = given.pool, given.view, *given.metadata
    with pytest.raises(ValueError, match=r"states \(4, 6, 12\) of floats do not fit ssm pages \(4, 8, 12\)"):
        call((x[..., :6], dt, B, C), (A, D), *args)
    with pytest.raises(ValueError, match="3 heads are no multiple of 2 groups"):
        call((x[:, :3], dt[:, :3], B, C), (A[:3], D[:3]), *args)
    integers = given.pool, view("ssm", (4, 8, 12), "int32"), *given.metadata
    with pytest.raises(ValueError, match=r"pages .* of int32"):
        call((x, dt, B, C), (A, D), *integers)
    with pytest.raises(ValueError, match="cannot run as 'mosaic_gpu'"):
        call((x, dt, B, C), (A, D), *args, implementation="mosaic_gpu")
