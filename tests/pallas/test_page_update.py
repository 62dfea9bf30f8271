import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.pallas.page_update import load_pages, move_pages
from tests.pallas.paged import view


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("per_huge", [1, 3])
def test_load_pages_copies_the_first_count(count, per_huge):
    rng = np.random.default_rng(1)
    words = 40
    pool = rng.integers(0, 1 << 16, (6, words * per_huge), dtype=np.uint16)
    host = rng.integers(0, 1 << 16, (9, words), dtype=np.uint16)
    sources = rng.permutation(9)[:5].astype(np.int32)
    targets = rng.permutation(6 * per_huge)[:5].astype(np.int32)
    got = np.asarray(jax.jit(load_pages)(pool, host, sources, targets, np.int32(count)))
    expected = pool.copy().reshape(-1, words)
    expected[targets[:count]] = host[sources[:count]]
    assert (got.reshape(-1, words) == expected).all()


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("per_huge", [1, 3])
def test_move_pages_moves_the_first_count_in_order(count, per_huge):
    rng = np.random.default_rng(1)
    v = view("expert", (5, 8), "bfloat16")
    pool = rng.integers(0, 1 << 16, (6, v.stride * per_huge), dtype=np.uint16)
    sources = rng.permutation(6 * per_huge)[:5].astype(np.int32)
    targets = np.roll(sources, 2)  # pages that are left are taken again
    got = np.asarray(jax.jit(move_pages, static_argnums=1)(pool, v, sources, targets, np.int32(count)))
    expected = pool.copy().reshape(-1, v.stride)
    for source, target in zip(sources[:count], targets[:count], strict=True):
        expected[target] = expected[source]
    assert (got.reshape(-1, v.stride) == expected).all()


def test_errors():
    v = view("kv", (2, 2, 4, 8), "bfloat16")
    pool, one = jnp.zeros((2, v.stride), jnp.uint16), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="do not divide"):
        load_pages(pool, jnp.zeros((2, v.stride - 1), jnp.uint16), one, one, jnp.int32(1))
    with pytest.raises(ValueError, match="cannot run as 'mosaic_gpu'"):
        load_pages(pool, pool, one, one, jnp.int32(1), implementation="mosaic_gpu")
