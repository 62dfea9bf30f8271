"""Routed experts over pages in plain jnp: the specification, and the path on a CPU.

One tile of tokens of one expert at a time, so that an expert nobody chose costs nothing. A page's weights are the
left side of every product (`w @ x^T`): on a CPU that needs no transposed copy of the weights, and it is the form the
GPU kernel has.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Hidden, HostPages, Pool
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import Routing
from rimuru_jax.pallas.page_loads import PageLoads
from rimuru_jax.pallas.page_update.reference import load_pages
from rimuru_jax.pallas.paged_moe.activations import Activation


def token_tile(pairs: int, num_experts: int) -> int:
    """Rows of a tile: about the mean number of tokens per expert, a power of two up to 64."""
    mean = max(1, pairs // num_experts)
    return min(64, 1 << (mean - 1).bit_length())


def paged_moe(
    hidden: Hidden,
    weights: Float[Array, "T K"],
    routing: Routing,
    pool: Pool,
    view: MemoryView,
    host_pages: HostPages,
    table: Int32[Array, "L E M"],
    layer: Int32[Array, ""],
    loads: PageLoads | None,
    *,
    activation: Activation,
    biases: tuple[Float[Array, "E 2 f"], Float[Array, "E d"]] | None,
) -> tuple[Hidden, Pool]:
    width, d = view.page_shape
    _, experts, matrices = table.shape
    rows = routing.row_tokens.shape[0]
    tile = rows // routing.tile_experts.shape[0]
    down_view = MemoryView(kind=view.kind, page_shape=(d, width), dtype=view.dtype, stride=view.stride)
    per_huge = pool.shape[1] // view.stride

    if loads is not None:
        sources, targets, count = (part[layer + 1] for part in loads[:3])
        # The smaller of the number of tiles and 0 is 0, which XLA does not know: the loads wait for the router, thus
        # for the mixer that reads the pool. With no such order XLA copies the whole pool for the reader.
        pool = load_pages(pool, host_pages, sources, targets, count + jnp.minimum(routing.num_tiles, 0))

    def weight(expert: Array, matrix: int, view: MemoryView) -> Array:
        page = table[layer, expert, matrix]
        words = lax.cond(
            page >= 0,
            lambda: lax.dynamic_slice(
                pool, (page // per_huge, page % per_huge * view.stride), (1, view.words)
            ),
            lambda: lax.dynamic_slice(
                host_pages, ((layer * experts + expert) * matrices + matrix, jnp.int32(0)), (1, view.words)
            ),
        )
        return view.from_words(words[0]).astype(jnp.float32)

    def product(matrix: Array, x: Float[Array, "tile n"]) -> Float[Array, "tile m"]:
        if tile == 1:
            return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))
        # The barrier keeps XLA from folding the conversion into a slow product of its own.
        return lax.dot_general(lax.optimization_barrier(matrix), x.T, (((1,), (0,)), ((), ()))).T

    # Rows that only fill a tile read zeros and add to a row past the end.
    row_weights = (
        jnp.zeros((rows,), jnp.float32)
        .at[routing.pair_rows.reshape(-1)]
        .set(weights.reshape(-1), mode="drop")
    )

    def compute_tile(i, mixed):
        expert = routing.tile_experts[i]
        tokens = lax.dynamic_slice(routing.row_tokens, (i * tile,), (tile,))
        x = hidden.at[tokens].get(mode="fill", fill_value=0).astype(jnp.float32)
        inner = [product(weight(expert, matrix, view), x) for matrix in range(matrices - 1)]
        if biases is not None:
            inner = [part + biases[0][expert, i].astype(jnp.float32)[None] for i, part in enumerate(inner)]
        h = activation(*inner).astype(hidden.dtype).astype(jnp.float32)
        y = product(weight(expert, matrices - 1, down_view), h)
        if biases is not None:
            y = y + biases[1][expert].astype(jnp.float32)[None]
        y = y * lax.dynamic_slice(row_weights, (i * tile,), (tile,))[:, None]
        return mixed.at[tokens].add(y, indices_are_sorted=True)

    # Tiles come in the order of experts, so that a token's sum never depends on where weights are or who else is there.
    mixed = jnp.zeros((hidden.shape[0] + 1, d), jnp.float32)
    mixed = lax.fori_loop(jnp.int32(0), routing.num_tiles, compute_tile, mixed)
    return mixed[:-1].astype(hidden.dtype), pool
