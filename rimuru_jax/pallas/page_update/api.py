"""Page writes and moves: checks and choice of implementation."""

from jaxtyping import Array, Int32

from rimuru_jax.array_types import HostPages, Keys, Pool
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.page_update import mosaic_gpu, reference

AVAILABLE = ("reference", "mosaic_gpu")


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
        keys: `[T, N, h]`.
        values: as `keys`.
        pages: page of each token; 0 (scratch) for padding tokens, which may or may not be written.
        offsets: row of each token in its page, 0 <= offset < page_tokens.
    """
    if len(view.page_shape) != 4 or keys.shape[1:] != (view.page_shape[1], view.page_shape[3]):
        raise ValueError(f"keys of shape {keys.shape} do not fit KV pages of shape {view.page_shape}")
    refusal = mosaic_gpu.write_kv_refusal(view, keys, values)
    chosen = resolve("write_kv", implementation, AVAILABLE, refusal=refusal)
    operator = mosaic_gpu.write_kv if chosen == "mosaic_gpu" else reference.write_kv
    return operator(pool, view, keys, values, pages, offsets)


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

    Targets differ from each other. Pool pages are numbered in the expert kind's view; host and pool pages have the same
    number of words.
    """
    if pool.shape[1] % host_pages.shape[1]:
        raise ValueError(
            f"host pages of {host_pages.shape[1]} words do not divide huge pages of {pool.shape[1]} words"
        )
    words = host_pages.shape[1]
    refusal = mosaic_gpu.copy_refusal(words, words)
    chosen = resolve("load_pages", implementation, AVAILABLE, refusal=refusal)
    operator = mosaic_gpu.load_pages if chosen == "mosaic_gpu" else reference.load_pages
    return operator(pool, host_pages, sources, targets, count)


def move_pages(
    pool: Pool,
    view: MemoryView,
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> Pool:
    """Copy pages `sources[:count]` of the pool to `targets[:count]`; `count` is a run-time value.

    The result is that of one copy after another: a page may be left by one move and taken by a later one, in any chain.
    """
    if pool.shape[1] % view.stride:
        raise ValueError(
            f"{view.kind} pages of {view.stride} words do not divide huge pages of {pool.shape[1]}"
        )
    refusal = mosaic_gpu.copy_refusal(view.stride, view.words)
    chosen = resolve("move_pages", implementation, AVAILABLE, refusal=refusal)
    operator = mosaic_gpu.move_pages if chosen == "mosaic_gpu" else reference.move_pages
    return operator(pool, view, sources, targets, count)
