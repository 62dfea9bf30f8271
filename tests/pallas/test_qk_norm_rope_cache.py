"""Norm, rotation and the writing of keys and values against float64, in shuffled pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.pallas.qk_norm_rope_cache import qk_norm_rope_cache
from tests.pallas.paged import poisoned_pool
from tests.pallas.qkv import Case, run_once, same_bits
from tests.pallas.recurrent import stays_in_place

CASES = {
    "qwen3": Case(heads=4, kv_heads=2, h=8, half=4, norm="plain"),
    "gates, part rotated": Case(heads=3, kv_heads=1, h=16, half=2, norm="zero_centred", gated=True),
    "norm in float32": Case(heads=2, kv_heads=2, h=8, half=4, norm="float32"),
    "rotation alone": Case(heads=4, kv_heads=2, h=8, half=4, page_tokens=2),
    "neither": Case(heads=2, kv_heads=1, h=8),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reference(case, dtype):
    case = dataclasses.replace(case, dtype=dtype, padding=2)
    pool = poisoned_pool(case.pages, case.view.stride)
    case.check(*run_once(case, pool), pool)


def test_projections_may_come_rounded():
    case = dataclasses.replace(CASES["qwen3"], padding=1)
    pool = poisoned_pool(case.pages, case.view.stride)
    rounded = dataclasses.replace(case, qkv_dtype="bfloat16")
    for got, expected in zip(run_once(rounded, pool), run_once(case, pool), strict=True):
        same_bits(got, expected)


def test_the_pool_stays_in_place():
    case = Case(heads=4, kv_heads=2, h=64, half=32)

    def operator(pool, rows):
        position = jnp.arange(16, dtype=jnp.int32)
        turn = jnp.ones((16, 32), jnp.float32)
        return qk_norm_rope_cache(
            jnp.ones((16, 8 * 64), jnp.bfloat16),
            pool,
            case.view,
            jnp.ones((8, 8), jnp.int32),
            jnp.broadcast_to(rows[0], (16,)),
            position,
            position[:9],
            num_heads=4,
            rotation=(turn, turn),
        )

    stays_in_place(operator, case.view, 8)


def test_errors():
    case = CASES["qwen3"]
    pool = poisoned_pool(case.pages, case.view.stride)
    with pytest.raises(
        ValueError, match=r"qkv has 64 columns, but 3 query heads .* want 56, or 80 with gates"
    ):
        jax.jit(dataclasses.replace(case, heads=3).run())(pool, **case.inputs)
    narrow = {**case.inputs, "weights": np.ones(8, np.float32)}
    with pytest.raises(
        ValueError, match=r"weights of the norm have shape \(8,\), but heads of 8 want \(16,\)"
    ):
        jax.jit(case.run())(pool, **narrow)
    wide = {**case.inputs, "rotation": (np.ones((5, 5), np.float32),) * 2}
    with pytest.raises(ValueError, match="a rotation of 10 dimensions does not fit heads of 8"):
        jax.jit(case.run())(pool, **wide)
    with pytest.raises(ValueError, match="cannot run as 'mosaic_gpu'"):
        run_once(case, pool, implementation="mosaic_gpu")
