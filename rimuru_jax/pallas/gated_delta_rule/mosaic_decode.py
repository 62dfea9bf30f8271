"""One gated-delta step on Hopper: every state is read from its page once and written back once, through a Ref.

    block = (row, value head)      one warpgroup; thread t owns column t of the state `[dk, dv]`
    page --TMA--> shared memory, PIECE rows at a time, each piece with its barrier
    pass 1   k^T S                 while later pieces arrive
    pass 2   S, q^T S              each piece goes back by TMA as soon as its rows are done

Both sums over dk stay inside a thread: no shuffles, no scratch, and no barrier between threads, because a thread reads
only what it wrote itself or what TMA brought. k and q are read as scalars; a turn of UNROLL rows loads before it
stores, so that these become wide loads.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

PIECE = 32
"""Rows of the state that arrive and leave together."""
UNROLL = 8
"""Rows of one turn of the loops."""
CHAINS = 4
"""Partial sums that a thread keeps, so that additions need not wait for each other."""


def step_rows(
    out: Any,
    states: Any,
    rows: Int32[Array, "4 S"],
    q: Float32[Array, "T Hk dk"],
    k: Float32[Array, "T Hk dk"],
    v: Float32[Array, "T Hv dv"],
    log_decay: Float32[Array, "T Hv"],
    beta: Float32[Array, "T Hv"],
    *,
    interpret: Any,
) -> None:
    """Write the outputs of decode rows to `out`, a Ref of `[T, Hv, dv]`, and their states to `states`.

    `states` is a Ref of `[pages, rows of a page, dv]`; row i of head h is row `h * dk + i`. q and k are normalised.
    `rows`: of `ragged.decode_rows`.
    """
    _, key_heads, dk = q.shape
    _, value_heads, dv = v.shape
    turns, turns_per_piece = dk // UNROLL, PIECE // UNROLL

    def body(
        rows,  # [4, S]
        q,  # [T, Hk, dk]
        k,  # [T, Hk, dk]
        v,  # [T, Hv, dv]
        log_decay,  # [T, Hv]
        beta,  # [T, Hv]
        states,  # [P, page rows, dv]
        out,  # [T, Hv, dv]
        s_smem,  # [dk, dv]
        q_smem,  # [dk]
        k_smem,  # [dk]
        v_smem,  # [dv]
        o_smem,  # [dv]
        s_ready,  # [pieces] barriers
        qkv_ready,
    ):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        page, token, has_state, is_decode = (rows[i, row] for i in range(4))

        def in_page(first):
            return states.at[page, pl.ds(head * dk + first, PIECE)]

        def load(ref, turn):
            return [ref[turn * UNROLL + i].astype(jnp.float32) for i in range(UNROLL)]

        def add(sums, terms):
            return tuple(sum(terms[i::CHAINS], x) for i, x in enumerate(sums))

        @pl.when(is_decode == 1)
        def _():
            key_head = lax.div(head, jnp.int32(value_heads // key_heads))
            for source, target in ((k.at[token, key_head], k_smem), (q.at[token, key_head], q_smem), (v.at[token, head], v_smem)):  # fmt: skip
                plgpu.copy_gmem_to_smem(source, target, qkv_ready)

            @pl.when(has_state == 1)
            def _():
                for i in range(dk // PIECE):
                    rows = pl.ds(i * PIECE, PIECE)
                    plgpu.copy_gmem_to_smem(in_page(i * PIECE), s_smem.at[rows], s_ready.at[i])

            @pl.when(has_state == 0)
            def _():
                @pl.loop(0, dk)
                def _(i):
                    s_smem[i] = jnp.zeros((dv,), s_smem.dtype)

            decay = jnp.exp(log_decay[token, head])
            plgpu.barrier_wait(qkv_ready)
            zeros = (jnp.zeros((dv,), jnp.float32),) * CHAINS

            def read(turn, sums):
                starts_piece = lax.rem(turn, jnp.int32(turns_per_piece)) == 0

                @pl.when(jnp.logical_and(starts_piece, has_state == 1))
                def _():
                    plgpu.barrier_wait(s_ready.at[lax.div(turn, jnp.int32(turns_per_piece))])

                return add(sums, [x * s for x, s in zip(load(k_smem, turn), load(s_smem, turn), strict=True)])

            seen = functools.reduce(jnp.add, lax.fori_loop(0, turns, read, zeros))
            added = (v_smem[...] - decay * seen) * beta[token, head]

            def write(turn, sums):
                ks, qs, old = load(k_smem, turn), load(q_smem, turn), load(s_smem, turn)
                new = [decay * s + x * added for x, s in zip(ks, old, strict=True)]
                for i, s in enumerate(new):
                    s_smem[turn * UNROLL + i] = s.astype(s_smem.dtype)

                @pl.when(lax.rem(turn + 1, jnp.int32(turns_per_piece)) == 0)
                def _():
                    first = lax.div(turn, jnp.int32(turns_per_piece)) * PIECE
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(s_smem.at[pl.ds(first, PIECE)], in_page(first))

                return add(sums, [x * s for x, s in zip(qs, new, strict=True)])

            o_smem[...] = functools.reduce(jnp.add, lax.fori_loop(0, turns, write, zeros)).astype(
                o_smem.dtype
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, out.at[token, head])
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        grid=(value_heads, rows.shape[1]),
        grid_names=("head", "row"),
        scratch_types=[
            plgpu.SMEM((dk, dv), states.dtype),
            plgpu.SMEM((dk,), jnp.float32),
            plgpu.SMEM((dk,), jnp.float32),
            plgpu.SMEM((dv,), jnp.float32),
            plgpu.SMEM((dv,), out.dtype),
            plgpu.Barrier(num_barriers=dk // PIECE),
            plgpu.Barrier(num_arrivals=3),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    kernel(rows, q, k, v, log_decay, beta, states, out)
