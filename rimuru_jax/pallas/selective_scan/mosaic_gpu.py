"""Selective scan on Hopper in Mosaic GPU kernels: rows of one token and longer rows of one call each get theirs.

`mosaic_decode` takes one step, `mosaic_prefill` walks over chunks; both read and write states in their pages.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.ragged import Chunks, update_in_place
from rimuru_jax.pallas.selective_scan import mosaic_decode, mosaic_prefill

MOST_ELEMENTS = 8192
"""Elements of one head's state, which the threads of one warpgroup hold in registers."""


def refusal(
    x: Float[Array, "T nh p"], B: Float[Array, "T g n"], C: Float[Array, "T g n"], view: MemoryView
) -> str | None:
    """Why these operands have no kernel, or None."""
    if any(values.dtype != jnp.bfloat16 for values in (x, B, C)):
        return f"x, B and C are {x.dtype}, {B.dtype} and {C.dtype}, but must be bfloat16"
    if view.dtype not in (jnp.float32, jnp.bfloat16):
        return f"states are {view.dtype}, but must be float32 or bfloat16"
    p, n = x.shape[2], B.shape[2]
    if p % 64 or n % 64 or p * n > MOST_ELEMENTS:
        return (
            f"states of a head are {p} x {n}, but must be multiples of 64 of {MOST_ELEMENTS} elements at most"
        )
    return None


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
    interpret: Any = None,
) -> tuple[Float[Array, "T nh p"], Pool]:
    """The kernels behind `api.selective_scan`, for operands without a `refusal`.

    `interpret`: an `InterpretGPUParams` runs the kernels on a CPU, slowly.
    """

    def kernels(states: Any) -> Array:
        out = None
        if max_query_len > 1:
            chunks = Chunks.cut(query_start, x.shape[0])
            operands = mosaic_prefill.within_chunks(
                chunks.take(x), chunks.take(dt), A, chunks.take(B), chunks.take(C)
            )
            prefills = mosaic_prefill.pass_over_chunks(
                states, chunks, pages, has_state, D.astype(jnp.float32), operands, interpret=interpret
            )
            out = jax.new_ref(chunks.put(prefills))
        decodes = mosaic_decode.step_rows(
            out, states, x, dt, A, B, C, D, pages, query_start, has_state, interpret=interpret
        )
        return decodes if out is None else jax.freeze(out)

    return update_in_place(pool, view, B.shape[2:], kernels)
