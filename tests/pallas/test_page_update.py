import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.pallas.page_update import load_pages, move_pages, write_kv
from tests.pallas.paged import get, put, view


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "heads", "page_tokens", "dim"), [(1, 1, 4, 8), (7, 3, 4, 8), (33, 2, 16, 24)]
)
def test_write_kv_changes_those_rows_and_nothing_else(dtype, tokens, heads, page_tokens, dim):
    rng = np.random.default_rng(0)
    v = view("kv", (2, heads, page_tokens, dim), dtype)
    pool = rng.integers(0, 1 << 16, (6, v.stride * 4), dtype=np.uint16)
    where = rng.permutation(20 * page_tokens)[:tokens] + 4 * page_tokens  # each row once, scratch left out
    pages, offsets = np.divmod(where, page_tokens)
    keys, values = rng.normal(size=(2, tokens, heads, dim)).astype(v.dtype)
    got = np.asarray(
        jax.jit(write_kv, static_argnums=1)(
            pool, v, keys, values, pages.astype(np.int32), offsets.astype(np.int32)
        )
    )
    expected = pool.copy()
    for token in range(tokens):
        page = get(expected, v, pages[token]).copy()
        page[0, :, offsets[token]], page[1, :, offsets[token]] = keys[token], values[token]
        put(expected, v, pages[token], page)
    assert (got == expected).all()


def test_padding_tokens_write_only_to_scratch():
    v = view("kv", (2, 2, 4, 8), "bfloat16")
    pool = np.random.default_rng(0).integers(0, 1 << 16, (3, v.stride * 2), dtype=np.uint16)
    keys = np.full((5, 2, 8), np.nan, v.dtype)
    pages, offsets = np.array([3, 0, 0, 0, 0], np.int32), np.array([1, 2, 2, 2, 0], np.int32)
    got = np.asarray(jax.jit(write_kv, static_argnums=1)(pool, v, keys, keys, pages, offsets))
    assert (got[0, v.stride :] == pool[0, v.stride :]).all()  # page 1
    changed = np.argwhere(got[1:] != pool[1:])[:, 0]
    assert set(changed.tolist()) == {0} and len(changed) <= 4 * 8  # page 3, one row of each K and V head


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
    with pytest.raises(ValueError, match=r"keys of shape .* do not fit"):
        write_kv(pool, v, jnp.zeros((1, 3, 8)), jnp.zeros((1, 3, 8)), one, one)
    with pytest.raises(ValueError, match="do not divide"):
        load_pages(pool, jnp.zeros((2, v.stride - 1), jnp.uint16), one, one, jnp.int32(1))
    with pytest.raises(ValueError, match="cannot run as 'mosaic_gpu'"):
        load_pages(pool, pool, one, one, jnp.int32(1), implementation="mosaic_gpu")
