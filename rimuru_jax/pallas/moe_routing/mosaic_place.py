"""The other stages of routing on Hopper: each pair's rank among those of its expert, and from the counts of all its row."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas import mosaic_elements
from rimuru_jax.pallas.moe_routing.mosaic_parts import (
    LANES,
    LINE,
    THREADS,
    WARPS,
    Call,
    column_index,
    line_index,
    row_index,
    select,
    together,
)


def rank_in_block(call: Call, member, histogram, offset):
    """Turn `member` into the number of the block's earlier pairs of each expert, and count them all."""
    unrolled = next(n for n in (8, 4) if call.config.block % n == 0)

    @pl.loop(lax.axis_index("warpgroup"), call.width // THREADS, step=call.config.warpgroups)
    def _own_line(line):
        expert = line * THREADS + line_index()

        def some_tokens(turn, count):
            places = [(turn * unrolled + i) * call.width + expert for i in range(unrolled)]
            for place, pair in zip(places, [call.read(member, p) for p in places], strict=True):
                call.write(member, place, count, expert < call.experts)
                count = count + pair
            return count

        zero = plgpu.layout_cast(jnp.zeros((THREADS,), jnp.int32), LINE)
        count = lax.fori_loop(0, call.config.block // unrolled, some_tokens, zero)
        call.write(histogram, offset + expert, count, expert < call.experts)


def add_up_block(call: Call, histogram, end, base, count, barrier, places):
    @pl.when(lax.axis_index("warpgroup") == 0)
    def _():
        expert = line_index(call.width)
        counts = select(expert < call.experts, call.read(histogram, expert), 0)
        _scan(call, counts, 0, end, base, count, places)

    together(barrier)


def add_up_blocks(call: Call, histograms, totals, befores, end, base, count, barrier, places):
    """Sum the blocks' histograms, those of earlier blocks apart. Warpgroups share the experts, then the blocks."""
    lines = call.width // THREADS
    parts = call.config.warpgroups // lines
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    line, part = lax.rem(warpgroup, lines), lax.div(warpgroup, lines)
    expert = line * THREADS + line_index()
    known = jnp.minimum(expert, call.experts - 1)
    unrolled = 16
    share = pl.cdiv(call.blocks, parts * unrolled) * unrolled

    def some_blocks(turn, carry):
        total, before = carry
        counted = [part * share + turn * unrolled + i for i in range(unrolled)]
        values = [
            call.read(histograms, jnp.minimum(b, call.blocks - 1) * call.experts + known) for b in counted
        ]
        for b, value in zip(counted, values, strict=True):
            total += value * select(b < call.blocks, 1, 0)
            before += value * select(b < block, 1, 0)
        return total, before

    zero = plgpu.layout_cast(jnp.zeros((THREADS,), jnp.int32), LINE)
    total, before = lax.fori_loop(0, share // unrolled, some_blocks, (zero, zero))
    call.write(totals, part * call.width + expert, total)
    call.write(befores, part * call.width + expert, before)
    together(barrier)

    @pl.when(warpgroup == 0)
    def _():
        expert = line_index(call.width)

        def summed(parts_of):
            return sum(call.read(parts_of, i * call.width + expert) for i in range(parts))

        counts = select(expert < call.experts, summed(totals), 0)
        _scan(call, counts, summed(befores), end, base, count, places)

    together(barrier)


def _scan(call: Call, counts, before, end, base, count, places):
    """From the counts of all experts to the tiles before the end of each, and the row of its next pair."""
    num_tiles, counts_out = places[3:]
    expert = line_index(call.width)
    tiles = lax.div(counts + (call.tile - 1), call.tile)
    sums = mosaic_elements.sums_in_warps(tiles, LINE, call.interpret)
    warp = lax.div(expert, LANES)
    call.write(end, warp, sums, lax.rem(expert, LANES) == LANES - 1)
    count[...] = counts  # such a store also waits for all threads, before and after
    warps = call.width // LANES
    sums_of_warps = [call.read(end, jnp.full(expert.shape, i, jnp.int32)) for i in range(warps - 1)]
    for i, all_of_warp in enumerate(sums_of_warps):
        sums += select(warp > i, all_of_warp, 0)
    end[...] = sums
    base[...] = (sums - tiles) * call.tile + before

    @pl.when(lax.axis_index("block") == 0)
    def _():
        call.write(counts_out, expert, counts, expert < call.experts)
        num_tiles[0] = end[call.width - 1]


def place_pairs(call: Call, chosen, rank, end, base, count, places):
    tile_experts, row_tokens, pair_rows = places[:3]
    rows = call.max_tiles * call.tile
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

    def write(pair, expert, mine):
        r = rank(pair, expert)
        row = call.read(base, expert) + r
        call.write(pair_rows, pair, select(r < 0, rows, row), mine)
        call.write(row_tokens, row, lax.div(pair, call.top_k), mine & (r >= 0))

    each_pair(call, chosen, write)

    # Which tiles are the expert's, and the rows that fill the last of them: a warp per expert, or a thread where
    # there are so few warps that each would have many turns.
    def turns(width):
        experts = call.blocks * call.config.warpgroups * THREADS // width
        writes = pl.cdiv(call.tile - 1, width) + pl.cdiv(pl.cdiv(call.tokens, call.tile), width)
        return pl.cdiv(call.experts, experts) * writes

    width = min((LANES, 1), key=turns)
    shape = (WARPS, LANES) if width == LANES else (THREADS,)
    offset, inside = (column_index(LANES), row_index(LANES)) if width == LANES else (0, line_index())
    step = call.blocks * call.config.warpgroups * THREADS // width
    own = (block * call.config.warpgroups + warpgroup) * (THREADS // width)

    @pl.loop(0, pl.cdiv(call.experts, step))
    def _some_experts(turn):
        expert = turn * step + own + inside
        mine = expert < call.experts
        known = jnp.minimum(expert, call.experts - 1)
        counted = call.read(count, known)
        tiles = lax.div(counted + (call.tile - 1), call.tile)
        first = call.read(end, known) - tiles
        filler = jnp.full(shape, call.tokens, jnp.int32)
        for i in range(0, pl.cdiv(call.tokens, call.tile), width):
            call.write(tile_experts, first + i + offset, expert, mine & (i + offset < tiles))
        for i in range(0, call.tile - 1, width):
            row = counted + i + offset
            call.write(row_tokens, first * call.tile + row, filler, mine & (row < tiles * call.tile))

    # Tiles that nobody needs, and their rows.
    first = (block * call.config.warpgroups + warpgroup) * THREADS
    step = call.blocks * call.config.warpgroups * THREADS
    used = end[call.width - 1]
    for ref, start, stop, value in (
        (tile_experts, used, call.max_tiles, call.experts),
        (row_tokens, used * call.tile, rows, call.tokens),
    ):

        @pl.loop(start + first, stop, step=step)
        def _unused(place, ref=ref, stop=stop, value=value):
            place = place + line_index()
            call.write(ref, place, jnp.full(place.shape, value, jnp.int32), place < stop)


def each_pair(call: Call, chosen, act: Callable[[Any, Any, Any], None]):
    """Call `act(pair, expert, mine)` on the pairs of the block's tokens, those that are not `mine` being others."""
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    pairs = call.config.block * call.top_k
    last = call.tokens * call.top_k - 1

    @pl.loop(warpgroup * THREADS, pairs, step=call.config.warpgroups * THREADS)
    def _pairs(start):
        inside = start + line_index()
        pair = block * pairs + inside
        mine = (inside < pairs) & (pair <= last)
        pair = jnp.minimum(pair, last)
        act(pair, call.read(chosen, pair), mine)
