"""Chunked prefill of the gated delta rule on Hopper: the algebra inside chunks in XLA, the pass over chunks in a kernel.

Rows of more than one token are cut into chunks of 64, the last one filled with zeros, which leave the state alone. With
`from_start`, `to_end` and `between` the decays inside a chunk (`ragged.chunk_decays`), all of them at most 1, XLA computes

    A = strictly lower (beta_i k_i . k_j between_ij)     T = (I + A)^-1
    u = T (beta v)     w = T (beta from_start k)     scores = (q k^T) between

for all chunks at once, and the kernel, for each (row, value head, COLUMNS columns of dv), walks over the row's chunks with
the state S in registers, float32:

    v' = u - w S     out = from_start (q S) + scores v'     S <- from_start_63 S + k^T (to_end v')

k and q stand for the normalised ones here; products take them as they came, exact in bfloat16, and factors of float32 do
the rest. One warpgroup fetches, one multiplies: four wgmma products a chunk in bfloat16 with float32 sums, in two pairs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.pallas.gated_delta_rule.reference import inverse_norm
from rimuru_jax.pallas.mosaic_ring import fetch_ring, slot_of
from rimuru_jax.pallas.ragged import CHUNK, Chunks, chunk_decays

COLUMNS = 32
"""Columns of the state in one block: few, so that a single row fills the card."""
STEPS = 2
"""Chunks in flight in shared memory."""


def within_chunks(
    q: Float[Array, "N 64 Hk dk"],
    k: Float[Array, "N 64 Hk dk"],
    v: Float[Array, "N 64 Hv dv"],
    log_decay: Float32[Array, "N 64 Hv"],
    beta: Float32[Array, "N 64 Hv"],
) -> tuple[Array, ...]:
    """The operands of `pass_over_chunks` behind the metadata.

    q, k `[N, Hk, 64, dk]`, w `[N, Hv, 64, dk]`, u `[N, Hv, 64, dv]` and scores `[N, Hv, 64, 64]` in bfloat16, and factors
    `[N, Hv, 3, 64]` in float32: from_start times the factor that normalises and scales q, to_end times the one that
    normalises k, and the decay of the whole chunk, repeated.
    """
    chunks, _, key_heads, key_dim = k.shape
    value_heads = v.shape[2]
    group = value_heads // key_heads
    bf16 = jnp.bfloat16
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    beta = beta.transpose(0, 2, 1)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def by_value_head(x: Array) -> Array:
        """`[N, Hk, ...]` as `[N, Hv, ...]`."""
        return jnp.repeat(x, group, axis=1)

    from_start, to_end, between = chunk_decays(log_decay)
    q_factor, k_factor = by_value_head(inverse_norm(q) * key_dim**-0.5), by_value_head(inverse_norm(k))
    between = between * k_factor[..., None, :]
    overlap = by_value_head(product("nhid,nhjd->nhij", k, k)) * between * k_factor[..., None]
    scores = by_value_head(product("nhid,nhjd->nhij", q, k)) * between * q_factor[..., None]
    inverse = unit_lower_inverse(beta[..., None] * overlap) * beta[..., None, :]
    u = product("nhij,nhjd->nhid", inverse.astype(bf16), v)
    scaled = (inverse * (from_start * k_factor)[..., None, :]).astype(bf16)
    scaled = scaled.reshape(chunks, key_heads, group, CHUNK, CHUNK)
    w = product("nhgij,nhjd->nhgid", scaled, k).reshape(chunks, value_heads, CHUNK, key_dim)
    whole = jnp.broadcast_to(from_start[..., -1:], from_start.shape)
    factors = jnp.stack([from_start * q_factor, to_end * k_factor, whole], axis=2)
    return q, k, w.astype(bf16), u.astype(bf16), scores.astype(bf16), factors


def unit_lower_inverse(a: Float32[Array, "... n n"]) -> Float32[Array, "... n n"]:
    """(I + L)^-1 with L the part of `a` below the diagonal; n is a power of two.

    By halves, (I + L)^-1 = [[P, 0], [-R B P, R]]: no power of L appears, which may reach 1e18 where keys are alike.
    """
    size = a.shape[-1]
    if size == 1:
        return jnp.ones_like(a)
    half = size // 2
    diagonal = jnp.stack([a[..., :half, :half], a[..., half:, half:]], axis=-3)
    inverse = unit_lower_inverse(diagonal)
    first, second = inverse[..., 0, :, :], inverse[..., 1, :, :]

    def multiply(x: Array, y: Array) -> Array:
        if half <= 4:  # too small for a matrix product
            return (x[..., :, :, None] * y[..., None, :, :]).sum(-2)
        return jnp.matmul(x, y, precision="highest")

    corner = -multiply(multiply(second, a[..., half:, :half]), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def pass_over_chunks(
    states: Any,
    chunks: Chunks,
    pages: Int32[Array, " S"],
    has_state: Bool[Array, " S"],
    operands: tuple[Array, ...],
    *,
    interpret: Any,
) -> Float[Array, "N Hv 64 dv"]:
    """Outputs of all chunks of the rows in `chunks` (others are unwritten), whose states in `states` are updated.

    `states` is a Ref of `[pages, rows of a page, dv]`; row i of head h is row `h * dk + i`. `operands`: of `within_chunks`.
    """
    q, _, _, u, *_ = operands
    _, key_heads, _, dk = q.shape
    value_heads, dv = u.shape[1], u.shape[3]
    rows = jnp.stack([chunks.first, chunks.number, pages, has_state.astype(jnp.int32)])
    bf16, f32 = jnp.bfloat16, jnp.float32

    def body(
        rows,  # [4, S]
        q,  # [N, Hk, 64, dk]
        k,  # [N, Hk, 64, dk]
        w,  # [N, Hv, 64, dk]
        u,  # [N, Hv, 64, dv]
        scores,  # [N, Hv, 64, 64]
        factors,  # [N, Hv, 3, 64]
        states,  # [P, page rows, dv]
        out,  # [N, Hv, 64, dv]
        q_smem, k_smem, w_smem, u_smem, scores_smem, factors_smem,  # [STEPS, ...] of a chunk
        s_smem,  # [dk, COLUMNS] of the state, bfloat16
        v_smem,  # [64, COLUMNS]
        decayed_smem,  # [64, COLUMNS]
        o_smem,  # [64, COLUMNS]
        state_smem,  # [dk, COLUMNS] as in the page
        ready,  # [STEPS] barriers: one arrival per copy
        consumed,  # [STEPS] barriers
        state_ready,
    ):  # fmt: skip
        part, head, row = lax.axis_index("part"), lax.axis_index("head"), lax.axis_index("row")
        first, count, page, has_state = (rows[i, row] for i in range(4))
        key_head = lax.div(head, jnp.int32(value_heads // key_heads))
        columns = pl.ds(part * COLUMNS, COLUMNS)

        @pl.when(jnp.logical_and(lax.axis_index("wg") == 1, count > 0))
        def _fetch():
            fetch_ring(
                count,
                STEPS,
                ready,
                consumed,
                lambda i: (
                    (w.at[first + i, head], w_smem),
                    (q.at[first + i, key_head], q_smem),
                    (u.at[first + i, head, :, columns], u_smem),
                    (factors.at[first + i, head], factors_smem),
                    (k.at[first + i, key_head], k_smem),
                    (scores.at[first + i, head], scores_smem),
                ),
            )

        @pl.when(jnp.logical_and(lax.axis_index("wg") == 0, count > 0))
        def _compute():
            square, per_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
            own = states.at[page, pl.ds(head * dk, dk), columns]
            plgpu.copy_gmem_to_smem(own, state_smem, state_ready)
            plgpu.barrier_wait(state_ready)
            state = plgpu.layout_cast(state_smem[...].astype(f32), square)
            state = jnp.where(jnp.broadcast_to(has_state != 0, state.shape), state, jnp.zeros_like(state))

            def over(x, like):
                return lax.broadcast_in_dim(x, like.shape, [0])

            def products(*pairs):
                def run(*accs):
                    for acc, (a, b) in zip(accs, pairs, strict=True):
                        plgpu.wgmma(acc, a, b)
                    return tuple(acc[...] for acc in accs)

                shapes = [(a.shape[0], b.shape[1]) for a, b in pairs]
                return pl.run_scoped(run, *(plgpu.WGMMAAccumulatorRef(shape) for shape in shapes))

            def step(i, state):
                slot = slot_of(i, STEPS)
                s_smem[...] = state.astype(bf16)
                plgpu.commit_smem()
                plgpu.barrier_wait(ready.at[slot])
                removed, seen = products((w_smem.at[slot], s_smem), (q_smem.at[slot], s_smem))
                begin = plgpu.layout_cast(factors_smem[slot, 0], per_row)
                end = plgpu.layout_cast(factors_smem[slot, 1], per_row)
                whole = factors_smem[slot, 2, 0]
                v = u_smem[slot].astype(f32) - removed
                v_smem[...] = v.astype(bf16)
                decayed_smem[...] = (v * over(end, v)).astype(bf16)
                plgpu.commit_smem()
                added, inside = products(
                    (k_smem.at[slot].transpose((1, 0)), decayed_smem), (scores_smem.at[slot], v_smem)
                )
                result = inside + seen * over(begin, seen)
                plgpu.barrier_arrive(consumed.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[...] = result.astype(bf16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, out.at[first + i, head, :, columns])
                return state * whole + added

            state = lax.fori_loop(0, count, step, state)
            state_smem[...] = state.astype(state_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_smem, own)
            plgpu.wait_smem_to_gmem(0)

    def ring(*shape: int, dtype=bf16):
        return plgpu.SMEM((STEPS, *shape), dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(u.shape, bf16),
        grid=(dv // COLUMNS, value_heads, rows.shape[1]),
        grid_names=("part", "head", "row"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            ring(CHUNK, dk),
            ring(CHUNK, dk),
            ring(CHUNK, dk),
            ring(CHUNK, COLUMNS),
            ring(CHUNK, CHUNK),
            ring(3, CHUNK, dtype=f32),
            plgpu.SMEM((dk, COLUMNS), bf16),
            plgpu.SMEM((CHUNK, COLUMNS), bf16),
            plgpu.SMEM((CHUNK, COLUMNS), bf16),
            plgpu.SMEM((CHUNK, COLUMNS), bf16),
            plgpu.SMEM((dk, COLUMNS), states.dtype),
            plgpu.Barrier(num_arrivals=6, num_barriers=STEPS),
            plgpu.Barrier(num_barriers=STEPS),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(rows, *operands, states)
