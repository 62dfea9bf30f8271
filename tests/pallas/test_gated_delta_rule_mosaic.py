"""The Mosaic GPU kernels of the gated delta rule: numbers in the GPU interpreter, code for real shapes, refusals.

Tests marked gpu compare them on the card with the recurrence in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.gated_delta_rule import gated_delta_rule, mosaic_gpu
from rimuru_jax.pallas.gated_delta_rule.mosaic_prefill import unit_lower_inverse
from rimuru_jax.pallas.ragged import CHUNK
from tests.pallas.paged import view
from tests.pallas.recurrent import DECODES, RAGGED, Rows, move_beyond_2_to_the_31, norm_error
from tests.pallas.test_gated_delta_rule import oracle

# The operands of a chunk's products are rounded to bfloat16, relative errors of 2^-9 at most, 1.1e-3 in the mean
# square; half a dozen such errors, independent of each other, meet in an output.
TOLERANCE = 5e-3

_kernels = jax.jit(mosaic_gpu.gated_delta_rule, static_argnames=("view", "max_query_len", "interpret"))


def case(rows, *, key_heads=1, value_heads=2, key_dim=128, storage="float32", padding=0):
    """Random tokens; pages lie `padding` rows further apart than they must."""
    states = view("ssm", (value_heads, key_dim, 128), storage)
    if padding:
        stride = states.stride + padding * 128 * states.dtype.itemsize // 2
        states = view("ssm", states.page_shape, storage, stride)
    given = Rows(rows, states)
    q, k = (given.normal(key_heads, key_dim, dtype="bfloat16", seed=seed) for seed in (1, 2))
    v = given.normal(value_heads, 128, dtype="bfloat16", seed=3)
    noise = [given.normal(value_heads, seed=seed) for seed in (4, 5)]
    log_decay, beta = (1 / (1 + np.exp(-x)) for x in noise)
    return given, (q, k, v, (-log_decay).astype(np.float32), beta)


def interpret(given: Rows, tokens, max_query_len=2):
    return _kernels(
        *tokens,
        given.pool,
        given.view,
        *given.metadata,
        max_query_len=max_query_len,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The race detector of the interpreter only prints."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "setting",
    [{"padding": 24}, {"storage": "bfloat16", "key_dim": 64, "value_heads": 1}],
    ids=["float32, padded", "bfloat16"],
)
def test_decode_interpreted(setting):
    given, tokens = case(DECODES, **setting)
    out, pool = interpret(given, tokens, max_query_len=1)
    given.check(out, pool, list(oracle(given, tokens)))


@pytest.mark.parametrize(
    ("rows", "setting"),
    [
        ([(True, 1), (False, 70), (True, 0), (True, 5)], {"padding": 24}),
        ([(True, CHUNK), (False, 1)], {"storage": "bfloat16", "key_dim": 64, "value_heads": 1}),
    ],
    ids=["float32, padded", "bfloat16"],
)
def test_mixed_interpreted(rows, setting):
    given, tokens = case(rows, **setting)
    tokens[3][::7] = -3e4  # forgets everything; what follows must stay exact
    out, pool = interpret(given, tokens)
    given.check_norms(out, pool, list(oracle(given, tokens)), TOLERANCE)


@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_unit_lower_inverse(alike):
    """Also where keys are all alike, whose matrix has powers that overflow."""
    a = np.random.default_rng(0).uniform(-0.2, 0.2, (3, CHUNK, CHUNK)) * (1 - alike) + alike
    got = np.asarray(unit_lower_inverse(jnp.asarray(a, jnp.float32)), np.float64)
    wanted = np.linalg.inv(np.eye(CHUNK) + np.tril(a, -1))
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


SHAPES = {
    "qwen3-next": (16, 32, 128, "float32", None),
    "bfloat16 states": (16, 32, 128, "bfloat16", None),
    "padded pages": (16, 32, 128, "float32", 2 * (32 * 128 + 96) * 128),
    "keys of 64": (4, 4, 64, "float32", None),
}


def abstract_operands(shape, tokens, rows):
    key_heads, value_heads, key_dim, storage, stride = shape
    states = view("ssm", (value_heads, key_dim, 128), storage, stride)
    struct = jax.ShapeDtypeStruct
    q, gates = struct((tokens, key_heads, key_dim), jnp.bfloat16), struct((tokens, value_heads), jnp.float32)
    v = struct((tokens, value_heads, 128), jnp.bfloat16)
    pool = struct((2048, states.stride), jnp.uint16)
    metadata = struct((rows,), jnp.int32), struct((rows + 1,), jnp.int32), struct((rows,), jnp.bool_)
    return (q, q, v, gates, gates, pool), states, metadata


@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), (1024, 8)], ids=["decode", "mixed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_lowers_for_cuda(shape, tokens, rows):
    operands, states, metadata = abstract_operands(shape, tokens, rows)
    longest = 1 if tokens == rows else tokens
    call = jax.jit(functools.partial(mosaic_gpu.gated_delta_rule, view=states, max_query_len=longest))
    names = dict(zip(("pages", "query_start", "has_state"), metadata, strict=True))
    text = call.trace(*operands, **names).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == (1 if longest == 1 else 2)


def test_refusals():
    given, tokens = case([(False, 3)])
    q, k, v = map(jnp.asarray, tokens[:3])
    assert mosaic_gpu.refusal(q, k, v, given.view) is None
    single = v.astype(jnp.float32)
    assert "must be bfloat16" in str(mosaic_gpu.refusal(q, k, single, given.view))
    halves = view("ssm", given.view.page_shape, "float16")
    assert "states are float16" in str(mosaic_gpu.refusal(q, k, v, halves))
    assert "heads are 128 x 64" in str(mosaic_gpu.refusal(q, k, v[..., :64], given.view))


run = jax.jit(gated_delta_rule, static_argnames=("view", "max_query_len", "implementation"))


def on_the_card(given: Rows, tokens, max_query_len=2, pool=None):
    pool = given.pool if pool is None else pool
    operands = given.view, *given.metadata
    return run(*tokens, pool, *operands, max_query_len=max_query_len, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_ragged_on_the_card(rows, storage):
    given, tokens = case(rows, key_heads=2, value_heads=4, storage=storage, padding=32)
    out, pool = on_the_card(given, tokens)
    given.check_norms(out, pool, list(oracle(given, tokens)), TOLERANCE)
    again, _ = on_the_card(given, tokens)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(out))


@pytest.mark.gpu
def test_a_row_gives_the_same_bits_in_any_company_on_the_card():
    given, tokens = case(RAGGED["mixed"], key_heads=2, value_heads=4)
    together, _ = on_the_card(given, tokens)
    for row in range(len(given.rows)):
        alone = [np.roll(x, -given.start[row], axis=0) for x in tokens]
        out, _ = run(
            *alone, given.pool, given.view, *given.only(row), max_query_len=2, implementation="mosaic_gpu"
        )
        assert (np.asarray(out[: given.lengths[row]]) == np.asarray(together[given.tokens(row)])).all()


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [{}, {"key_dim": 64}, {"storage": "bfloat16"}], ids=str)
def test_decode_on_the_card(setting):
    given, tokens = case(DECODES, key_heads=16, value_heads=32, **setting)
    out, pool = on_the_card(given, tokens, max_query_len=1)
    given.check(out, pool, list(oracle(given, tokens)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["decodes", "mixed"])
def test_pages_beyond_2_to_the_31_elements_on_the_card(rows):
    given, tokens = case(RAGGED[rows], key_heads=16, value_heads=32)
    wanted = list(oracle(given, tokens))
    pool = move_beyond_2_to_the_31(given)
    out, pool = on_the_card(given, tokens, pool=pool)
    for row, (outputs, state) in enumerate(wanted):
        got = given.state_on_device(pool, row)
        assert norm_error(got, state) <= TOLERANCE
        assert norm_error(np.asarray(out, np.float64)[given.tokens(row)], outputs) <= TOLERANCE
