"""The Mosaic GPU kernel of the causal convolution: numbers in the GPU interpreter, code for real shapes, refusals.

Tests marked gpu compare it on the card with the same sums in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.causal_conv1d import causal_conv1d, mosaic_gpu, mosaic_tokens
from tests.pallas.paged import view
from tests.pallas.recurrent import DECODES, RAGGED, Rows, move_beyond_2_to_the_31, norm_error

SHORT = [(True, 1), (True, 2), (False, 3), (True, 0), (True, 4), (False, 1), (True, 9)]

_kernels = jax.jit(
    mosaic_gpu.causal_conv1d, static_argnames=("view", "activation", "max_query_len", "interpret")
)


def case(rows, channels, *, kernel=4, dtype="bfloat16", padded=False):
    pages = view("conv", (1, channels), dtype)
    if padded:
        pages = view("conv", (1, channels), dtype, 2 * pages.stride)
    given = Rows(rows, pages, run=kernel - 1)
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(channels, kernel)).astype(pages.dtype)
    bias = rng.normal(size=channels).astype(pages.dtype)
    return given, given.normal(channels, dtype=dtype), weight, bias


def oracle(given: Rows, x, weight, bias=None, silu=False):
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    past = weight.shape[1] - 1
    for row, state in enumerate(given.states):
        seen = np.concatenate([state[:, 0], x[given.tokens(row)]])
        total = sum(weight[:, j] * seen[j : len(seen) - past + j] for j in range(past + 1))
        total = total + (0 if bias is None else bias.astype(np.float64))
        yield total / (1 + np.exp(-total)) if silu else total, seen[len(seen) - past :, None]


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The race detector of the interpreter only prints."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("rows", "setting", "silu"),
    [
        (SHORT, {"channels": 256}, True),
        (SHORT, {"channels": 256, "kernel": 3, "dtype": "float32", "padded": True}, False),
        (DECODES, {"channels": 384}, True),
    ],
    ids=["bfloat16, silu", "float32, kernel of 3, padded", "decodes of three parts"],
)
def test_interpreted(rows, setting, silu, monkeypatch):
    monkeypatch.setattr(mosaic_tokens, "FEW_BLOCKS", 1)  # more of them take long here
    given, x, weight, bias = case(rows, **setting)
    bias = bias if silu else None
    x = x[: given.start[-1] + 9]
    out, pool = _kernels(
        x,
        weight,
        bias,
        given.pool,
        given.view,
        *given.metadata,
        activation="silu" if silu else None,
        max_query_len=max(given.lengths),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    given.check(out, pool, list(oracle(given, x, weight, bias, silu)))


@pytest.mark.parametrize(("end", "few_blocks"), [(0, 1), (70, 1), (150, 1), (70, mosaic_tokens.FEW_BLOCKS)])
def test_tokens_interpreted(end, few_blocks, monkeypatch):
    """Three blocks of 64 tokens, or 19 of 8, of which the last is cut short; padding is NaN and gives what is finite."""
    monkeypatch.setattr(mosaic_tokens, "FEW_BLOCKS", few_blocks)
    rng = np.random.default_rng(3)
    x, taps = rng.normal(size=(150, 128)).astype(np.float32), rng.normal(size=(5, 128)).astype(np.float32)
    x[end:] = np.nan
    call = functools.partial(mosaic_tokens.convolve_tokens, activation=None)
    out = call(
        *map(jnp.asarray, (x, taps, np.int32(end))), interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    assert np.isfinite(out).all()
    wanted = sum(x[j : max(end, 3) - 3 + j].astype(np.float64) * taps[j] for j in range(4)) + taps[4]
    np.testing.assert_allclose(out[3 : max(end, 3)], wanted, rtol=1e-4, atol=1e-5)


SHAPES = {
    "qwen3-next": (8192, "bfloat16", None),
    "nemotron": (6144, "bfloat16", None),
    "granite small": (8448, "bfloat16", None),
    "granite tiny": (3328, "bfloat16", None),
    "padded pages": (8192, "bfloat16", 2 * 8192),
    "float32": (8192, "float32", None),
}


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_lowers_for_cuda(shape, decode):
    channels, dtype, stride = shape
    pages = view("conv", (1, channels), dtype, stride)
    struct = jax.ShapeDtypeStruct
    call = functools.partial(
        mosaic_gpu.causal_conv1d, view=pages, activation="silu", max_query_len=1 if decode else 2
    )
    text = (
        jax.jit(call)
        .trace(
            struct((256, channels), pages.dtype),
            struct((channels, 4), jnp.bfloat16),
            struct((channels,), jnp.bfloat16),
            struct((2048, 4 * pages.stride), jnp.uint16),
            pages=struct((64,), jnp.int32),
            query_start=struct((65,), jnp.int32),
            has_state=struct((64,), jnp.bool_),
        )
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert text.count("@mosaic_gpu") == (1 if decode else 2)


def test_refusals():
    pages, narrow = view("conv", (1, 256), "bfloat16"), view("conv", (1, 192), "bfloat16")
    x, weight = jnp.zeros((2, 256), jnp.bfloat16), jnp.zeros((256, 4))
    assert mosaic_gpu.refusal(x, weight, pages) is None
    assert "inputs are float32" in str(mosaic_gpu.refusal(x.astype(jnp.float32), weight, pages))
    assert "192 channels" in str(mosaic_gpu.refusal(x[:, :192], weight[:192], narrow))
    assert "9 columns" in str(mosaic_gpu.refusal(x, jnp.zeros((256, 9)), pages))


run = jax.jit(causal_conv1d, static_argnames=("view", "activation", "max_query_len", "implementation"))


def on_the_card(given: Rows, x, weight, bias, pool=None, **options):
    pool = given.pool if pool is None else pool
    return run(
        x,
        weight,
        bias,
        pool,
        given.view,
        *given.metadata,
        max_query_len=max(given.lengths),
        implementation="mosaic_gpu",
        **options,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*RAGGED.values(), SHORT], ids=[*RAGGED, "short"])
@pytest.mark.parametrize("channels", [8192, 3328])
@pytest.mark.parametrize("kernel", [2, 4])
def test_ragged_on_the_card(rows, channels, kernel):
    given, x, weight, bias = case(rows, channels, kernel=kernel)
    out, pool = on_the_card(given, x, weight, bias, activation="silu")
    given.check(out, pool, list(oracle(given, x, weight, bias, silu=True)))
    out, pool = on_the_card(given, x, weight, None)
    given.check(out, pool, list(oracle(given, x, weight)))


@pytest.mark.gpu
def test_pages_beyond_2_to_the_31_elements_on_the_card():
    given, x, weight, bias = case(SHORT, 8192)
    wanted = list(oracle(given, x, weight, bias, silu=True))
    out, pool = on_the_card(given, x, weight, bias, pool=move_beyond_2_to_the_31(given), activation="silu")
    for row, (outputs, state) in enumerate(wanted):
        if given.lengths[row]:
            np.testing.assert_array_equal(given.state_on_device(pool, row), state)
            # One rounding to bfloat16.
            assert norm_error(np.asarray(out, np.float64)[given.tokens(row)], outputs) <= 2.0**-8
