"""Decode attention on Hopper: one query per row, the context of every row cut into pieces of about equal size.

    work item = (row, run of tiles)             a tile is `config.tile` tokens
    block     = (work item, key/value head)     one warpgroup fetches pages, one computes
    merge     = (row, key/value head)           joins the items of a row by their log-sum-exp

Keys lie on the M side of wgmma (`S^T [tile, G] = K q^T`, `O^T [h, G] = V^T P^T`), so that a group of G query heads needs no
padding beyond 8. How long a run is follows from the batch at run time: the total number of tiles over the number of
blocks that fill the card, so one long row is spread over many blocks while short rows stay whole.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from rimuru_jax.pallas.paged_attention.mosaic_tiles import (
    LOG2_E,
    NEGATIVE,
    copies_per_tile,
    fetch_tiles,
    filled,
    product,
    zero_rows,
)

SHARED_MEMORY = 224 * 1024
"""Bytes of a multiprocessor that blocks may use, less what each block reserves."""
MERGE_TURN = 4
"""Items that a block of the merge reads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    tile: int
    """Tokens of a tile, a multiple of 64."""
    steps: int
    """Tiles in flight in shared memory."""
    items: int
    """Work items, per key/value head, that fill the card."""

    @classmethod
    def choose(cls, head_dim: int, kv_heads: int, group: int, multiprocessors: int) -> "DecodeConfig":
        """As many tiles in flight as shared memory holds, of two blocks on each multiprocessor if that is enough."""
        tile = 64
        fixed = (
            group * (6 * head_dim + 2 * tile + 4) + 6 * 1024
        )  # queries, outputs, shares; the compiler's own
        step = 2 * 2 * tile * head_dim
        for blocks in (2, 1):
            steps = min(8, (SHARED_MEMORY // blocks - fixed) // step)
            if steps >= 3:
                break
        return cls(tile=tile, steps=max(1, steps), items=max(1, multiprocessors * blocks // kv_heads))


def plan(
    context_len: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    unit_start: Int32[Array, " S"],
    config: DecodeConfig,
    window: int | None,
) -> tuple[Int32[Array, "7 items"], Int32[Array, "7 S"]]:
    """What each work item is, and the same of each row.

    (row, context length, unit of the query, first tile, tiles, items, first item) of a row, and of the row that an item
    belongs to; all 0 for an item that does not exist, no items for a row that is no decode. Sums over comparisons take
    the place of a prefix sum and a search, which would be more kernels.
    """
    rows = context_len.shape[0]
    first_tile = jnp.zeros_like(context_len)
    if window is not None:
        first_tile = jnp.maximum(context_len - window, 0) // config.tile
    is_decode = query_start[1:] - query_start[:-1] == 1
    tiles = jnp.where(is_decode, (context_len + (config.tile - 1)) // config.tile - first_tile, 0)
    run = jnp.maximum((jnp.sum(tiles) + (config.items - 1)) // config.items, 1)
    pieces = (tiles + (run - 1)) // run
    row = jnp.arange(rows, dtype=jnp.int32)
    start = jnp.sum(jnp.where(row[None, :] < row[:, None], pieces[None, :], 0), axis=1)

    # Rounding up adds at most one item a row.
    item = jnp.arange(config.items + rows, dtype=jnp.int32)[:, None]
    is_its = (start[None, :] <= item) & (item < (start + pieces)[None, :])
    of_rows = jnp.stack([row, context_len, unit_start, first_tile, tiles, pieces, start])
    return jnp.sum(jnp.where(is_its[None], of_rows[:, None, :], 0), axis=2), of_rows


def column_pieces(head_dim: int) -> list[int]:
    """First columns of the runs of 64 that cover a head; the last may overlap the one before (wgmma has M = 64)."""
    return [*range(0, head_dim - 63, 64), *([head_dim - 64] if head_dim % 64 else [])]


def attend_items(
    queries: Float[Array, "U N G h"],
    kv: Array,
    page_table: Int32[Array, "S W"],
    items: Int32[Array, "7 items"],
    *,
    page_tokens: int,
    scale: float,
    window: int | None,
    config: DecodeConfig,
    interpret: Any,
) -> tuple[Float[Array, "items N h G"], Float[Array, "items N G"]]:
    """Normalised outputs and base-2 log-sum-exp of each item, float32; unwritten where an item has no tiles.

    `kv` is the pool as `[pages, rows of a page, h]`: keys of head n are rows `n * page_tokens ...`, values follow all keys.
    """
    _, kv_heads, group, head_dim = queries.shape
    tile, steps = config.tile, config.steps
    copies = copies_per_tile(tile, page_tokens)
    columns = column_pieces(head_dim)
    to_log2 = scale * LOG2_E

    def body(
        items, table, q, kv, out, lse, q_smem, k_smem, v_smem, p_smem, o_smem, lse_smem, q_ready, k_ready, v_ready, consumed
    ):  # fmt: skip
        item, head = lax.axis_index("item"), lax.axis_index("head")
        row, length, unit, first_tile, tiles, pieces, first_item = (items[i, item] for i in range(7))
        piece, of = item - first_item, jnp.maximum(pieces, 1)
        first = lax.div(piece * tiles, of)
        count = lax.div((piece + 1) * tiles, of) - first
        first += first_tile

        @pl.when(jnp.logical_and(lax.axis_index("wg") == 1, count > 0))
        def _fetch():
            fetch_tiles(
                kv, table, k_smem, v_smem, k_ready, v_ready, (consumed,),
                row=row, head=head, kv_heads=kv_heads, page_tokens=page_tokens,
                first=first, count=count, last_token=length - 1,
            )  # fmt: skip

        @pl.when(jnp.logical_and(lax.axis_index("wg") == 0, count > 0))
        def _compute():
            plgpu.copy_gmem_to_smem(q.at[unit, head], q_smem, q_ready)
            plgpu.barrier_wait(q_ready)
            position = plgpu.broadcasted_iota(jnp.int32, (tile, group), 0, layout=plgpu.Layout.WGMMA)

            def step(i, carry):
                parts, best, total = carry
                slot = lax.rem(i, jnp.int32(steps))
                start = (first + i) * tile
                plgpu.barrier_wait(k_ready.at[slot])
                scores = product((tile, group), k_smem.at[slot], q_smem.transpose((1, 0)))
                visible = position < length - start
                if window is not None:
                    visible = jnp.logical_and(visible, position >= length - window - start)
                scores = jnp.where(visible, scores * to_log2, NEGATIVE)
                new_best = jnp.maximum(best, scores.max(axis=0))
                shrink = jnp.exp2(best - new_best)
                shares = jnp.exp2(scores - _over(new_best, scores))
                total = total * _over(shrink, total) + shares
                p_smem.transpose((1, 0))[...] = shares.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.barrier_wait(v_ready.at[slot])

                @pl.when(length - start < tile)
                def _():
                    zero_rows(v_smem.at[slot], length - start)

                mixed = [
                    product(
                        (64, group),
                        v_smem.at[slot, :, pl.ds(c, 64)].transpose((1, 0)),
                        p_smem.transpose((1, 0)),
                    )
                    for c in columns
                ]
                plgpu.barrier_arrive(consumed.at[slot])
                parts = tuple(
                    part * _over(shrink, part) + new for part, new in zip(parts, mixed, strict=True)
                )
                return parts, new_best, total

            carry = (
                tuple(filled((64, group), 0.0, plgpu.Layout.WGMMA) for _ in columns),
                filled((group,), NEGATIVE, plgpu.Layout.WGMMA.reduce(0)),
                filled((tile, group), 0.0, plgpu.Layout.WGMMA),
            )
            parts, best, total = lax.fori_loop(jnp.int32(0), count, step, carry)
            total = total.sum(axis=0)
            for c, part in zip(columns, parts, strict=True):
                o_smem[pl.ds(c, 64)] = part * _over(1.0 / total, part)
            lse_smem[...] = best + jnp.log2(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, out.at[item, head])
            plgpu.copy_smem_to_gmem(lse_smem, lse.at[item, head])
            plgpu.wait_smem_to_gmem(0)

    bf16, f32, count = jnp.bfloat16, jnp.float32, items.shape[1]
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((count, kv_heads, head_dim, group), f32),
            jax.ShapeDtypeStruct((count, kv_heads, group), f32),
        ),
        grid=(count, kv_heads),
        grid_names=("item", "head"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((group, head_dim), bf16),
            plgpu.SMEM((steps, tile, head_dim), bf16),
            plgpu.SMEM((steps, tile, head_dim), bf16),
            plgpu.SMEM((group, tile), bf16),
            plgpu.SMEM((head_dim, group), f32),
            plgpu.SMEM((group,), f32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=steps),
            plgpu.Barrier(num_arrivals=copies, num_barriers=steps),
            plgpu.Barrier(num_barriers=steps),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(items, page_table, queries, kv)


def merge_items(
    out: Any,
    partial: Float[Array, "items N h G"],
    lse: Float[Array, "items N G"],
    rows: Int32[Array, "7 S"],
    sinks: Float[Array, "N G"] | None,
    *,
    interpret: Any,
) -> None:
    """Write the units of decode rows in `out`, a Ref of `[U, N, G, h]`."""
    _, kv_heads, head_dim, group = partial.shape
    columns = column_pieces(head_dim)

    def body(rows, partial, lse, *refs):
        sinks, out, o_smem = (refs if len(refs) == 3 else (None, *refs))  # fmt: skip
        row, head = lax.axis_index("row"), lax.axis_index("head")
        unit, count, first = (rows[i, row] for i in (2, 5, 6))

        @pl.when(count > 0)
        def _():
            load = functools.partial(plgpu.load, optimized=False)
            over_group = plgpu.Layout.WGMMA.reduce(0)

            def turn(i, carry):
                parts, best, total = carry
                turns = [i * MERGE_TURN + j for j in range(MERGE_TURN)]
                ids = [first + jnp.minimum(j, count - 1) for j in turns]
                logs = [load(lse.at[item, head], layout=over_group) for item in ids]
                logs = [
                    jnp.where(jnp.broadcast_to(j < count, log.shape), log, NEGATIVE)
                    for j, log in zip(turns, logs, strict=True)
                ]
                values = [
                    [load(partial.at[item, head, pl.ds(c, 64)], layout=plgpu.Layout.WGMMA) for c in columns]
                    for item in ids
                ]
                new_best = best
                for log in logs:
                    new_best = jnp.maximum(new_best, log)
                shrink = jnp.exp2(best - new_best)
                total = total * shrink
                parts = [part * _over(shrink, part) for part in parts]
                for log, value in zip(logs, values, strict=True):
                    weight = jnp.exp2(log - new_best)
                    total += weight
                    parts = [part + v * _over(weight, v) for part, v in zip(parts, value, strict=True)]
                return tuple(parts), new_best, total

            zeros = tuple(filled((64, group), 0.0, plgpu.Layout.WGMMA) for _ in columns)
            if sinks is None:
                best, total = filled((group,), NEGATIVE, over_group), filled((group,), 0.0, over_group)
            else:
                best, total = (
                    load(sinks.at[head], layout=over_group) * LOG2_E,
                    filled((group,), 1.0, over_group),
                )
            turns = lax.div(count + (MERGE_TURN - 1), jnp.int32(MERGE_TURN))
            parts, _, total = lax.fori_loop(jnp.int32(0), turns, turn, (zeros, best, total))
            for c, part in zip(columns, parts, strict=True):
                o_smem.at[:, pl.ds(c, 64)].transpose((1, 0))[...] = (part * _over(1.0 / total, part)).astype(
                    jnp.bfloat16
                )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, out.at[unit, head])
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        grid=(rows.shape[1], kv_heads),
        grid_names=("row", "head"),
        scratch_types=[plgpu.SMEM((group, head_dim), jnp.bfloat16)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    kernel(rows, partial, lse, *(() if sinks is None else (sinks,)), out)


def _over(x: Array, like: Array) -> Array:
    """`[G]` as `[*, G]`."""
    return lax.broadcast_in_dim(x, like.shape, [1])
