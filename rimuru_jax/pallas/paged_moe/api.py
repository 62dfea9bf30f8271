"""Routed experts over pages: checks and choice of implementation."""

from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Hidden, HostPages, Pool
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import Routing
from rimuru_jax.pallas.paged_moe import mosaic_gpu, reference

AVAILABLE = ("reference", "mosaic_gpu")

MATRICES = {"silu": 3, "clamped_swiglu": 3, "relu2": 2}
"""Matrices of an expert, by activation."""


def token_tile(pairs: int, num_experts: int) -> int:
    """Rows of a tile that suit the implementation this device has: a power of two."""
    if resolve("paged_moe", None, AVAILABLE) == "mosaic_gpu":
        return mosaic_gpu.token_tile(pairs, num_experts)
    return reference.token_tile(pairs, num_experts)


def paged_moe(
    hidden: Hidden,
    weights: Float[Array, "T K"],
    routing: Routing,
    pool: Pool,
    view: MemoryView,
    host_pages: HostPages,
    table: Int32[Array, "E M"],
    first_host_page: Int32[Array, ""],
    *,
    activation: str = "silu",
    biases: tuple[Float[Array, "E 2 f"], Float[Array, "E d"]] | None = None,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    implementation: Implementation | None = None,
) -> Hidden:
    """The weighted sum of each token's experts: `sum_k weights[t, k] * expert_k(hidden[t])`.

    Products accumulate in float32; the inner activation is rounded to the dtype of `hidden`. The result is the same to
    the bit wherever the pages are.

    Args:
        hidden: `[T, d]`.
        weights: float32 mixing weights of the chosen experts.
        routing: from `moe_routing.group_tokens`.
        pool: the page pool; `view` shows its expert pages `[f, d]` (the last matrix is read as `[d, f]`).
        host_pages: every expert page, in (layer, expert, matrix) order.
        table: pool page of each expert's matrices, or HOST (-1): read in place from `host_pages`.
        first_host_page: host page of expert 0, matrix 0 of this layer.
        activation: an expert is `w2 @ h` with h, of g = w1 @ x and u = w3 @ x,
            "silu": silu(g) * u
            "clamped_swiglu": g' * sigmoid(swiglu_alpha * g') * (u' + 1), g' = min(g, limit), u' = clip(u, -limit, limit)
            "relu2", with two matrices: relu(w1 @ x)^2
        biases: added to g and u, and to w2 @ h.
    """
    if activation not in MATRICES:
        raise ValueError(f"activation is {activation!r}, it must be one of {', '.join(map(repr, MATRICES))}")
    if len(view.page_shape) != 2 or view.page_shape[1] != hidden.shape[1]:
        raise ValueError(
            f"expert pages of shape {view.page_shape} do not fit hidden states of {hidden.shape[1]}"
        )
    if table.shape[1] != MATRICES[activation]:
        raise ValueError(
            f"an expert has {table.shape[1]} matrices, but {activation!r} takes {MATRICES[activation]}"
        )
    tile = routing.row_tokens.shape[0] // routing.tile_experts.shape[0]
    biased = biases is not None
    refusal = mosaic_gpu.refusal(view, hidden.dtype, activation, biased, tile, host_pages.shape[1])
    if resolve("paged_moe", implementation, AVAILABLE, refusal=refusal) == "mosaic_gpu":
        return mosaic_gpu.paged_moe(
            hidden, weights, routing, pool, view, host_pages, table, first_host_page, activation=activation
        )
    return reference.paged_moe(
        hidden,
        weights,
        routing,
        pool,
        view,
        host_pages,
        table,
        first_host_page,
        activation=activation,
        biases=biases,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
    )
