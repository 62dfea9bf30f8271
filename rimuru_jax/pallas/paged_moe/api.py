"""Routed experts over pages: checks and choice of implementation."""

from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Hidden, HostPages, Pool
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import Routing
from rimuru_jax.pallas.page_loads import PageLoads
from rimuru_jax.pallas.paged_moe import mosaic_gpu, reference
from rimuru_jax.pallas.paged_moe.activations import MATRICES, activation_named
from rimuru_jax.pallas.paged_moe.tuning import ExpertShape, tuned

AVAILABLE = ("reference", "mosaic_gpu")


def token_tile(
    pairs: int, num_experts: int, view: MemoryView, matrices: int, *, from_host: bool = False
) -> int:
    """Rows of a tile that suit the implementation this device has, for (token, expert) pairs: a power of two.

    `from_host`: many experts are read from host memory in place, so that it matters how often.
    """
    if resolve("paged_moe", None, AVAILABLE) != "mosaic_gpu":
        return reference.token_tile(pairs, num_experts)
    usual = mosaic_gpu.token_tile(pairs, num_experts, from_host=from_host)
    sizes = tuned(ExpertShape.of(view, num_experts, matrices), pairs)
    return usual if sizes is None or usual == mosaic_gpu.TILES[-1] else sizes["tile"]


def paged_moe(
    hidden: Hidden,
    weights: Float[Array, "T K"],
    routing: Routing,
    pool: Pool,
    view: MemoryView,
    host_pages: HostPages,
    table: Int32[Array, "L E M"],
    layer: Int32[Array, ""],
    loads: PageLoads | None = None,
    *,
    activation: str = "silu",
    biases: tuple[Float[Array, "E 2 f"], Float[Array, "E d"]] | None = None,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    implementation: Implementation | None = None,
) -> tuple[Hidden, Pool]:
    """The weighted sum of each token's experts, `sum_k weights[t, k] * expert_k(hidden[t])`, and the pool.

    Products accumulate in float32; the inner activation is rounded to the dtype of `hidden`. The result is the same to
    the bit wherever the pages are.

    Args:
        hidden: `[T, d]`.
        weights: float32 mixing weights of the chosen experts.
        routing: from `moe_routing.group_tokens`.
        pool: the page pool, donated or carried by the caller if there are loads; `view` shows its expert pages
            `[f, d]` (the last matrix is read as `[d, f]`).
        host_pages: every expert page, in (layer, expert, matrix) order.
        table: pool page of each expert's matrices, or HOST (-1): read in place from `host_pages`.
        layer: the layer to compute; page loads of the next one are made meanwhile.
        loads: what to copy into the pool, if anything.
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
    if table.shape[2] != MATRICES[activation]:
        raise ValueError(
            f"an expert has {table.shape[2]} matrices, but {activation!r} takes {MATRICES[activation]}"
        )
    tile = routing.row_tokens.shape[0] // routing.tile_experts.shape[0]
    refusal = mosaic_gpu.refusal(view, hidden.dtype, tile, host_pages.shape[1])
    chosen = resolve("paged_moe", implementation, AVAILABLE, refusal=refusal)
    return {"reference": reference, "mosaic_gpu": mosaic_gpu}[chosen].paged_moe(
        hidden,
        weights,
        routing,
        pool,
        view,
        host_pages,
        table,
        layer,
        loads,
        activation=activation_named(activation, swiglu_alpha, swiglu_limit),
        biases=biases,
    )
