"""First stage of routing on Hopper: a warp for each token finds the best expert, K times, over its lanes."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.moe_routing.mosaic_parts import (
    LANES,
    MINUS_INFINITY,
    ROWS,
    TAKEN,
    WARPS,
    Call,
    column_index,
    key_of,
    number_of,
    row_index,
    select,
    spread,
)


def choose_experts(call: Call, logits, bias, valid, chosen, weights, member):
    """Write the block's `chosen` and `weights`, and 1 for each (token, expert) of `member` that is a pair."""
    first = lax.axis_index("block") * call.config.block
    warpgroup = lax.axis_index("warpgroup")
    columns = pl.cdiv(call.experts, LANES) * LANES
    expert = column_index(columns)
    real = expert < call.experts
    step = call.config.warpgroups * WARPS
    lane = column_index(LANES)

    @pl.loop(0, pl.cdiv(call.config.block, step))
    def _four_tokens(turn):
        def local(n):
            return turn * step + warpgroup * WARPS + row_index(n)

        token = jnp.minimum(first + local(columns), call.tokens - 1)
        known = jnp.minimum(expert, call.experts - 1)
        x = call.read(logits, token * call.experts + known)
        is_valid = call.read(valid, token)
        x_key = select(real, key_of(x), TAKEN)
        largest = jnp.max(x_key, axis=1)
        total = None
        if call.scoring.function == "softmax":
            terms = select(real, jnp.exp(x - number_of(spread(largest, columns))), 0.0)
            total = jnp.sum(terms, axis=1)
        key = x_key
        if call.biased or call.scoring.top_groups < call.scoring.num_groups:
            score = _scores_of(call, x, largest, total, columns)
            if call.biased:
                score += call.read(bias, known)
            key = select(real, key_of(score), TAKEN)
        if call.scoring.top_groups < call.scoring.num_groups:
            key = _in_best_groups(call, key, expert)

        def pick(k, carry):
            key, experts_of_lanes, keys_of_lanes = carry
            best = jnp.max(key, axis=1)
            # The largest distance from the end belongs to the lowest of equally good experts.
            distance = jnp.max(select(key == spread(best, columns), columns - 1 - expert, -1), axis=1)
            here = columns - 1 - expert == spread(distance, columns)
            x_best = best
            if key is not x_key:
                x_best = jnp.max(select(here, x_key, TAKEN), axis=1)
            return (
                select(here, TAKEN, key),
                select(lane == k, columns - 1 - spread(distance, LANES), experts_of_lanes),
                select(lane == k, spread(x_best, LANES), keys_of_lanes),
            )

        nothing = jnp.zeros((WARPS, LANES), jnp.int32)
        nothing = plgpu.layout_cast(nothing, ROWS)
        key, picked, picked_key = lax.fori_loop(0, call.top_k, pick, (key, nothing, nothing))

        chooses = lane < call.top_k
        weight = _weights_of(call, picked_key, chooses, largest, total)
        here = local(LANES)
        token = first + here
        pair = token * call.top_k + lane
        mine = chooses & (here < call.config.block) & (token < call.tokens)
        call.write(chosen, pair, picked, mine)
        call.write(weights, pair, weight, mine)

        here = local(columns)
        counted = is_valid & (first + here < call.tokens) & (key == TAKEN)
        call.write(
            member,
            here * call.width + expert,
            select(counted, 1, 0),
            real & (here < call.config.block),
        )


def _scores_of(call: Call, x, largest, total, columns):
    if call.scoring.function == "softmax":
        return jnp.exp(x - number_of(spread(largest, columns))) / spread(total, columns)
    if call.scoring.function == "sigmoid":
        return 1.0 / (1.0 + jnp.exp(-x))
    return x


def _weights_of(call: Call, keys, chooses, largest, total):
    """Weights of the chosen experts, one in each of the first lanes."""
    x = number_of(keys)
    if call.scoring.function == "softmax_of_chosen":
        best = jnp.max(select(chooses, keys, TAKEN), axis=1)
        terms = jnp.exp(x - number_of(spread(best, LANES)))
        total = jnp.sum(select(chooses, terms, 0.0), axis=1)
        weight = terms / spread(total, LANES)
    else:
        weight = _scores_of(call, x, largest, total, LANES)
    if call.scoring.normalize:
        total = jnp.sum(select(chooses, weight, 0.0), axis=1)
        weight = weight / (spread(total, LANES) + call.scoring.normalize_epsilon)
    return weight * call.scoring.scale


def _in_best_groups(call: Call, key, expert):
    """`key` of experts in the best groups, that of minus infinity elsewhere."""
    groups, columns = call.scoring.num_groups, key.shape[1]
    size = call.experts // groups
    group = lax.div(expert, size)
    strengths = []
    for g in range(groups):
        inside = select(group == g, key, TAKEN)
        best = jnp.max(inside, axis=1)
        strength = number_of(best)
        if size > 1:
            is_best = inside == spread(best, columns)
            others = jnp.max(select(is_best, TAKEN, inside), axis=1)
            several = jnp.sum(select(is_best, 1, 0), axis=1) > 1
            strength += number_of(select(several, best, others))
        strengths.append(strength)
    kept = jnp.zeros(key.shape, jnp.bool_)
    for g in range(groups):
        better = sum(
            select(other >= strengths[g] if h < g else other > strengths[g], 1, 0)
            for h, other in enumerate(strengths)
            if h != g
        )
        is_kept = select(better < call.scoring.top_groups, 1, 0)
        kept = kept | ((group == g) & (spread(is_kept, columns) > 0))
    return select(kept | (expert >= call.experts), key, MINUS_INFINITY)
