"""One step of the selective scan on Hopper: every state is read from its page once and written back once, through a Ref.

block = (row, head)            one warpgroup; a state `[p, n]` lies over its threads as the result of a wgmma does
page --TMA--> shared memory    PIECE columns at a time, each piece with its barrier
h <- decay h + (dt x) B^T      a piece goes back by TMA as soon as it is done
out = h C + D x                products are summed over pieces first, then over the few threads that share a row
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

PIECE = 32
"""Columns of the state that arrive and leave together."""


def step_rows(
    out: Any,
    states: Any,
    rows: Int32[Array, "4 S"],
    x: Float32[Array, "T nh p"],
    dt: Float32[Array, "T nh"],
    decay: Float32[Array, "T nh"],
    B: Float32[Array, "T g n"],
    C: Float32[Array, "T g n"],
    D: Float32[Array, " nh"],
    *,
    interpret: Any,
) -> None:
    """Write the outputs of decode rows to `out`, a Ref of `[T, nh, p]`, and their states to `states`.

    `states` is a Ref of `[pages, rows of a page, n]`; row i of head h is row `h * p + i`. `rows`: of `ragged.decode_rows`.
    """
    _, heads, p = x.shape
    _, groups, n = B.shape
    pieces = n // PIECE

    def body(
        rows,  # [4, S]
        x,  # [T, nh, p]
        dt,  # [T, nh]
        decay,  # [T, nh]
        B,  # [T, g, n]
        C,  # [T, g, n]
        D,  # [nh]
        states,  # [P, page rows, n]
        out,  # [T, nh, p]
        s_smem,  # [pieces, p, PIECE]
        x_smem,  # [p]
        b_smem,  # [n]
        c_smem,  # [n]
        o_smem,  # [p]
        s_ready,  # [pieces] barriers
        ready,
    ):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        page, token, has_state, is_decode = (rows[i, row] for i in range(4))
        per_row, per_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

        def in_page(piece):
            return states.at[page, pl.ds(head * p, p), pl.ds(piece * PIECE, PIECE)]

        def columns(ref, piece):
            values = plgpu.load(ref.at[pl.ds(piece * PIECE, PIECE)], layout=per_column, optimized=False)
            return lax.broadcast_in_dim(values, (p, PIECE), [1])

        @pl.when(is_decode == 1)
        def _():
            for piece in range(pieces):
                plgpu.copy_gmem_to_smem(in_page(piece), s_smem.at[piece], s_ready.at[piece])
            group = lax.div(head, jnp.int32(heads // groups))
            for source, target in ((x.at[token, head], x_smem), (B.at[token, group], b_smem), (C.at[token, group], c_smem)):  # fmt: skip
                plgpu.copy_gmem_to_smem(source, target, ready)
            plgpu.barrier_wait(ready)
            inputs = plgpu.load(x_smem, layout=per_row, optimized=False)
            added = lax.broadcast_in_dim(inputs * dt[token, head], (p, PIECE), [0])
            products = []
            for piece in range(pieces):
                plgpu.barrier_wait(s_ready.at[piece])
                state = plgpu.layout_cast(s_smem[piece].astype(jnp.float32), plgpu.Layout.WGMMA)
                # A page without a state may hold anything, NaN included.
                carried = jnp.broadcast_to(has_state != 0, state.shape)
                state = jnp.where(carried, state * decay[token, head], jnp.zeros_like(state))
                state += added * columns(b_smem, piece)
                s_smem[piece] = state.astype(s_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(s_smem.at[piece], in_page(piece))
                products.append(state * columns(c_smem, piece))
            result = functools.reduce(jnp.add, products).sum(axis=1) + inputs * D[head]
            o_smem[...] = result.astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, out.at[token, head])
            plgpu.wait_smem_to_gmem(0)

    f32 = jnp.float32
    kernel = plgpu.kernel(
        body,
        grid=(heads, rows.shape[1]),
        grid_names=("head", "row"),
        scratch_types=[
            plgpu.SMEM((pieces, p, PIECE), states.dtype),
            plgpu.SMEM((p,), f32),
            plgpu.SMEM((n,), f32),
            plgpu.SMEM((n,), f32),
            plgpu.SMEM((p,), out.dtype),
            plgpu.Barrier(num_barriers=pieces),
            plgpu.Barrier(num_arrivals=3),
        ],
        # No barrier between threads is missing: each reads what it wrote itself or what TMA brought.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    kernel(rows, x, dt, decay, B, C, D, states, out)
