"""Selective scan: checks and choice of implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.selective_scan import mosaic_gpu, reference


def selective_scan(
    x: Float[Array, "T nh p"],
    dt: Float32[Array, "T nh"],
    A: Float32[Array, " nh"],
    B: Float[Array, "T g n"],
    C: Float[Array, "T g n"],
    D: Float[Array, " nh"],
    pool: Pool,
    view: MemoryView,
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    max_query_len: int,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T nh p"], Pool]:
    """Mamba-2's recurrence of ragged rows over the states in their pages, in float32.

    For each token and head:

        h <- exp(dt A) h + dt x B^T;  out = h C + D x

    Head i reads group `i // (nh / g)` of B and C. Prefill chunks and decodes mix; `pallas.ragged` says what the
    metadata means. A state is read once and written once. Source: Dao and Gu, "Transformers are SSMs"
    (arXiv 2405.21060).

    Args:
        x: inputs of nh heads of size p.
        dt: step sizes, bias and softplus applied; used as they come, without limits.
        A: negative.
        B: input projections of g groups, n wide.
        C: output projections of the same groups.
        pool: the page pool, donated or carried by the caller so that it is written in place.
        view: pages `[nh, p, n]`, float32 or bfloat16 (rounded once a call).
        pages: page of each row's state; 0 (scratch) for padding rows.
        max_query_len: 1 when every row has at most one token (decode), else any larger number.

    Returns:
        Outputs in the dtype of x, and the pool. Outputs of padding tokens are finite and meaningless.
    """
    if x.shape[1] % B.shape[1]:
        raise ValueError(f"{x.shape[1]} heads are no multiple of {B.shape[1]} groups")
    wanted = (*x.shape[1:], B.shape[2])
    if view.page_shape != wanted or not jnp.issubdtype(view.dtype, jnp.floating):
        raise ValueError(
            f"states {wanted} of floats do not fit {view.kind} pages {view.page_shape} of {view.dtype}"
        )
    refusal = mosaic_gpu.refusal(x, B, C, view)
    chosen = resolve("selective_scan", implementation, ("reference", "mosaic_gpu"), refusal=refusal)
    operator = mosaic_gpu.selective_scan if chosen == "mosaic_gpu" else reference.selective_scan
    return operator(x, dt, A, B, C, D, pool, view, pages, query_start, has_state, max_query_len=max_query_len)
