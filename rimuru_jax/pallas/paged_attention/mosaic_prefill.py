"""Prefill attention on Hopper: ragged chunks of queries over the paged context of their rows.

    unit            = tokens of one row that follow each other, with the query heads of one key/value head (`Packing`)
    tile of queries = as many units of one row as make 128 rows of a matrix
    block           = (tile, key/value head): two warpgroups of 64 rows compute, a third fetches pages

Queries lie on the M side of wgmma and heads are innermost: those of a group share every tile of keys and values. The two
warpgroups take turns, one multiplying while the other is in its softmax. Only tiles that reach past a warpgroup's first query are masked.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from rimuru_jax.pallas.paged_attention.mosaic_packing import Packing
from rimuru_jax.pallas.paged_attention.mosaic_tiles import (
    LOG2_E,
    NEGATIVE,
    copies_per_tile,
    fetch_tiles,
    filled,
    zero_rows,
)

WARPGROUP_ROWS = 64
COMPUTE_WARPGROUPS = 2
ROWS = WARPGROUP_ROWS * COMPUTE_WARPGROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    tile: int
    """Tokens of a tile of keys and values, a multiple of 64."""
    steps: int
    """Tiles of keys and values in flight in shared memory."""

    @classmethod
    def choose(cls, head_dim: int) -> "PrefillConfig":
        """The accumulator of a wide head leaves registers for scores of half a tile only."""
        return cls(tile=128, steps=2) if head_dim <= 128 else cls(tile=64, steps=2)


def plan(
    context_len: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    unit_start: Int32[Array, " S+1"],
    tokens: int,
    packing: Packing,
) -> Int32[Array, "5 tiles"]:
    """Tiles of queries (row, first unit, units, position of the first token, context length), units 0 where there is none.

    Rows of one query are left to decode. Tokens behind the last row form a row without a context, which gives zeros.
    Tiles with the longest context come first, since they take longest.
    """
    size, per_unit = ROWS // packing.rows, packing.tokens
    rows = context_len.shape[0] + 1
    query_len = jnp.append(query_start[1:], jnp.int32(tokens)) - query_start
    context_len = jnp.append(context_len, jnp.int32(0))
    row = jnp.arange(rows, dtype=jnp.int32)
    units = (query_len + (per_unit - 1)) // per_unit
    tiles = jnp.where((query_len == 1) & (row < rows - 1), 0, (units + (size - 1)) // size)
    end = jnp.sum(jnp.where(row[None, :] <= row[:, None], tiles[None, :], 0), axis=1)

    tile = end[-1] - 1 - jnp.arange(-(-packing.units(tokens, rows) // size) + rows, dtype=jnp.int32)
    row = jnp.sum((end[None, :] <= tile[:, None]).astype(jnp.int32), axis=1)
    first = (tile - (end - tiles)[row]) * size
    count = jnp.where(tile >= 0, jnp.minimum(units[row] - first, size), 0)
    position = jnp.maximum(context_len - query_len, 0)[row] + first * per_unit
    # The row behind the last has no pages, but a number within the table.
    return jnp.stack([jnp.minimum(row, rows - 2), unit_start[row] + first, count, position, context_len[row]])


def attend_tiles(
    queries: Float[Array, "U N R h"],
    kv: Array,
    page_table: Int32[Array, "S W"],
    tiles: Int32[Array, "5 tiles"],
    sinks: Float[Array, "N R"] | None,
    *,
    packing: Packing,
    page_tokens: int,
    scale: float,
    window: int | None,
    config: PrefillConfig,
    interpret: Any,
) -> Float[Array, "U N R h"]:
    """Outputs of the units in `tiles`; others are unwritten. `kv` is the pool as `[pages, rows of a page, h]`."""
    units, kv_heads, unit_rows, head_dim = queries.shape
    tile, steps = config.tile, config.steps
    warpgroup_units = WARPGROUP_ROWS // unit_rows
    to_log2 = scale * LOG2_E
    # Of a thread, so that nothing spills but a little at heads of 256. The block starts with 3 x 168 for its three
    # warpgroups: with a larger sum it would wait for ever.
    few, many = (56, 224) if head_dim <= 96 else (40, 232) if head_dim <= 128 else (24, 240)
    per_row, square = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    def accumulate(x, a, b):
        """`x + a @ b`, in the registers of `x`."""
        if interpret:  # which knows neither accumulators with a value nor operands in registers
            return x + jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32))
        return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.WGMMAAccumulatorRef.init(x))

    def body(tiles, table, q, kv, *refs):
        sinks, out, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_consumed, v_consumed, turns = (
            refs if len(refs) == 11 else (None, *refs)
        )
        warpgroup, head = lax.axis_index("wg"), lax.axis_index("head")
        row, first_unit, count, position, context = (tiles[i, lax.axis_index("tile")] for i in range(5))
        stop = lax.div(jnp.minimum(position + count * packing.tokens, context) + (tile - 1), jnp.int32(tile))
        start = jnp.int32(0)
        if window is not None:
            start = jnp.minimum(lax.div(jnp.maximum(position - (window - 1), 0), jnp.int32(tile)), stop)

        @pl.when(jnp.logical_and(warpgroup == COMPUTE_WARPGROUPS, count > 0))
        def _fetch():
            plgpu.set_max_registers(few, action="decrease")
            fetch_tiles(
                kv, table, k_smem, v_smem, k_ready, v_ready, (k_consumed, v_consumed),
                row=row, head=head, kv_heads=kv_heads, page_tokens=page_tokens,
                first=start, count=stop - start, last_token=context - 1,
            )  # fmt: skip

        @pl.when(jnp.logical_and(warpgroup < COMPUTE_WARPGROUPS, count > 0))
        def _compute():
            plgpu.set_max_registers(many, action="increase")
            own, ready = q_smem.at[warpgroup], q_ready.at[warpgroup]
            skipped = warpgroup * warpgroup_units

            def rows_of(i):
                return own.at[pl.ds(i * unit_rows, unit_rows)]

            for i in range(warpgroup_units):
                unit = jnp.minimum(first_unit + skipped + i, units - 1)
                plgpu.copy_gmem_to_smem(q.at[unit, head], rows_of(i), ready)
            plgpu.barrier_wait(ready)
            first_position = position + skipped * packing.tokens
            row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=per_row)
            own_position = first_position + lax.div(row, jnp.int32(packing.heads))

            def take_turns():
                plgpu.barrier_arrive(turns)
                plgpu.barrier_wait(turns)

            def step(i, carry, masked):
                acc, best, total = carry
                slot = lax.rem(i - start, jnp.int32(steps))
                plgpu.barrier_wait(k_ready.at[slot])

                def scores_of(acc):
                    plgpu.wgmma(acc, own, k_smem.at[slot].transpose((1, 0)))
                    take_turns()
                    return acc[...]

                scores = pl.run_scoped(scores_of, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, tile)))
                plgpu.barrier_arrive(k_consumed.at[slot])
                if masked:
                    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=square)
                    last = _over(own_position - i * tile, scores)
                    visible = key <= last
                    if window is not None:
                        visible = jnp.logical_and(visible, key > last - window)
                    scores = jnp.where(visible, scores, NEGATIVE)
                new_best = jnp.maximum(best, scores.max(axis=1) * to_log2)
                shrink = jnp.exp2(best - new_best)
                shares = jnp.exp2(scores * to_log2 - _over(new_best, scores))
                total = total * shrink + shares.sum(axis=1)
                acc = acc * _over(shrink, acc)
                shares = shares.astype(jnp.bfloat16)
                acc, total, new_best, shares = lax.optimization_barrier((acc, total, new_best, shares))
                plgpu.barrier_wait(v_ready.at[slot])
                if masked:
                    # Both warpgroups do, each before its own product, and write the same.
                    pl.when(context - i * tile < tile)(lambda: zero_rows(v_smem.at[slot], context - i * tile))
                take_turns()
                acc = accumulate(acc, shares, v_smem.at[slot])
                plgpu.barrier_arrive(v_consumed.at[slot])
                return acc, new_best, total

            pl.when(warpgroup == 1)(take_turns)
            acc = filled((WARPGROUP_ROWS, head_dim), 0.0, square)
            if sinks is None:
                best, total = (filled((WARPGROUP_ROWS,), x, per_row) for x in (NEGATIVE, 0.0))
            else:
                best = plgpu.load(sinks.at[head], layout=per_row, optimized=False) * LOG2_E
                total = filled((WARPGROUP_ROWS,), 1.0, per_row)
            carry, masked_from = (acc, best, total), start
            if window is None:
                masked_from = jnp.minimum(lax.div(first_position + 1, jnp.int32(tile)), stop)
                carry = lax.fori_loop(start, masked_from, lambda i, c: step(i, c, False), carry)
            acc, _, total = lax.fori_loop(masked_from, stop, lambda i, c: step(i, c, True), carry)
            pl.when(warpgroup == 0)(take_turns)

            total = jnp.where(total > 0, total, 1.0)  # nothing seen: 0 / 1
            own[...] = (acc * _over(1.0 / total, acc)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for i in range(warpgroup_units):
                pl.when(skipped + i < count)(
                    lambda i=i: plgpu.copy_smem_to_gmem(rows_of(i), out.at[first_unit + skipped + i, head])
                )
            plgpu.wait_smem_to_gmem(0)

    bf16, copies = jnp.bfloat16, copies_per_tile(tile, page_tokens)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(queries.shape, bf16),
        grid=(tiles.shape[1], kv_heads),
        grid_names=("tile", "head"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((COMPUTE_WARPGROUPS, WARPGROUP_ROWS, head_dim), bf16),
            plgpu.SMEM((steps, tile, head_dim), bf16),
            plgpu.SMEM((steps, tile, head_dim), bf16),
            plgpu.Barrier(num_arrivals=warpgroup_units, num_barriers=COMPUTE_WARPGROUPS),
            plgpu.Barrier(num_arrivals=copies, num_barriers=steps),
            plgpu.Barrier(num_arrivals=copies, num_barriers=steps),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=steps),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=steps),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    extra = ()
    if sinks is not None:
        # One value per row of a warpgroup.
        extra = (jnp.tile(sinks, (1, warpgroup_units)),)
    return kernel(tiles, page_table, queries, kv, *extra)


def _over(x: Array, like: Array) -> Array:
    """`[rows]` as `[rows, *]`."""
    return lax.broadcast_in_dim(x, like.shape, [0])
