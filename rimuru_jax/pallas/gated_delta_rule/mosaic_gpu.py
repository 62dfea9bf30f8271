"""Gated delta rule on Hopper in Mosaic GPU kernels: rows of one token and longer rows of one call each get theirs.

`mosaic_decode` takes one step, `mosaic_prefill` walks over chunks; both read and write states in their pages.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.gated_delta_rule import mosaic_decode, mosaic_prefill
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.ragged import Chunks, update_in_place


def refusal(
    q: Float[Array, "T Hk dk"], k: Float[Array, "T Hk dk"], v: Float[Array, "T Hv dv"], view: MemoryView
) -> str | None:
    """Why these operands have no kernel, or None."""
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, but must be bfloat16"
    if view.dtype not in (jnp.float32, jnp.bfloat16):
        return f"states are {view.dtype}, but must be float32 or bfloat16"
    if q.shape[2] not in (64, 128) or v.shape[2] != 128:
        return f"heads are {q.shape[2]} x {v.shape[2]}, but must be 64 x 128 or 128 x 128"
    return None


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
    interpret: Any = None,
) -> tuple[Float[Array, "T Hv dv"], Pool]:
    """The kernels behind `api.gated_delta_rule`, for operands without a `refusal`.

    `interpret`: an `InterpretGPUParams` runs the kernels on a CPU, slowly.
    """

    def kernels(states: Any) -> Array:
        out = None
        if max_query_len > 1:
            chunks = Chunks.cut(query_start, v.shape[0])
            operands = mosaic_prefill.within_chunks(*map(chunks.take, (q, k, v, log_decay, beta)))
            prefills = mosaic_prefill.pass_over_chunks(
                states, chunks, pages, has_state, operands, interpret=interpret
            )
            out = jax.new_ref(chunks.put(prefills))
        decodes = mosaic_decode.step_rows(
            out, states, q, k, v, log_decay, beta, pages, query_start, has_state, interpret=interpret
        )
        return decodes if out is None else jax.freeze(out)

    return update_in_place(pool, view, v.shape[2:], kernels)
