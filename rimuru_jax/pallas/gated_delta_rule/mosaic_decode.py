"""One gated-delta step on Hopper: every state is read from its page once and written back once, through a Ref.

    block = (row, value head)      one warpgroup; thread t owns column t of the state `[dk, dv]`
    page --TMA--> shared memory, PIECE rows at a time, each piece with its barrier
    pass 1   k^T S                 while later pieces arrive
    pass 2   S, q^T S              each piece goes back by TMA as soon as its rows are done

Both sums over dk stay inside a thread: no shuffles, no scratch, and no barrier between threads, because a thread reads
only what it wrote itself or what TMA brought. k and q are read as scalars; a turn of UNROLL rows loads before it
stores, so that these become wide loads. Each thread adds up their squares on the way: the norms cost no launch of XLA's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.pallas.gated_delta_rule.reference import EPSILON
from rimuru_jax.pallas.mosaic_rows import clear_padding, this_row

PIECE = 32
"""Rows of the state that arrive and leave together."""
UNROLL = 8
"""Rows of one turn of the loops."""
CHAINS = 4
"""Partial sums that a thread keeps, so that additions need not wait for each other."""


def step_rows(
    out: Any,
    states: Any,
    q: Float[Array, "T Hk dk"],
    k: Float[Array, "T Hk dk"],
    v: Float[Array, "T Hv dv"],
    log_decay: Float32[Array, "T Hv"],
    beta: Float32[Array, "T Hv"],
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    interpret: Any,
) -> Any:
    """Write the outputs of rows of one token to `out`, a Ref of `[T, Hv, dv]`, and their states to `states`.

    `states` is a Ref of `[pages, rows of a page, dv]`; row i of head h is row `h * dk + i`. If `out` is None, no row has
    more than one token, and the outputs, zeros for padding, are returned instead.
    """
    _, key_heads, dk = q.shape
    _, value_heads, dv = v.shape
    turns, turns_per_piece = dk // UNROLL, PIECE // UNROLL
    f32 = jnp.float32

    def body(
        q,  # [T, Hk, dk]
        k,  # [T, Hk, dk]
        v,  # [T, Hv, dv]
        log_decay,  # [T, Hv]
        beta,  # [T, Hv]
        pages,  # [S]
        query_start,  # [S + 1]
        has_state,  # [S]
        states,  # [P, page rows, dv]
        out_ref,  # [T, Hv, dv]
        s_smem,  # [dk, dv]
        q_smem,  # [dk]
        k_smem,  # [dk]
        v_smem,  # [dv]
        o_smem,  # [dv]
        s_ready,  # [pieces] barriers
        qkv_ready,
    ):
        head = lax.axis_index("head")
        page, token, carries, is_decode = this_row(pages, query_start, has_state)

        def in_page(first):
            return states.at[page, pl.ds(head * dk + first, PIECE)]

        def load(ref, turn):
            return [ref[turn * UNROLL + i].astype(f32) for i in range(UNROLL)]

        def add(sums, terms):
            return tuple(sum(terms[i::CHAINS], x) for i, x in enumerate(sums))

        def inverse_norm(squares):
            return lax.rsqrt(functools.reduce(jnp.add, squares) + EPSILON)

        @pl.when(is_decode)
        def _():
            @pl.when(carries)
            def _():
                for i in range(dk // PIECE):
                    rows = pl.ds(i * PIECE, PIECE)
                    plgpu.copy_gmem_to_smem(in_page(i * PIECE), s_smem.at[rows], s_ready.at[i])

            key_head = lax.div(head, jnp.int32(value_heads // key_heads))
            for source, target in ((k.at[token, key_head], k_smem), (q.at[token, key_head], q_smem), (v.at[token, head], v_smem)):  # fmt: skip
                plgpu.copy_gmem_to_smem(source, target, qkv_ready)

            @pl.when(jnp.logical_not(carries))
            def _():
                @pl.loop(0, dk)
                def _(i):
                    s_smem[i] = jnp.zeros((dv,), s_smem.dtype)

            decay, rate = jnp.exp(log_decay[token, head]), beta[token, head]
            plgpu.barrier_wait(qkv_ready)
            none = (jnp.float32(0),) * CHAINS
            zeros = (jnp.zeros((dv,), f32),) * CHAINS

            def read(turn, sums):
                squares, sums = sums
                starts_piece = lax.rem(turn, jnp.int32(turns_per_piece)) == 0

                @pl.when(jnp.logical_and(starts_piece, carries))
                def _():
                    plgpu.barrier_wait(s_ready.at[lax.div(turn, jnp.int32(turns_per_piece))])

                ks, old = load(k_smem, turn), load(s_smem, turn)
                products = [x * s for x, s in zip(ks, old, strict=True)]
                return add(squares, [x * x for x in ks]), add(sums, products)

            squares, sums = lax.fori_loop(0, turns, read, (none, zeros))
            k_scale = inverse_norm(squares)
            seen = functools.reduce(jnp.add, sums) * k_scale
            added = (v_smem[...].astype(f32) - decay * seen) * (rate * k_scale)

            def write(turn, sums):
                squares, sums = sums
                ks, qs, old = load(k_smem, turn), load(q_smem, turn), load(s_smem, turn)
                new = [decay * s + x * added for x, s in zip(ks, old, strict=True)]
                for i, s in enumerate(new):
                    s_smem[turn * UNROLL + i] = s.astype(s_smem.dtype)

                @pl.when(lax.rem(turn + 1, jnp.int32(turns_per_piece)) == 0)
                def _():
                    first = lax.div(turn, jnp.int32(turns_per_piece)) * PIECE
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(s_smem.at[pl.ds(first, PIECE)], in_page(first))

                products = [x * s for x, s in zip(qs, new, strict=True)]
                return add(squares, [x * x for x in qs]), add(sums, products)

            squares, sums = lax.fori_loop(0, turns, write, (none, zeros))
            q_scale = inverse_norm(squares) * dk**-0.5
            o_smem[...] = (functools.reduce(jnp.add, sums) * q_scale).astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, out_ref.at[token, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if out is None:
            clear_padding(out_ref, query_start, o_smem, plgpu.Layout.WG_STRIDED((dv,), vec_size=1))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype) if out is None else (),
        grid=(value_heads, pages.shape[0]),
        grid_names=("head", "row"),
        scratch_types=[
            plgpu.SMEM((dk, dv), states.dtype),
            plgpu.SMEM((dk,), q.dtype),
            plgpu.SMEM((dk,), k.dtype),
            plgpu.SMEM((dv,), v.dtype),
            plgpu.SMEM((dv,), v.dtype),
            plgpu.Barrier(num_barriers=dk // PIECE),
            plgpu.Barrier(num_arrivals=3),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    refs = (states,) if out is None else (states, out)
    return kernel(q, k, v, log_decay, beta, pages, query_start, has_state.astype(jnp.int32), *refs)
