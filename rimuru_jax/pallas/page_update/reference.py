"""Page loads and moves in plain jnp: the specification, and the path on a CPU."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from rimuru_jax.array_types import HostPages, Pool
from rimuru_jax.pallas.memory_view import MemoryView


def load_pages(
    pool: Pool,
    host_pages: HostPages,
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Pool:
    words = host_pages.shape[1]
    per_huge = pool.shape[1] // words

    def load(i, pool):
        page = lax.dynamic_slice(host_pages, (sources[i], jnp.int32(0)), (1, words))
        target = targets[i]
        return lax.dynamic_update_slice(pool, page, (target // per_huge, target % per_huge * words))

    return lax.fori_loop(jnp.int32(0), count, load, pool)


def move_pages(
    pool: Pool,
    view: MemoryView,
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Pool:
    per_huge = pool.shape[1] // view.stride

    def place(page: Array) -> tuple[Array, Array]:
        return page // per_huge, page % per_huge * view.stride

    def move(i, pool):
        page = lax.dynamic_slice(pool, place(sources[i]), (1, view.words))
        return lax.dynamic_update_slice(pool, page, place(targets[i]))

    return lax.fori_loop(jnp.int32(0), count, move, pool)
