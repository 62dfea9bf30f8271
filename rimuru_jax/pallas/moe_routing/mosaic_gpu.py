"""Routing on Hopper GPUs (Mosaic GPU): one launch for few tokens, two for many.

    logits --choose--> chosen, weights     a warp per token: the best expert, K times, over its lanes
           --rank--->  rank of each pair   a thread per expert: which of the block's tokens chose it, in order
                       counts              ... and how many did
           --place-->  rows and tiles      counts --prefix sums over blocks and experts--> first row of each expert

With more than `Config.block` tokens each block of tokens takes the first two steps in a first launch, and the last one,
which needs the counts of all blocks, is a second: every block sums what it needs of `[blocks, E]` counts itself.

A token's experts differ, so the rank of a pair (token, expert) is the number of tokens before it that chose the expert,
whatever their order of choice: nothing is sorted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.pallas import mosaic_elements

LANES = 32
WARPS = 4
THREADS = WARPS * LANES

ONE_LAUNCH = 16
"""With more tokens two launches of smaller blocks take less time than one of a large block."""
MOST_BLOCKS = 128
"""A block reads the counts of all others; larger blocks than 64 tokens do not fit shared memory for 512 experts."""
MOST_EXPERTS = 512
MOST_GROUPS = 16

ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, LANES), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""[4, n]: a row for each warp of a warpgroup, over its lanes."""
ROW_RESULTS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,), (1,))), warp_dims=(-2,), lane_dims=(plgpu.Replicated(LANES),), vector_dim=-1
)
"""[4]: a number for each row of such an array, known to all its lanes."""
LINE = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS,), (LANES,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""[n]: over the threads of a warpgroup."""

TAKEN = np.int32(-(2**31))
"""Below the key of every number."""
LOWEST = np.int32(-(2**31) + 1)
MINUS_INFINITY = np.int32(np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one call is computed."""

    block: int
    """Tokens of a thread block."""
    warpgroups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What `route` is asked for."""

    normalize: bool
    scoring: str
    num_groups: int
    top_groups: int
    normalize_epsilon: float
    scale: float


def refusal(num_experts: int, num_groups: int, top_k: int) -> str | None:
    """Why such a router has no kernel, or None."""
    if num_experts > MOST_EXPERTS or num_groups > MOST_GROUPS or top_k > LANES:
        return (
            f"{top_k} of {num_experts} experts in {num_groups} groups are chosen, "
            f"but at most {LANES} of {MOST_EXPERTS} in {MOST_GROUPS} are wanted"
        )
    return None


def choose_config(tokens: int, experts: int) -> Config:
    """A good configuration for so many tokens and experts."""
    lines = pl.cdiv(experts, THREADS)
    if tokens <= ONE_LAUNCH:
        block = pl.cdiv(tokens, WARPS) * WARPS
        return Config(block=block, warpgroups=max(block // WARPS, lines))
    block = 16
    while block < 64 and tokens > MOST_BLOCKS * block:
        block *= 2
    return Config(block=block, warpgroups=4)


def route_and_group(
    logits: Float[Array, "T E"],
    valid: Bool[Array, " T"],
    selection_bias: Float[Array, " E"] | None,
    top_k: int,
    tile: int,
    max_tiles: int,
    scoring: Scoring,
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Int32[Array, "T K"], Float32[Array, "T K"], tuple[Array, Array, Array, Array, Array]]:
    """Chosen experts, weights, and the fields of a `Routing`.

    `interpret`: an `InterpretGPUParams` runs the kernels on a CPU, slowly.
    """
    tokens, experts = logits.shape
    config = config or choose_config(tokens, experts)
    kernel = _Kernel(
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        tile=tile,
        max_tiles=max_tiles,
        scoring=scoring,
        biased=selection_bias is not None,
        config=config,
        interpret=interpret,
    )
    if selection_bias is None:
        selection_bias = jnp.zeros((1,), jnp.float32)
    chosen, weights, routing = kernel(
        logits.astype(jnp.float32).reshape(-1), selection_bias.astype(jnp.float32), valid
    )
    tile_experts, row_tokens, pair_rows, num_tiles, counts = routing
    routing = tile_experts, row_tokens, pair_rows.reshape(tokens, top_k), num_tiles.reshape(()), counts
    return chosen.reshape(tokens, top_k), weights.reshape(tokens, top_k), routing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    tokens: int
    experts: int
    top_k: int
    tile: int
    max_tiles: int
    scoring: Scoring
    biased: bool
    config: Config
    interpret: Any

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.tokens, self.config.block)

    @property
    def width(self) -> int:
        """Experts, rounded up to whole lines of threads."""
        return pl.cdiv(self.experts, THREADS) * THREADS

    def __call__(
        self, logits: Float32[Array, " TE"], bias: Float32[Array, " _"], valid: Bool[Array, " T"]
    ) -> tuple[Array, Array, list[Array]]:
        pairs = self.tokens * self.top_k

        def int32(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        picks = [int32(pairs), jax.ShapeDtypeStruct((pairs,), jnp.float32)]
        places = [
            int32(self.max_tiles),
            int32(self.max_tiles * self.tile),
            int32(pairs),
            int32(1),
            int32(self.experts),
        ]
        member = plgpu.SMEM((self.config.block * self.width,), jnp.int32)
        line = plgpu.SMEM((self.width,), jnp.int32)
        parts = plgpu.SMEM((self.config.warpgroups * THREADS,), jnp.int32)
        barrier = plgpu.Barrier(num_arrivals=self.config.warpgroups)
        if self.blocks == 1:

            def all_at_once(logits, bias, valid, chosen, weights, *rest):  # [T E], [E], [T], [T K], [T K]
                *places, member, histogram, end, base, count, barrier = rest
                self._choose(logits, bias, valid, chosen, weights, member)
                _together(barrier)
                self._rank(member, histogram, 0)
                _together(barrier)

                def rank(pair, expert):
                    token = lax.div(pair, self.top_k)
                    rank = self._read(member, token * self.width + expert)
                    return _where(self._read(valid, token), rank, -1)

                self._add_up_one(histogram, end, base, count, barrier, places)
                self._place(chosen, rank, end, base, count, places)

            out = self._launch(all_at_once, [*picks, *places], [member, line, line, line, line, barrier])(
                logits, bias, valid
            )
            return out[0], out[1], out[2:]

        def first(logits, bias, valid, chosen, weights, ranks, histograms, member, barrier):
            block = lax.axis_index("block")
            self._choose(logits, bias, valid, chosen, weights, member)
            _together(barrier)
            self._rank(member, histograms, block * self.experts)
            _together(barrier)

            def write(pair, expert, mine):
                token = lax.div(pair, self.top_k)
                inside = (token - block * self.config.block) * self.width + expert
                rank = self._read(member, _where(mine, inside, 0))
                self._write(ranks, pair, _where(self._read(valid, token), rank, -1), mine)

            self._each_pair(chosen, write)

        def second(chosen, ranks, histograms, *rest):
            *places, totals, befores, end, base, count, barrier = rest
            self._add_up(histograms, totals, befores, end, base, count, barrier, places)
            self._place(chosen, lambda pair, expert: self._read(ranks, pair), end, base, count, places)

        chosen, weights, ranks, histograms = self._launch(
            first, [*picks, int32(pairs), int32(self.blocks * self.experts)], [member, barrier]
        )(logits, bias, valid)
        out = self._launch(second, places, [parts, parts, line, line, line, barrier])(
            chosen, ranks, histograms
        )
        return chosen, weights, out

    def _launch(
        self, body: Callable[..., None], outputs: list[Any], scratch: list[Any]
    ) -> Callable[..., Any]:
        return plgpu.kernel(
            body,
            out_type=outputs,
            grid=(self.blocks,),
            grid_names=("block",),
            num_threads=self.config.warpgroups,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=self.interpret,
        )

    # Choose: a warp per token.

    def _choose(self, logits, bias, valid, chosen, weights, member):
        """Write the block's `chosen` and `weights`, and 1 for each (token, expert) of `member` that is a pair."""
        first = lax.axis_index("block") * self.config.block
        warpgroup = lax.axis_index("warpgroup")
        columns = pl.cdiv(self.experts, LANES) * LANES
        expert = _columns(columns)
        real = expert < self.experts
        step = self.config.warpgroups * WARPS
        lane = _columns(LANES)

        @pl.loop(0, pl.cdiv(self.config.block, step))
        def _four_tokens(turn):
            def local(n):
                return turn * step + warpgroup * WARPS + _rows(n)

            token = jnp.minimum(first + local(columns), self.tokens - 1)
            known = jnp.minimum(expert, self.experts - 1)
            x = self._read(logits, token * self.experts + known)
            is_valid = self._read(valid, token)
            x_key = _where(real, _key(x), TAKEN)
            largest = jnp.max(x_key, axis=1)
            total = None
            if self.scoring.scoring == "softmax":
                terms = _where(real, jnp.exp(x - _number(_spread(largest, columns))), 0.0)
                total = jnp.sum(terms, axis=1)
            key = x_key
            if self.biased or self.scoring.top_groups < self.scoring.num_groups:
                score = self._score(x, largest, total, columns)
                if self.biased:
                    score += self._read(bias, known)
                key = _where(real, _key(score), TAKEN)
            if self.scoring.top_groups < self.scoring.num_groups:
                key = self._in_best_groups(key, expert)

            def pick(k, carry):
                key, experts_of_lanes, keys_of_lanes = carry
                best = jnp.max(key, axis=1)
                # The largest distance from the end belongs to the lowest of equally good experts.
                distance = jnp.max(_where(key == _spread(best, columns), columns - 1 - expert, -1), axis=1)
                here = columns - 1 - expert == _spread(distance, columns)
                x_best = best
                if key is not x_key:
                    x_best = jnp.max(_where(here, x_key, TAKEN), axis=1)
                return (
                    _where(here, TAKEN, key),
                    _where(lane == k, columns - 1 - _spread(distance, LANES), experts_of_lanes),
                    _where(lane == k, _spread(x_best, LANES), keys_of_lanes),
                )

            nothing = jnp.zeros((WARPS, LANES), jnp.int32)
            nothing = plgpu.layout_cast(nothing, ROWS)
            key, picked, picked_key = lax.fori_loop(0, self.top_k, pick, (key, nothing, nothing))

            chooses = lane < self.top_k
            weight = self._weigh(picked_key, chooses, largest, total)
            here = local(LANES)
            token = first + here
            pair = token * self.top_k + lane
            mine = chooses & (here < self.config.block) & (token < self.tokens)
            self._write(chosen, pair, picked, mine)
            self._write(weights, pair, weight, mine)

            here = local(columns)
            counted = is_valid & (first + here < self.tokens) & (key == TAKEN)
            self._write(
                member,
                here * self.width + expert,
                _where(counted, 1, 0),
                real & (here < self.config.block),
            )

    def _score(self, x, largest, total, columns):
        if self.scoring.scoring == "softmax":
            return jnp.exp(x - _number(_spread(largest, columns))) / _spread(total, columns)
        if self.scoring.scoring == "sigmoid":
            return 1.0 / (1.0 + jnp.exp(-x))
        return x

    def _weigh(self, keys, chooses, largest, total):
        """Weights of the chosen experts, one in each of the first lanes."""
        x = _number(keys)
        if self.scoring.scoring == "softmax_of_chosen":
            best = jnp.max(_where(chooses, keys, TAKEN), axis=1)
            terms = jnp.exp(x - _number(_spread(best, LANES)))
            total = jnp.sum(_where(chooses, terms, 0.0), axis=1)
            weight = terms / _spread(total, LANES)
        else:
            weight = self._score(x, largest, total, LANES)
        if self.scoring.normalize:
            total = jnp.sum(_where(chooses, weight, 0.0), axis=1)
            weight = weight / (_spread(total, LANES) + self.scoring.normalize_epsilon)
        return weight * self.scoring.scale

    def _in_best_groups(self, key, expert):
        """`key` of experts in the best groups, that of minus infinity elsewhere."""
        groups, columns = self.scoring.num_groups, key.shape[1]
        size = self.experts // groups
        group = lax.div(expert, size)
        strengths = []
        for g in range(groups):
            inside = _where(group == g, key, TAKEN)
            best = jnp.max(inside, axis=1)
            strength = _number(best)
            if size > 1:
                is_best = inside == _spread(best, columns)
                others = jnp.max(_where(is_best, TAKEN, inside), axis=1)
                several = jnp.sum(_where(is_best, 1, 0), axis=1) > 1
                strength += _number(_where(several, best, others))
            strengths.append(strength)
        kept = jnp.zeros(key.shape, jnp.bool_)
        for g in range(groups):
            better = sum(
                _where(other >= strengths[g] if h < g else other > strengths[g], 1, 0)
                for h, other in enumerate(strengths)
                if h != g
            )
            is_kept = _where(better < self.scoring.top_groups, 1, 0)
            kept = kept | ((group == g) & (_spread(is_kept, columns) > 0))
        return _where(kept | (expert >= self.experts), key, MINUS_INFINITY)

    # Rank: a thread per expert.

    def _rank(self, member, histogram, offset):
        """Turn `member` into the number of the block's earlier pairs of each expert, and count them all."""
        unrolled = next(n for n in (8, 4) if self.config.block % n == 0)

        @pl.loop(lax.axis_index("warpgroup"), self.width // THREADS, step=self.config.warpgroups)
        def _own_line(line):
            expert = line * THREADS + _line()

            def some_tokens(turn, count):
                places = [(turn * unrolled + i) * self.width + expert for i in range(unrolled)]
                for place, pair in zip(places, [self._read(member, p) for p in places], strict=True):
                    self._write(member, place, count, expert < self.experts)
                    count = count + pair
                return count

            zero = plgpu.layout_cast(jnp.zeros((THREADS,), jnp.int32), LINE)
            count = lax.fori_loop(0, self.config.block // unrolled, some_tokens, zero)
            self._write(histogram, offset + expert, count, expert < self.experts)

    # Place: what all blocks counted gives every pair its row.

    def _add_up_one(self, histogram, end, base, count, barrier, places):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            expert = _line(self.width)
            counts = _where(expert < self.experts, self._read(histogram, expert), 0)
            self._scan(counts, 0, end, base, count, places)

        _together(barrier)

    def _add_up(self, histograms, totals, befores, end, base, count, barrier, places):
        """Sum the blocks' histograms, those of earlier blocks apart. Warpgroups share the experts, then the blocks."""
        lines = self.width // THREADS
        parts = self.config.warpgroups // lines
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        line, part = lax.rem(warpgroup, lines), lax.div(warpgroup, lines)
        expert = line * THREADS + _line()
        known = jnp.minimum(expert, self.experts - 1)
        unrolled = 16
        share = pl.cdiv(self.blocks, parts * unrolled) * unrolled

        def some_blocks(turn, carry):
            total, before = carry
            counted = [part * share + turn * unrolled + i for i in range(unrolled)]
            values = [
                self._read(histograms, jnp.minimum(b, self.blocks - 1) * self.experts + known)
                for b in counted
            ]
            for b, value in zip(counted, values, strict=True):
                total += value * _where(b < self.blocks, 1, 0)
                before += value * _where(b < block, 1, 0)
            return total, before

        zero = plgpu.layout_cast(jnp.zeros((THREADS,), jnp.int32), LINE)
        total, before = lax.fori_loop(0, share // unrolled, some_blocks, (zero, zero))
        self._write(totals, part * self.width + expert, total)
        self._write(befores, part * self.width + expert, before)
        _together(barrier)

        @pl.when(warpgroup == 0)
        def _():
            expert = _line(self.width)

            def summed(parts_of):
                return sum(self._read(parts_of, i * self.width + expert) for i in range(parts))

            counts = _where(expert < self.experts, summed(totals), 0)
            self._scan(counts, summed(befores), end, base, count, places)

        _together(barrier)

    def _scan(self, counts, before, end, base, count, places):
        """From the counts of all experts to the tiles before the end of each, and the row of its next pair."""
        num_tiles, counts_out = places[3:]
        expert = _line(self.width)
        tiles = lax.div(counts + (self.tile - 1), self.tile)
        sums = mosaic_elements.sums_in_warps(tiles, LINE, self.interpret)
        warp = lax.div(expert, LANES)
        self._write(end, warp, sums, lax.rem(expert, LANES) == LANES - 1)
        count[...] = counts  # such a store also waits for all threads, before and after
        warps = self.width // LANES
        sums_of_warps = [self._read(end, jnp.full(expert.shape, i, jnp.int32)) for i in range(warps - 1)]
        for i, all_of_warp in enumerate(sums_of_warps):
            sums += _where(warp > i, all_of_warp, 0)
        end[...] = sums
        base[...] = (sums - tiles) * self.tile + before

        @pl.when(lax.axis_index("block") == 0)
        def _():
            self._write(counts_out, expert, counts, expert < self.experts)
            num_tiles[0] = end[self.width - 1]

    def _place(self, chosen, rank, end, base, count, places):
        tile_experts, row_tokens, pair_rows = places[:3]
        rows = self.max_tiles * self.tile
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

        def write(pair, expert, mine):
            r = rank(pair, expert)
            row = self._read(base, expert) + r
            self._write(pair_rows, pair, _where(r < 0, rows, row), mine)
            self._write(row_tokens, row, lax.div(pair, self.top_k), mine & (r >= 0))

        self._each_pair(chosen, write)

        # Which tiles are the expert's, and the rows that fill the last of them: a warp per expert, or a thread where
        # there are so few warps that each would have many turns.
        def turns(width):
            experts = self.blocks * self.config.warpgroups * THREADS // width
            writes = pl.cdiv(self.tile - 1, width) + pl.cdiv(pl.cdiv(self.tokens, self.tile), width)
            return pl.cdiv(self.experts, experts) * writes

        width = min((LANES, 1), key=turns)
        shape = (WARPS, LANES) if width == LANES else (THREADS,)
        offset, inside = (_columns(LANES), _rows(LANES)) if width == LANES else (0, _line())
        step = self.blocks * self.config.warpgroups * THREADS // width
        own = (block * self.config.warpgroups + warpgroup) * (THREADS // width)

        @pl.loop(0, pl.cdiv(self.experts, step))
        def _some_experts(turn):
            expert = turn * step + own + inside
            mine = expert < self.experts
            known = jnp.minimum(expert, self.experts - 1)
            counted = self._read(count, known)
            tiles = lax.div(counted + (self.tile - 1), self.tile)
            first = self._read(end, known) - tiles
            filler = jnp.full(shape, self.tokens, jnp.int32)
            for i in range(0, pl.cdiv(self.tokens, self.tile), width):
                self._write(tile_experts, first + i + offset, expert, mine & (i + offset < tiles))
            for i in range(0, self.tile - 1, width):
                row = counted + i + offset
                self._write(row_tokens, first * self.tile + row, filler, mine & (row < tiles * self.tile))

        # Tiles that nobody needs, and their rows.
        first = (block * self.config.warpgroups + warpgroup) * THREADS
        step = self.blocks * self.config.warpgroups * THREADS
        used = end[self.width - 1]
        for ref, start, stop, value in (
            (tile_experts, used, self.max_tiles, self.experts),
            (row_tokens, used * self.tile, rows, self.tokens),
        ):

            @pl.loop(start + first, stop, step=step)
            def _unused(place, ref=ref, stop=stop, value=value):
                place = place + _line()
                self._write(ref, place, jnp.full(place.shape, value, jnp.int32), place < stop)

    def _each_pair(self, chosen, act: Callable[[Any, Any, Any], None]):
        """Call `act(pair, expert, mine)` on the pairs of the block's tokens, those that are not `mine` being others."""
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        pairs = self.config.block * self.top_k
        last = self.tokens * self.top_k - 1

        @pl.loop(warpgroup * THREADS, pairs, step=self.config.warpgroups * THREADS)
        def _pairs(start):
            inside = start + _line()
            pair = block * pairs + inside
            mine = (inside < pairs) & (pair <= last)
            pair = jnp.minimum(pair, last)
            act(pair, self._read(chosen, pair), mine)

    def _read(self, ref, index):
        return mosaic_elements.read(ref, index, _layout(index), self.interpret)

    def _write(self, ref, index, values, mask=None):
        mask = index >= 0 if mask is None else mask
        mosaic_elements.write(ref, index, values, mask, _layout(index), self.interpret)


def _layout(x):
    if x.ndim == 2:
        return ROWS
    return ROW_RESULTS if x.shape[0] == WARPS else LINE


def _line(n: int = THREADS):
    """[n]: 0 .. n - 1"""
    return plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=LINE)


def _rows(n: int):
    """[4, n]: the number of the row"""
    return plgpu.broadcasted_iota(jnp.int32, (WARPS, n), 0, layout=ROWS)


def _columns(n: int):
    """[4, n]: the number of the column"""
    return plgpu.broadcasted_iota(jnp.int32, (WARPS, n), 1, layout=ROWS)


def _where(condition, x, y):
    """`jnp.where` of an array or a scalar of the kernel; a scalar in the first place would decide the signedness."""
    if condition.ndim == 0:
        return jnp.where(condition, x, y)
    x = plgpu.layout_cast(jnp.broadcast_to(x, condition.shape), _layout(condition))
    return jnp.where(condition, x, y)


def _spread(x, columns: int):
    """[4] -> [4, columns]"""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (WARPS, columns), (0,)), ROWS)


def _key(x):
    """Integers in the order of the floats, above TAKEN; as in `lax.top_k`, 0 is above -0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)


def _number(key):
    """The inverse of `_key`."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def _together(barrier):
    """Wait until all warpgroups of the block are here; then each sees what the others wrote."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
