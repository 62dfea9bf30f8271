"""Page loads and moves: checks and choice of implementation."""

from jaxtyping import Array, Int32

from rimuru_jax.array_types import HostPages, Pool
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.page_update import mosaic_gpu, reference

AVAILABLE = ("reference", "mosaic_gpu")


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
