"""Causal convolution against float64 sums over each row's past, kept dense."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.pallas.causal_conv1d import causal_conv1d
from tests.pallas.paged import view
from tests.pallas.recurrent import DECODES, QUICK, RAGGED, Rows, stays_in_place

CHANNELS = 24
_run = jax.jit(
    causal_conv1d,
    static_argnames=("view", "max_query_len", "activation", "implementation"),
    compiler_options=QUICK,
)
run = functools.partial(_run, max_query_len=2)


def case(rows, kernel=4, dtype="float32", storage=None, seed=0):
    v = view("conv", (1, CHANNELS), storage or dtype)
    given = Rows(rows, v, run=kernel - 1, seed=seed)
    rng = np.random.default_rng(seed + 1)
    weight = rng.normal(size=(CHANNELS, kernel)).astype(v.dtype)
    bias = rng.normal(size=CHANNELS).astype(v.dtype)
    return given, given.normal(CHANNELS, dtype=dtype), weight, bias


def oracle(given: Rows, x, weight, bias=None, silu=False):
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    for row, state in enumerate(given.states):
        past = list(state[:, 0])
        outputs = []
        for token in x[given.tokens(row)]:
            past.append(token)
            total = sum(weight[:, -1 - back] * past[-1 - back] for back in range(weight.shape[1]))
            total = total + (0 if bias is None else bias.astype(np.float64))
            outputs.append(total / (1 + np.exp(-total)) if silu else total)
        newest = np.stack(past[len(past) - given.run :])[:, None]
        yield np.array(outputs).reshape(-1, CHANNELS), newest


@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize(("dtype", "storage"), [("float32",) * 2, ("bfloat16",) * 2, ("float32", "bfloat16")])
def test_ragged(rows, dtype, storage):
    given, x, weight, _ = case(rows, dtype=dtype, storage=storage)
    out, pool = run(x, weight, None, given.pool, given.view, *given.metadata)
    assert out.dtype == x.dtype
    given.check(out, pool, list(oracle(given, x, weight)))


@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_kernel_bias_and_activation(kernel):
    given, x, weight, bias = case(
        [(True, 1), (True, 2), (False, 3), (True, 4), (False, 1), (True, 9)], kernel
    )
    out, pool = run(x, weight, bias, given.pool, given.view, *given.metadata, activation="silu")
    given.check(out, pool, list(oracle(given, x, weight, bias, silu=True)))


@pytest.mark.parametrize("has_state", [False, True])
def test_single_row_with_a_single_page(has_state):
    """The least that can be written: one page, of which a CPU makes two."""
    given, x, weight, _ = case([(has_state, 5)], kernel=2)
    pages, start, states = given.metadata
    out, pool = run(x, weight, None, given.pool, given.view, pages[:1], start[:2], states[:1])
    given.check(out, pool, list(oracle(given, x, weight)))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("lengths", [[1] * 12, [2, 1, 3, 5, 1], [3, 4, 5], [11, 1]], ids=str)
def test_any_cut_gives_the_same_bits(lengths, fresh):
    whole, x, weight, bias = case([(not fresh, 12)])
    expected, pool = run(x, weight, bias, whole.pool, whole.view, *whole.metadata)
    expected_state = whole.state_in(np.asarray(pool), 0)
    outputs, pool, done = [], whole.pool, 0
    for length in lengths:
        pages, start, states = whole.metadata
        rolled, start = np.roll(x, -done, axis=0), np.minimum(start, length)
        out, pool = run(rolled, weight, bias, pool, whole.view, pages, start, states | (done > 0))
        outputs.append(np.asarray(out[:length]))
        done += length
    assert (np.concatenate(outputs) == np.asarray(expected[:12])).all()
    assert (whole.state_in(np.asarray(pool), 0) == expected_state).all()


@pytest.mark.parametrize(("tokens", "rows"), [(64, 8), (2, 2)])
def test_the_pool_stays_in_place(tokens, rows):
    v = view("conv", (1, 1024), "bfloat16")

    def operator(pool, pages):
        x, start = jnp.ones((tokens, 1024), jnp.bfloat16), jnp.minimum(jnp.arange(rows + 1), tokens)
        return causal_conv1d(x, jnp.ones((1024, 4)), None, pool, v, pages, start, pages > 3, max_query_len=2)

    stays_in_place(operator, v, rows, run=3)


def test_decodes_need_no_tokens_but_their_own():
    given, x, weight, bias = case(DECODES)
    out, pool = run(x[: len(DECODES)], weight, bias, given.pool, given.view, *given.metadata, max_query_len=1)
    given.check(out, pool, list(oracle(given, x, weight, bias)))


def test_errors():
    given, x, weight, _ = case([(False, 3)])
    args = given.pool, given.view, *given.metadata
    with pytest.raises(ValueError, match=r"inputs of 8 channels do not fit conv pages of shape \(1, 24\)"):
        run(x[:, :8], weight[:8], None, *args)
    with pytest.raises(ValueError, match="a kernel of 1 has no state"):
        run(x, weight[:, :1], None, *args)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        run(x, weight, None, *args, activation="relu")
    with pytest.raises(ValueError, match="cannot run as 'mosaic_gpu'"):
        run(x, weight, None, *args, implementation="mosaic_gpu")
