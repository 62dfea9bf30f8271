"""Routing in plain jnp: the specification, and the path on a CPU."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from rimuru_jax.pallas.moe_routing.scoring import Scoring


def route(
    logits: Float[Array, "T E"],
    num_experts_per_tok: int,
    scoring: Scoring,
    selection_bias: Float[Array, " E"] | None,
) -> tuple[Int32[Array, "T K"], Float[Array, "T K"]]:
    logits = logits.astype(jnp.float32)
    if scoring.function == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    elif scoring.function == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = logits
    # Scoring keeps the order of the logits, but its rounding makes equals of what differs: without a bias they decide.
    biased = scores if selection_bias is not None or scoring.top_groups < scoring.num_groups else logits
    if selection_bias is not None:
        biased = scores + selection_bias.astype(jnp.float32)[None]
    if scoring.top_groups < scoring.num_groups:
        biased = _best_groups(biased, scoring.num_groups, scoring.top_groups)
    _, experts = lax.top_k(biased, num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if scoring.function == "softmax_of_chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if scoring.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + scoring.normalize_epsilon)
    return experts.astype(jnp.int32), weights * scoring.scale


def _best_groups(scores: Float[Array, "T E"], num_groups: int, top_groups: int) -> Float[Array, "T E"]:
    """Scores of experts in the best groups, -inf elsewhere. A group's score is the sum of its two best."""
    grouped = scores.reshape(scores.shape[0], num_groups, -1)
    best_two, _ = lax.top_k(grouped, min(2, grouped.shape[2]))
    _, groups = lax.top_k(jnp.sum(best_two, axis=-1), top_groups)
    kept = jnp.any(groups[:, :, None] == jnp.arange(num_groups)[None, None, :], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def group_tokens(
    experts: Int32[Array, "T K"], valid: Bool[Array, " T"], num_experts: int, tile: int, max_tiles: int
) -> tuple[
    Int32[Array, " tiles"], Int32[Array, " rows"], Int32[Array, "T K"], Int32[Array, ""], Int32[Array, " E"]
]:
    tokens, top_k = experts.shape
    pairs = jnp.where(valid[:, None], experts, num_experts).reshape(-1)  # padding sorts behind every expert
    order = jnp.argsort(pairs, stable=True).astype(jnp.int32)
    counts = jnp.zeros((num_experts + 1,), jnp.int32).at[pairs].add(1)[:num_experts]

    tiles = (counts + (tile - 1)) // tile
    tile_end = jnp.cumsum(tiles)
    first_tile, first_pair = tile_end - tiles, jnp.cumsum(counts) - counts
    tile_ids = jnp.arange(max_tiles, dtype=jnp.int32)
    # Comparing with all is one kernel on a GPU, a binary search is a loop of them.
    found = jnp.searchsorted(tile_end, tile_ids, side="right", method="compare_all")
    tile_experts = found.astype(jnp.int32)

    # Rank of each pair inside its expert, then its row in the padded, expert-sorted order.
    sorted_experts = pairs[order]
    ranks = jnp.arange(tokens * top_k, dtype=jnp.int32) - jnp.append(first_pair, 0)[sorted_experts]
    sorted_rows = jnp.append(first_tile, max_tiles)[sorted_experts] * tile + ranks
    rows = jnp.zeros((tokens * top_k,), jnp.int32).at[order].set(sorted_rows)
    row_tokens = (
        jnp.full((max_tiles * tile,), tokens, jnp.int32).at[sorted_rows].set(order // top_k, mode="drop")
    )
    return tile_experts, row_tokens, rows.reshape(tokens, top_k), tile_end[-1], counts
