"""Norm, rotation and the writing of keys and values on Hopper, in one Mosaic GPU launch bound by memory.

    block = one token, GROUP_ROWS heads a turn      one warpgroup; blocks of queries, then blocks of keys and values
    head  = 16 lanes                                a thread has up to four neighbours of each section of it
    section                                         half of what is rotated: places that turn together are in one thread
    qkv --> registers, float32: norm, rotation --> queries, or the page of the key or value

A thread sees what others have only in the sum of squares, which are four shuffles: there is neither shared memory nor a
barrier. Where a token goes is looked up here, lest XLA does it in a launch of its own for each layer.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from rimuru_jax.array_types import Pool, Queries
from rimuru_jax.pallas import mosaic_elements
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.qk_norm_rope_cache.head_norm import HeadNorm
from rimuru_jax.pallas.ragged import update_in_place

LANES = 16
"""Of a head."""
GROUP_ROWS = 8
"""Heads of a turn of a block: two for each of four warps."""
MOST_TURNS = 4
"""Their loads are under way together."""
MANY_BLOCKS = 132 * 16
"""With fewer, blocks take fewer turns."""


def refusal(qkv: Float[Array, "T n"], view: MemoryView, half: int | None) -> str | None:
    """Why these operands have no kernel, or None. `half` of the dimensions that are rotated, if any are."""
    h = view.page_shape[3]
    if view.dtype != jnp.bfloat16 or qkv.dtype not in (jnp.float32, jnp.bfloat16):
        return f"qkv is {qkv.dtype} and pages are {view.dtype}, but bfloat16 pages are wanted"
    if half == 0 or h % (half or h) or (half or h) % LANES:
        return f"heads of {h} of which {2 * (half or 0)} are rotated are no sections of a multiple of {LANES} dimensions"
    return None


def qk_norm_rope_cache(
    qkv: Float[Array, "T n"],
    pool: Pool,
    view: MemoryView,
    page_table: Int32[Array, "S W"],
    rows: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    query_start: Int32[Array, " S+1"],
    *,
    num_heads: int,
    head_norm: HeadNorm | None,
    rotation: tuple[Float32[Array, "T half"], Float32[Array, "T half"]] | None,
    interpret: Any = None,
) -> tuple[Queries, Pool]:
    """What is behind `api.qk_norm_rope_cache`, for operands without a refusal: a kernel in which padding writes nothing.

    `interpret`: an `InterpretGPUParams` runs it on a CPU, slowly.
    """
    _, kv_heads, page_tokens, h = view.page_shape
    (tokens, width), last_row = qkv.shape, query_start.shape[0] - 1
    *norms, eps, style = (0.0, None) if head_norm is None else head_norm
    section = h if rotation is None else rotation[0].shape[1]
    query_width = (width - 2 * kv_heads * h) // num_heads
    neighbours = next(n for n in (4, 2, 1) if section % (n * LANES) == 0)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((GROUP_ROWS, LANES * neighbours), (2, neighbours))),
        warp_dims=(-4,),
        lane_dims=(-2, -3),
        vector_dim=-1,
    )

    def blocks(heads: int) -> tuple[int, int]:
        """Of a token, and the turns of each."""
        groups, turns = pl.cdiv(heads, GROUP_ROWS), MOST_TURNS
        while turns > 1 and (turns > groups or tokens * pl.cdiv(groups, turns) < MANY_BLOCKS):
            turns //= 2
        return pl.cdiv(groups, turns), turns

    (q_blocks, q_turns), (kv_blocks, kv_turns) = blocks(num_heads), blocks(2 * kv_heads)

    def body(
        qkv,  # [T n]
        page_table,  # [S, W]
        rows,  # [T]
        positions,  # [T]
        query_start,  # [S + 1]
        *refs,  # weights [2 h] of norms, if any; cosines and sines [T half], if any; pool [P, words]; queries [T H h]
    ):
        *small, pool, queries = refs
        weights, turning = small[: len(norms)], small[len(norms) :]
        block = lax.axis_index("block")
        token, part = lax.div(block, q_blocks + kv_blocks), lax.rem(block, q_blocks + kv_blocks)
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, (GROUP_ROWS, section), axis, layout=layout) for axis in (0, 1)
        )

        def read(ref, index):
            return mosaic_elements.read(ref, index, layout, interpret).astype(jnp.float32)

        def write(ref, index, values, mask):
            mosaic_elements.write(ref, index, values.astype(view.dtype), mask, layout, interpret)

        def rounded(x):
            return x.astype(view.dtype).astype(jnp.float32)

        def weights_from(start):
            """A section of [8, section] each, the same for all heads."""
            whole = [read(weights[0], start + first + column) for first in range(0, h, section)]
            if style == "plain":
                return [rounded(x) for x in whole]
            return [x + 1.0 for x in whole] if style == "zero_centred" else whole

        def normed(x, weights):
            squares = sum((part * part for part in x[1:]), x[0] * x[0])
            scale = lax.rsqrt(jnp.sum(squares, axis=1) * (1.0 / h) + eps)
            scale = plgpu.layout_cast(lax.broadcast_in_dim(scale, (GROUP_ROWS, section), (0,)), layout)
            x = [part * scale for part in x]
            if style == "plain":
                x = [rounded(part) for part in x]
            return [rounded(part * weight) for part, weight in zip(x, weights, strict=True)]

        def rotated(x, cos, sin):
            first, second, *rest = x
            return [first * cos - second * sin, second * cos + first * sin, *rest]

        def load(part, turns, heads, start, stride):
            """(which head, its sections) of `turns` groups of heads, which begin at `start` of a token's columns."""
            groups = [(part * turns + turn) * GROUP_ROWS + row for turn in range(turns)]
            starts = [token * width + start + jnp.minimum(head, heads - 1) * stride for head in groups]
            return [
                (head, [rounded(read(qkv, first + i + column)) for i in range(0, h, section)])
                for head, first in zip(groups, starts, strict=True)
            ]

        def finish(loaded, start):
            """(which head, its sections as they came, and normalised and rotated) of what was loaded; weights of the norm
            begin at `start`."""
            own = weights_from(start) if weights else None
            factors = [read(part, token * section + column) for part in turning]
            for head, x in loaded:
                turned = x if own is None else normed(x, own)
                yield head, x, rotated(turned, *factors) if turning else turned

        @pl.when(part < q_blocks)
        def _queries():
            loaded = load(part, q_turns, num_heads, 0, query_width)
            for head, _, turned in finish(loaded, 0):
                for i, values in enumerate(turned):
                    place = (token * num_heads + head) * h + i * section + column
                    write(queries, place, values, head < num_heads)

        @pl.when(part >= q_blocks)
        def _keys_and_values():
            # Not a condition of it all: everything else would wait for this read.
            written = jnp.where(token < query_start[last_row], 2 * kv_heads, 0)
            position, its_row = positions[token], rows[token]
            loaded = load(part - q_blocks, kv_turns, 2 * kv_heads, num_heads * query_width, h)
            page, offset = page_table[its_row, lax.div(position, page_tokens)], lax.rem(position, page_tokens)
            for head, x, turned in finish(loaded, h):
                for i, (as_is, values) in enumerate(zip(x, turned, strict=True)):
                    place = (head * page_tokens + offset) * h + i * section + column
                    values = jnp.where(head < kv_heads, values, as_is)
                    write(pool, (jnp.broadcast_to(page, place.shape), place), values, head < written)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens * num_heads * h,), view.dtype),
        grid=(tokens * (q_blocks + kv_blocks),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )
    factors = () if rotation is None else tuple(part.reshape(-1) for part in rotation)
    small = page_table, rows, positions, query_start, *norms, *factors
    queries, pool = update_in_place(pool, view, (), lambda ref: kernel(qkv.reshape(-1), *small, ref))
    return queries.reshape(tokens, num_heads, h), pool
