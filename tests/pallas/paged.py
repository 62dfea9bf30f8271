"""Paged inputs built shuffled, for tests of the operators; the oracles see them dense."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rimuru_jax.pallas.memory_view import WORD_BYTES, MemoryView

NAN_WORD = 0xFFFF  # a NaN in bfloat16, and twice in a row in float32


def poisoned_pool(huge_pages: int, words: int) -> np.ndarray:
    """A pool in which every page is NaN until somebody writes it."""
    return np.full((huge_pages, words), NAN_WORD, np.uint16)


def view(kind: str, page_shape: tuple[int, ...], dtype: str, stride: int | None = None) -> MemoryView:
    """A view whose pages lie close together unless `stride` words are given."""
    itemsize = jnp.dtype(dtype).itemsize
    return MemoryView(
        kind=kind,
        page_shape=page_shape,
        dtype=jnp.dtype(dtype),
        stride=stride or int(np.prod(page_shape)) * itemsize // WORD_BYTES,
    )


def put(pool: np.ndarray, view: MemoryView, page: int, values: np.ndarray) -> None:
    """Write one page, by byte arithmetic of its own."""
    words = np.ascontiguousarray(values.astype(view.dtype)).view(np.uint16).reshape(-1)
    pool.reshape(-1)[page * view.stride : page * view.stride + len(words)] = words


def get(pool: np.ndarray, view: MemoryView, page: int) -> np.ndarray:
    """Read one page, by byte arithmetic of its own."""
    words = np.ascontiguousarray(pool).reshape(-1)[page * view.stride : page * view.stride + view.words]
    return words.view(view.dtype).reshape(view.page_shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def mixed_bits(huge_pages: int, words: int) -> jax.Array:
    """A pool in which no two pages are alike."""
    row = jax.lax.broadcasted_iota(jnp.uint32, (huge_pages, words), 0)
    word = jax.lax.broadcasted_iota(jnp.uint32, (huge_pages, words), 1)
    return ((row * np.uint32(2654435761) + word * np.uint32(40503)) >> np.uint32(7)).astype(jnp.uint16)
