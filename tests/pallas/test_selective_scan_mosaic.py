"""The Mosaic GPU kernels of the selective scan: numbers in the GPU interpreter, code for real shapes, refusals.

Tests marked gpu compare them on the card with the recurrence in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.ragged import CHUNK
from rimuru_jax.pallas.selective_scan import mosaic_gpu, selective_scan
from tests.pallas.paged import view
from tests.pallas.recurrent import DECODES, RAGGED, Rows, move_beyond_2_to_the_31, norm_error
from tests.pallas.test_selective_scan import oracle

# The operands of a chunk's products are rounded to bfloat16, relative errors of 2^-9 at most, 1.1e-3 in the mean
# square; half a dozen such errors, independent of each other, meet in an output.
TOLERANCE = 5e-3

_kernels = jax.jit(mosaic_gpu.selective_scan, static_argnames=("view", "max_query_len", "interpret"))


def case(rows, *, heads=2, groups=1, size=128, storage="float32", padding=0, step=1.0):
    """Random tokens; dt is uniform in 0 .. step; pages lie `padding` rows further apart than they must."""
    states = view("ssm", (heads, 64, size), storage)
    if padding:
        stride = states.stride + padding * size * states.dtype.itemsize // 2
        states = view("ssm", states.page_shape, storage, stride)
    given = Rows(rows, states)
    x = given.normal(heads, 64, dtype="bfloat16", seed=1)
    dt = (step / (1 + np.exp(-given.normal(heads, seed=2)))).astype(np.float32)
    B, C = (given.normal(groups, size, dtype="bfloat16", seed=seed) for seed in (3, 4))
    A = -np.geomspace(0.1, 16.0, heads).astype(np.float32)
    D = np.linspace(-1, 2, heads).astype(x.dtype)
    return given, (x, dt, B, C), (A, D)


def call(function, given: Rows, tokens, weights, *, pool=None, max_query_len=2, **options):
    (x, dt, B, C), (A, D) = tokens, weights
    pool = given.pool if pool is None else pool
    operands = given.view, *given.metadata
    return function(x, dt, A, B, C, D, pool, *operands, max_query_len=max_query_len, **options)


def interpret(*case, **options):
    return call(_kernels, *case, interpret=plgpu.InterpretGPUParams(detect_races=True), **options)


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The race detector of the interpreter only prints."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "setting",
    [{"padding": 24}, {"storage": "bfloat16", "size": 64, "groups": 2}],
    ids=["float32", "bfloat16"],
)
def test_decode_interpreted(setting):
    given, *operands = case(DECODES, **setting)
    out, pool = interpret(given, *operands, max_query_len=1)
    given.check(out, pool, list(oracle(given, *operands)))


@pytest.mark.parametrize(
    ("rows", "setting"),
    [
        ([(True, 1), (False, 70), (True, 0), (True, 5)], {"padding": 24}),
        ([(True, CHUNK), (False, 1)], {"storage": "bfloat16", "size": 64, "groups": 2, "step": 20.0}),
    ],
    ids=["float32, padded", "bfloat16, forgetful"],
)
def test_mixed_interpreted(rows, setting):
    given, *operands = case(rows, **setting)
    out, pool = interpret(given, *operands)
    given.check_norms(out, pool, list(oracle(given, *operands)), TOLERANCE)


SHAPES = {
    "nemotron": (64, 8, 128, "float32", None),
    "nemotron, padded": (64, 8, 128, "float32", 2 * 4872 * 128),
    "granite small": (128, 1, 128, "float32", None),
    "bfloat16 states": (48, 1, 128, "bfloat16", None),
}


@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), (1024, 8)], ids=["decode", "mixed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_lowers_for_cuda(shape, tokens, rows):
    heads, groups, size, storage, stride = shape
    states = view("ssm", (heads, 64, size), storage, stride)
    longest = 1 if tokens == rows else tokens
    struct, f32, bf16 = jax.ShapeDtypeStruct, jnp.float32, jnp.bfloat16
    call = functools.partial(mosaic_gpu.selective_scan, view=states, max_query_len=longest)
    text = (
        jax.jit(call)
        .trace(
            struct((tokens, heads, 64), bf16),
            struct((tokens, heads), f32),
            struct((heads,), f32),
            struct((tokens, groups, size), bf16),
            struct((tokens, groups, size), bf16),
            struct((heads,), bf16),
            struct((512, states.stride), jnp.uint16),
            pages=struct((rows,), jnp.int32),
            query_start=struct((rows + 1,), jnp.int32),
            has_state=struct((rows,), jnp.bool_),
        )
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert text.count("@mosaic_gpu") == (1 if longest == 1 else 2)


def test_refusals():
    given, tokens, _ = case([(False, 3)])
    x, _, B, C = map(jnp.asarray, tokens)
    assert mosaic_gpu.refusal(x, B, C, given.view) is None
    assert "must be bfloat16" in str(mosaic_gpu.refusal(x.astype(jnp.float32), B, C, given.view))
    halves = view("ssm", given.view.page_shape, "float16")
    assert "states are float16" in str(mosaic_gpu.refusal(x, B, C, halves))
    assert "head are 32 x 128" in str(mosaic_gpu.refusal(x[..., :32], B, C, given.view))


run = jax.jit(selective_scan, static_argnames=("view", "max_query_len", "implementation"))
on_the_card = functools.partial(call, run, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_ragged_on_the_card(rows, storage):
    given, *operands = case(rows, heads=8, groups=2, storage=storage, padding=32)
    out, pool = on_the_card(given, *operands)
    given.check_norms(out, pool, list(oracle(given, *operands)), TOLERANCE)
    again, _ = on_the_card(given, *operands)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(out))


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [{"heads": 64, "groups": 8}, {"heads": 128}, {"size": 64}], ids=str)
def test_decode_on_the_card(setting):
    given, *operands = case(DECODES, **setting)
    out, pool = on_the_card(given, *operands, max_query_len=1)
    given.check(out, pool, list(oracle(given, *operands)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["decodes", "mixed"])
def test_pages_beyond_2_to_the_31_elements_on_the_card(rows):
    given, *operands = case(RAGGED[rows], heads=64, groups=8)
    wanted = list(oracle(given, *operands))
    out, pool = on_the_card(given, *operands, pool=move_beyond_2_to_the_31(given))
    for row, (outputs, state) in enumerate(wanted):
        got = given.state_on_device(pool, row)
        assert norm_error(got, state) <= TOLERANCE
        assert norm_error(np.asarray(out, np.float64)[given.tokens(row)], outputs) <= TOLERANCE
