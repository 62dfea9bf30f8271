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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.pallas.moe_routing.mosaic_choose import choose_experts
from rimuru_jax.pallas.moe_routing.mosaic_parts import LANES, THREADS, WARPS, Call, Config, select, together
from rimuru_jax.pallas.moe_routing.mosaic_place import (
    add_up_block,
    add_up_blocks,
    each_pair,
    place_pairs,
    rank_in_block,
)
from rimuru_jax.pallas.moe_routing.scoring import Scoring

ONE_LAUNCH = 16
"""With more tokens two launches of smaller blocks take less time than one of a large block."""
MOST_BLOCKS = 128
"""A block reads the counts of all others; larger blocks than 64 tokens do not fit shared memory for 512 experts."""
MOST_EXPERTS = 512
MOST_GROUPS = 16


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
    call = Call(
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
    chosen, weights, routing = _run(
        call, logits.astype(jnp.float32).reshape(-1), selection_bias.astype(jnp.float32), valid
    )
    tile_experts, row_tokens, pair_rows, num_tiles, counts = routing
    routing = tile_experts, row_tokens, pair_rows.reshape(tokens, top_k), num_tiles.reshape(()), counts
    return chosen.reshape(tokens, top_k), weights.reshape(tokens, top_k), routing


def _run(
    call: Call, logits: Float32[Array, " TE"], bias: Float32[Array, " _"], valid: Bool[Array, " T"]
) -> tuple[Array, Array, list[Array]]:
    pairs = call.tokens * call.top_k

    def int32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    picks = [int32(pairs), jax.ShapeDtypeStruct((pairs,), jnp.float32)]
    places = [
        int32(call.max_tiles),
        int32(call.max_tiles * call.tile),
        int32(pairs),
        int32(1),
        int32(call.experts),
    ]
    member = plgpu.SMEM((call.config.block * call.width,), jnp.int32)
    line = plgpu.SMEM((call.width,), jnp.int32)
    parts = plgpu.SMEM((call.config.warpgroups * THREADS,), jnp.int32)
    barrier = plgpu.Barrier(num_arrivals=call.config.warpgroups)
    if call.blocks == 1:

        def all_at_once(logits, bias, valid, chosen, weights, *rest):  # [T E], [E], [T], [T K], [T K]
            *places, member, histogram, end, base, count, barrier = rest
            choose_experts(call, logits, bias, valid, chosen, weights, member)
            together(barrier)
            rank_in_block(call, member, histogram, 0)
            together(barrier)

            def rank(pair, expert):
                token = lax.div(pair, call.top_k)
                rank = call.read(member, token * call.width + expert)
                return select(call.read(valid, token), rank, -1)

            add_up_block(call, histogram, end, base, count, barrier, places)
            place_pairs(call, chosen, rank, end, base, count, places)

        out = _launch(call, all_at_once, [*picks, *places], [member, line, line, line, line, barrier])(
            logits, bias, valid
        )
        return out[0], out[1], out[2:]

    def first(logits, bias, valid, chosen, weights, ranks, histograms, member, barrier):
        block = lax.axis_index("block")
        choose_experts(call, logits, bias, valid, chosen, weights, member)
        together(barrier)
        rank_in_block(call, member, histograms, block * call.experts)
        together(barrier)

        def write(pair, expert, mine):
            token = lax.div(pair, call.top_k)
            inside = (token - block * call.config.block) * call.width + expert
            rank = call.read(member, select(mine, inside, 0))
            call.write(ranks, pair, select(call.read(valid, token), rank, -1), mine)

        each_pair(call, chosen, write)

    def second(chosen, ranks, histograms, *rest):
        *places, totals, befores, end, base, count, barrier = rest
        add_up_blocks(call, histograms, totals, befores, end, base, count, barrier, places)
        place_pairs(call, chosen, lambda pair, expert: call.read(ranks, pair), end, base, count, places)

    chosen, weights, ranks, histograms = _launch(
        call, first, [*picks, int32(pairs), int32(call.blocks * call.experts)], [member, barrier]
    )(logits, bias, valid)
    out = _launch(call, second, places, [parts, parts, line, line, line, barrier])(chosen, ranks, histograms)
    return chosen, weights, out


def _launch(
    call: Call, body: Callable[..., None], outputs: list[Any], scratch: list[Any]
) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        out_type=outputs,
        grid=(call.blocks,),
        grid_names=("block",),
        num_threads=call.config.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=call.interpret,
    )
