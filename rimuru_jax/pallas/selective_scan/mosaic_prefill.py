"""Chunked prefill of the selective scan on Hopper (the SSD form): scores in XLA, the pass over chunks in a kernel.

Rows of more than one token are cut into chunks of 64, the last one filled with zeros, which leave the state alone. With
`from_start`, `to_end` and `between` the decays inside a chunk (`ragged.chunk_decays`), XLA computes `scores = (C B^T) between`
for all chunks at once, and the kernel, for each (row, head, COLUMNS of p), walks over the row's chunks with the transposed
state h `[n, COLUMNS]` in registers, float32:

    out = scores (dt x) + from_start (C h) + D x     h <- from_start_63 h + B^T (to_end dt x)

A page holds `[p, n]`; the state is turned once on its way in and once on its way out, between registers of neighbours.
One warpgroup fetches, one multiplies: three wgmma products a chunk, in bfloat16 with float32 sums, none of which waits for
another.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.pallas.mosaic_ring import fetch_ring, slot_of
from rimuru_jax.pallas.ragged import CHUNK, Chunks, chunk_decays

COLUMNS = 32
"""Rows of a head's state in one block, columns of its transpose: few, so that a single row fills the card."""
STEPS = 2
"""Chunks in flight in shared memory."""


def within_chunks(
    x: Float[Array, "N 64 nh p"],
    dt: Float32[Array, "N 64 nh"],
    A: Float32[Array, " nh"],
    B: Float[Array, "N 64 g n"],
    C: Float[Array, "N 64 g n"],
) -> tuple[Array, ...]:
    """x `[N, nh, 64, p]`, B, C `[N, g, 64, n]`, scores `[N, nh, 64, 64]` in bfloat16; dt, from_start, to_end `[N, nh, 64]`."""
    x, B, C = (values.transpose(0, 2, 1, 3) for values in (x, B, C))
    from_start, to_end, between = chunk_decays(dt * A[None, None, :])
    pairs = jnp.einsum("ngik,ngjk->ngij", C, B, preferred_element_type=jnp.float32)
    scores = jnp.repeat(pairs, x.shape[1] // B.shape[1], axis=1) * between
    return x, B, C, scores.astype(jnp.bfloat16), dt.transpose(0, 2, 1), from_start, to_end


def pass_over_chunks(
    states: Any,
    chunks: Chunks,
    pages: Int32[Array, " S"],
    has_state: Bool[Array, " S"],
    D: Float32[Array, " nh"],
    operands: tuple[Array, ...],
    *,
    interpret: Any,
) -> Float[Array, "N nh 64 p"]:
    """Outputs of all chunks of the rows in `chunks` (others are unwritten), whose states in `states` are updated.

    `states` is a Ref of `[pages, rows of a page, n]`; row i of head h is row `h * p + i`. `operands`: of `within_chunks`.
    """
    x, B, *_ = operands
    _, heads, _, p = x.shape
    _, groups, _, n = B.shape
    rows = jnp.stack([chunks.first, chunks.number, pages, has_state.astype(jnp.int32)])
    bf16, f32 = jnp.bfloat16, jnp.float32

    def body(
        rows,  # [4, S]
        D,  # [nh]
        x,  # [N, nh, 64, p]
        B,  # [N, g, 64, n]
        C,  # [N, g, 64, n]
        scores,  # [N, nh, 64, 64]
        dt,  # [N, nh, 64]
        from_start,  # [N, nh, 64]
        to_end,  # [N, nh, 64]
        states,  # [P, page rows, n]
        out,  # [N, nh, 64, p]
        x_smem, b_smem, c_smem, scores_smem, dt_smem, from_start_smem, to_end_smem,  # [STEPS, ...] of a chunk
        s_smem,  # [n, COLUMNS] of the transposed state, bfloat16
        inputs_smem,  # [64, COLUMNS]: dt x
        decayed_smem,  # [64, COLUMNS]: to_end dt x
        o_smem,  # [64, COLUMNS]
        state_smem,  # [COLUMNS, n] as in the page
        ready,  # [STEPS] barriers: one arrival per copy
        consumed,  # [STEPS] barriers
        state_ready,
    ):  # fmt: skip
        part, head, row = lax.axis_index("part"), lax.axis_index("head"), lax.axis_index("row")
        columns = pl.ds(part * COLUMNS, COLUMNS)
        first, count, page, has_state = (rows[i, row] for i in range(4))
        group = lax.div(head, jnp.int32(heads // groups))

        @pl.when(jnp.logical_and(lax.axis_index("wg") == 1, count > 0))
        def _fetch():
            fetch_ring(
                count,
                STEPS,
                ready,
                consumed,
                lambda i: (
                    (x.at[first + i, head, :, columns], x_smem),
                    (dt.at[first + i, head], dt_smem),
                    (to_end.at[first + i, head], to_end_smem),
                    (C.at[first + i, group], c_smem),
                    (B.at[first + i, group], b_smem),
                    (scores.at[first + i, head], scores_smem),
                    (from_start.at[first + i, head], from_start_smem),
                ),
            )

        @pl.when(jnp.logical_and(lax.axis_index("wg") == 0, count > 0))
        def _compute():
            square, per_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
            own = states.at[page, pl.ds(head * p + part * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(own, state_smem, state_ready)
            plgpu.barrier_wait(state_ready)
            state = plgpu.load(state_smem.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)
            state = plgpu.layout_cast(state.astype(f32), square)
            state = jnp.where(jnp.broadcast_to(has_state != 0, state.shape), state, jnp.zeros_like(state))

            def over(values, like):
                return lax.broadcast_in_dim(values, like.shape, [0])

            def step(i, state):
                slot = slot_of(i, STEPS)
                s_smem[...] = state.astype(bf16)
                plgpu.barrier_wait(ready.at[slot])
                step_size, begin, end = (
                    plgpu.layout_cast(ref[slot], per_row) for ref in (dt_smem, from_start_smem, to_end_smem)
                )
                total = from_start_smem[slot, CHUNK - 1]
                tokens = plgpu.layout_cast(x_smem[slot].astype(f32), square)
                inputs = tokens * over(step_size, tokens)
                inputs_smem[...] = inputs.astype(bf16)
                decayed_smem[...] = (inputs * over(end, inputs)).astype(bf16)
                plgpu.commit_smem()

                def products(seen, inside, added):
                    plgpu.wgmma(seen, c_smem.at[slot], s_smem)
                    plgpu.wgmma(inside, scores_smem.at[slot], inputs_smem)
                    plgpu.wgmma(added, b_smem.at[slot].transpose((1, 0)), decayed_smem)
                    return seen[...], inside[...], added[...]

                seen, inside, added = pl.run_scoped(
                    products,
                    plgpu.WGMMAAccumulatorRef((CHUNK, COLUMNS)),
                    plgpu.WGMMAAccumulatorRef((CHUNK, COLUMNS)),
                    plgpu.WGMMAAccumulatorRef((n, COLUMNS)),
                )
                result = inside + seen * over(begin, seen) + tokens * D[head]
                plgpu.barrier_arrive(consumed.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[...] = result.astype(bf16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, out.at[first + i, head, :, columns])
                return state * total + added

            state = lax.fori_loop(0, count, step, state)
            state = plgpu.layout_cast(state, plgpu.Layout.WGMMA_TRANSPOSED)
            state_smem.transpose((1, 0))[...] = state.astype(state_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_smem, own)
            plgpu.wait_smem_to_gmem(0)

    def ring(*shape: int, dtype=bf16):
        return plgpu.SMEM((STEPS, *shape), dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, bf16),
        grid=(p // COLUMNS, heads, rows.shape[1]),
        grid_names=("part", "head", "row"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            ring(CHUNK, COLUMNS),
            ring(CHUNK, n),
            ring(CHUNK, n),
            ring(CHUNK, CHUNK),
            ring(CHUNK, dtype=f32),
            ring(CHUNK, dtype=f32),
            ring(CHUNK, dtype=f32),
            plgpu.SMEM((n, COLUMNS), bf16),
            plgpu.SMEM((CHUNK, COLUMNS), bf16),
            plgpu.SMEM((CHUNK, COLUMNS), bf16),
            plgpu.SMEM((CHUNK, COLUMNS), bf16),
            plgpu.SMEM((COLUMNS, n), states.dtype),
            plgpu.Barrier(num_arrivals=7, num_barriers=STEPS),
            plgpu.Barrier(num_barriers=STEPS),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(rows, D, *operands, states)
