"""Page writes and moves: checks and choice of implementation."""

from jaxtyping import Array, Int32

from rimuru_jax.array_types import HostPages, Keys, Pool
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.page_update import reference


def write_kv(
    pool: Pool,
    view: MemoryView,
    keys: Keys,
    values: Keys,
    pages: Int32[Array, " T"],
    offsets: Int32[Array, " T"],
    *,
    implementation: Implementation | None = None,
) -> Pool:
    """Write the keys and values of T tokens into one layer's pages.

    Args:
        pool: the page pool, donated or carried by the caller so that it is written in place.
        view: pages `[2 (K, V), N, page_tokens, h]`.
        keys, values: `[T, N, h]`.
        pages: page of each token; 0 (scratch) for padding rows.
        offsets: row of each token in its page, 0 <= offset < page_tokens.
    """
    resolve("page_update", implementation, ("reference",))
    if len(view.page_shape) != 4 or keys.shape[1:] != (view.page_shape[1], view.page_shape[3]):
        raise ValueError(f"keys of shape {keys.shape} do not fit KV pages of shape {view.page_shape}")
    return reference.write_kv(pool, view, keys, values, pages, offsets)


def load_pages(
    pool: Pool,
    host_pages: HostPages,
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> Pool:
    """Copy host pages `sources[:count]` into pool pages `targets[:count]`; `count` is a run-time value.

    Pool pages are numbered in the expert kind's view; host and pool pages have the same number of words.
    """
    resolve("page_update", implementation, ("reference",))
    if pool.shape[1] % host_pages.shape[1]:
        raise ValueError(
            f"host pages of {host_pages.shape[1]} words do not divide huge pages of {pool.shape[1]} words"
        )
    return reference.load_pages(pool, host_pages, sources, targets, count)


def move_pages(
    pool: Pool,
    view: MemoryView,
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> Pool:
    """Copy pages `sources[:count]` of the pool to `targets[:count]`, one after another; `count` is a run-time value."""
    resolve("page_update", implementation, ("reference",))
    if pool.shape[1] % view.stride:
        raise ValueError(
            f"{view.kind} pages of {view.stride} words do not divide huge pages of {pool.shape[1]}"
        )
    return reference.move_pages(pool, view, sources, targets, count)
