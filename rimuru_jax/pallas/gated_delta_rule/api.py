"""Gated delta rule: checks and choice of implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.gated_delta_rule import mosaic_gpu, reference
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView


def gated_delta_rule(
    q: Float[Array, "T Hk dk"],
    k: Float[Array, "T Hk dk"],
    v: Float[Array, "T Hv dv"],
    log_decay: Float32[Array, "T Hv"],
    beta: Float32[Array, "T Hv"],
    pool: Pool,
    view: MemoryView,
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    max_query_len: int,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T Hv dv"], Pool]:
    """Gated delta rule of ragged rows over the states in their pages, in float32.

    For each token, with q' and k' the q and k of its head made unit vectors (x / sqrt(sum x^2 + 1e-6)):

        S <- exp(log_decay) S;  S <- S + k' (beta (v - k'^T S))^T;  out = q'^T S / sqrt(dk)

    q and k come as they leave the convolution: normalising and scaling happen here. Value head h reads key head
    `h // (Hv / Hk)`. Prefill chunks and decodes mix; `pallas.ragged` says what the metadata means. A state is read
    once and written once. Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464).

    Args:
        log_decay: at most 0.
        beta: share of the old value that a token replaces, 0 to 1.
        pool: the page pool, donated or carried by the caller so that it is written in place.
        view: pages `[Hv, dk, dv]`, float32 or bfloat16 (rounded once a call).
        pages: page of each row's state; 0 (scratch) for padding rows.
        max_query_len: 1 when every row has at most one token (decode), else any larger number.

    Returns:
        Outputs in the dtype of v, and the pool. Outputs of padding tokens are finite and meaningless.
    """
    if v.shape[1] % q.shape[1]:
        raise ValueError(f"{v.shape[1]} value heads are no multiple of {q.shape[1]} key heads")
    wanted = (v.shape[1], q.shape[2], v.shape[2])
    if view.page_shape != wanted or not jnp.issubdtype(view.dtype, jnp.floating):
        raise ValueError(
            f"states {wanted} of floats do not fit {view.kind} pages {view.page_shape} of {view.dtype}"
        )
    refusal = mosaic_gpu.refusal(q, k, v, view)
    chosen = resolve("gated_delta_rule", implementation, ("reference", "mosaic_gpu"), refusal=refusal)
    operator = mosaic_gpu.gated_delta_rule if chosen == "mosaic_gpu" else reference.gated_delta_rule
    return operator(
        q, k, v, log_decay, beta, pool, view, pages, query_start, has_state, max_query_len=max_query_len
    )
