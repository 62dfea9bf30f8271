"""One step of the selective scan on Hopper: every state is read from its page once and written back once, through a Ref.

block = (row, head)            one warpgroup; a state `[p, n]` lies over its threads as the result of a wgmma does
page --TMA--> shared memory    the whole state at once: it is one run of the page, its columns are not
h <- decay h + (dt x) B^T      PIECE columns at a time
out = h C + D x                products are summed over pieces first, then over the few threads that share a row

Pieces are a loop, so that a thread needs few registers and shared memory alone limits the blocks under way: six of them
overlap what one does in turn. The operands of a token come as they are: a launch less for each that XLA would convert.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.pallas.mosaic_rows import clear_padding, this_row

PIECE = 32
"""Columns of the state that are in registers together."""


def step_rows(
    out: Any,
    states: Any,
    x: Float[Array, "T nh p"],
    dt: Float32[Array, "T nh"],
    A: Float32[Array, " nh"],
    B: Float[Array, "T g n"],
    C: Float[Array, "T g n"],
    D: Float[Array, " nh"],
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    interpret: Any,
) -> Any:
    """Write the outputs of rows of one token to `out`, a Ref of `[T, nh, p]`, and their states to `states`.

    `states` is a Ref of `[pages, rows of a page, n]`; row i of head h is row `h * p + i`. If `out` is None, no row has
    more than one token, and the outputs, zeros for padding, are returned instead.
    """
    _, heads, p = x.shape
    _, groups, n = B.shape
    f32 = jnp.float32

    def body(
        x,  # [T, nh, p]
        dt,  # [T, nh]
        A,  # [nh]
        B,  # [T, g, n]
        C,  # [T, g, n]
        D,  # [nh]
        pages,  # [S]
        query_start,  # [S + 1]
        has_state,  # [S]
        states,  # [P, page rows, n]
        out_ref,  # [T, nh, p]
        s_smem,  # [p, n]
        x_smem,  # [p]
        b_smem,  # [n]
        c_smem,  # [n]
        o_smem,  # [p]
        ready,
    ):
        head = lax.axis_index("head")
        page, token, carries, is_decode = this_row(pages, query_start, has_state)
        per_row, per_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

        def over_rows(ref, columns):
            values = plgpu.load(ref.at[columns], layout=per_column, optimized=False)
            return lax.broadcast_in_dim(values.astype(f32), (p, PIECE), [1])

        @pl.when(is_decode)
        def _():
            in_page = states.at[page, pl.ds(head * p, p)]
            group = lax.div(head, jnp.int32(heads // groups))
            for source, target in ((in_page, s_smem), (x.at[token, head], x_smem), (B.at[token, group], b_smem), (C.at[token, group], c_smem)):  # fmt: skip
                plgpu.copy_gmem_to_smem(source, target, ready)
            step, through = dt[token, head], D[head].astype(f32)
            decay = jnp.exp(step * A[head])
            plgpu.barrier_wait(ready)
            inputs = plgpu.load(x_smem, layout=per_row, optimized=False).astype(f32)
            added = lax.broadcast_in_dim(inputs * step, (p, PIECE), [0])

            def advance(piece, products):
                columns = pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
                state = plgpu.layout_cast(s_smem[:, columns].astype(f32), plgpu.Layout.WGMMA)
                # A page without a state may hold anything, NaN included.
                state = jnp.where(
                    jnp.broadcast_to(carries, state.shape), state * decay, jnp.zeros_like(state)
                )
                state += added * over_rows(b_smem, columns)
                s_smem[:, columns] = state.astype(s_smem.dtype)
                return products + state * over_rows(c_smem, columns)

            nothing = plgpu.layout_cast(jnp.zeros((p, PIECE), f32), plgpu.Layout.WGMMA)
            products = lax.fori_loop(0, n // PIECE, advance, nothing)
            o_smem[...] = (products.sum(axis=1) + inputs * through).astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s_smem, in_page)
            plgpu.copy_smem_to_gmem(o_smem, out_ref.at[token, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if out is None:
            clear_padding(out_ref, query_start, o_smem, per_row)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype) if out is None else (),
        grid=(heads, pages.shape[0]),
        grid_names=("head", "row"),
        scratch_types=[
            plgpu.SMEM((p, n), states.dtype),
            plgpu.SMEM((p,), x.dtype),
            plgpu.SMEM((n,), B.dtype),
            plgpu.SMEM((n,), C.dtype),
            plgpu.SMEM((p,), x.dtype),
            plgpu.Barrier(num_arrivals=4),
        ],
        # No barrier between threads is missing: each reads what it wrote itself or what TMA brought.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    refs = (states,) if out is None else (states, out)
    return kernel(x, dt, A, B, C, D, pages, query_start, has_state.astype(jnp.int32), *refs)
