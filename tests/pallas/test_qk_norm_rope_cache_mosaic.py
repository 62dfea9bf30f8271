"""The Mosaic GPU kernel of norm, rotation and cache: numbers in the GPU interpreter, code for real shapes, refusals.

Tests marked gpu run it on the card at real sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.qk_norm_rope_cache import mosaic_gpu
from tests.pallas.paged import mixed_bits, poisoned_pool, view
from tests.pallas.qkv import Case, run_once, same_bits


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The race detector of the interpreter only prints."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


interpreted = functools.partial(run_once, operator=mosaic_gpu.qk_norm_rope_cache)

INTERPRETED = {
    "qwen3": Case(heads=4, kv_heads=1, h=128, half=64, norm="plain", padding=1),
    "gates, part rotated, two groups": Case(
        heads=9, kv_heads=1, h=64, half=16, norm="zero_centred", gated=True, rows=((3, 2),)
    ),
    "rotation alone, rounded, padded pages": Case(
        heads=2, kv_heads=5, h=96, half=48, qkv_dtype="bfloat16", rows=((3, 2),), stride=44 * 96
    ),
    "norm in float32, no rotation": Case(heads=2, kv_heads=1, h=64, norm="float32", rows=((3, 2), (0, 1))),
}


@pytest.mark.parametrize("case", INTERPRETED.values(), ids=INTERPRETED)
def test_interpreted(case):
    pool = poisoned_pool(case.pages, case.view.stride)
    (q, got), (q2, got2) = (interpreted(case, pool, interpret=plgpu.InterpretGPUParams()) for _ in range(2))
    case.check(q, got, pool)
    same_bits(q, q2)
    same_bits(got, got2)


def test_several_turns_without_races(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "MANY_BLOCKS", 1)
    case = Case(heads=17, kv_heads=1, h=32, half=16, norm="plain", rows=((3, 1),), padding=1)
    pool = poisoned_pool(case.pages, case.view.stride)
    q, got = interpreted(case, pool, interpret=plgpu.InterpretGPUParams(detect_races=True))
    case.check(q, got, pool)


def rows_of(tokens: int) -> tuple[tuple[int, int], ...]:
    """Decodes, or prefills of which two continue."""
    if tokens <= 256:
        return tuple((37 * i % 300, 1) for i in range(tokens))
    return (0, tokens // 2), (11, tokens // 4), (4000, tokens - tokens // 2 - tokens // 4)


def real(tokens: int = 64, **options) -> Case:
    return Case(page_tokens=16, rows=rows_of(tokens), padding=3, **options)


MODELS = {
    "qwen3-30b": {"heads": 32, "kv_heads": 4, "h": 128, "half": 64, "norm": "plain"},
    "qwen3.5": {"heads": 16, "kv_heads": 2, "h": 256, "half": 32, "norm": "zero_centred", "gated": True},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "h": 64, "half": 32},
    "nemotron": {"heads": 32, "kv_heads": 2, "h": 128},
    "phi": {"heads": 32, "kv_heads": 8, "h": 96, "half": 48, "norm": "float32", "qkv_dtype": "bfloat16"},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("tokens", [1, 8192])
def test_lowers_for_cuda(model, tokens):
    case = real(tokens, **model)
    pool = jax.ShapeDtypeStruct((2048, 4 * case.view.stride), jnp.uint16)
    traced = jax.jit(case.run(mosaic_gpu.qk_norm_rope_cache)).trace(pool, **case.inputs)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


def test_refusals():
    pages, qkv = view("kv", (2, 2, 16, 64), "bfloat16"), jnp.zeros((2, 512))
    assert mosaic_gpu.refusal(qkv, pages, 32) is None
    assert mosaic_gpu.refusal(qkv.astype(jnp.bfloat16), pages, None) is None
    wide = view("kv", (2, 2, 16, 64), "float32")
    assert "qkv is float32 and pages are float32" in str(mosaic_gpu.refusal(qkv, wide, 32))
    for half in (8, 24, 0):
        assert f"heads of 64 of which {2 * half} are rotated" in str(mosaic_gpu.refusal(qkv, pages, half))
    odd = view("kv", (2, 2, 16, 72), "bfloat16")
    assert "heads of 72" in str(mosaic_gpu.refusal(qkv, odd, None))


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 8192])
def test_on_the_card(model, tokens):
    case = real(tokens, **model)
    pool = poisoned_pool(case.pages, case.view.stride)
    (q, got), (q2, got2) = (run_once(case, pool, implementation="mosaic_gpu") for _ in range(2))
    case.check(q, got, pool)
    same_bits(q[: case.tokens], q2[: case.tokens])
    same_bits(got, got2)


BEYOND = 2800  # pages of 2048 x 768, of which those from 1366 on lie beyond 2^31 words


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 8192])
def test_pages_beyond_2_to_the_31_elements_on_the_card(tokens):
    """Nothing else changes in a pool in which no two pages are alike."""
    case = real(tokens, **MODELS["qwen3-30b"])
    words = 2048 * 768
    case.inputs["page_table"] += BEYOND * words // case.view.stride - case.pages
    step = jax.jit(case.run(implementation="mosaic_gpu"), donate_argnums=0)
    queries, pool = step(mixed_bits(BEYOND, words), **case.inputs)

    entry_rows = case.view.rows(3)
    page, row = case.places[..., 0], case.places[..., 1]
    places = jnp.asarray(page * (2 * case.kv_heads * case.page_tokens) + row, jnp.int32)
    entries = jax.jit(entry_rows.read)(pool, places)
    case.check_values(np.asarray(queries), np.asarray(entries))

    @functools.partial(jax.jit, donate_argnums=0)
    def without(pool):
        return entry_rows.write(pool, places.reshape(-1), jnp.zeros((places.size, case.h), entries.dtype))

    assert jax.jit(lambda a, b: jnp.all(a == b))(without(pool), without(mixed_bits(BEYOND, words)))
