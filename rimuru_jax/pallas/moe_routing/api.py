"""Routing: checks and choice of implementation."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int32

from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.moe_routing import mosaic_gpu, reference
from rimuru_jax.pallas.moe_routing.scoring import Scoring

AVAILABLE = ("reference", "mosaic_gpu")


class Routing(NamedTuple):
    """The (token, expert) pairs of a step sorted by expert and cut into tiles of one expert each."""

    tile_experts: Int32[Array, " tiles"]
    """Expert of each tile; tiles past `num_tiles` are meaningless."""
    row_tokens: Int32[Array, " rows"]
    """Token whose hidden state stands in each of the tiles * tile rows; T in rows that only fill a tile."""
    pair_rows: Int32[Array, "T K"]
    """Row of each (token, choice) pair; at or past the end for padding tokens."""
    num_tiles: Int32[Array, ""]
    counts: Int32[Array, " E"]
    """Valid tokens that chose each expert."""


def route_and_group(
    logits: Float[Array, "T E"],
    valid: Bool[Array, " T"],
    num_experts_per_tok: int,
    scoring: Scoring,
    *,
    tile: int,
    selection_bias: Float[Array, " E"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Int32[Array, "T K"], Float[Array, "T K"], Routing]:
    """`route`, then `group_tokens` of what was chosen: the one operator that a kernel does, in one or two launches.

    The arguments are those of the two. Experts whose scores differ by a rounding error may be chosen in another order
    than by the reference; without a bias and groups the logits decide, and the choice is the same.
    """
    experts = logits.shape[1]
    scoring.check(experts, num_experts_per_tok)
    refusal = mosaic_gpu.refusal(experts, scoring.num_groups, num_experts_per_tok)
    if resolve("moe_routing", implementation, AVAILABLE, refusal=refusal) == "mosaic_gpu":
        max_tiles = most_tiles(valid.shape[0] * num_experts_per_tok, experts, tile)
        chosen, weights, routing = mosaic_gpu.route_and_group(
            logits, valid, selection_bias, num_experts_per_tok, tile, max_tiles, scoring
        )
        return chosen, weights, Routing(*routing)
    chosen, weights = reference.route(logits, num_experts_per_tok, scoring, selection_bias)
    return chosen, weights, group_tokens(chosen, valid, experts, tile=tile)


def route(
    logits: Float[Array, "T E"],
    num_experts_per_tok: int,
    scoring: Scoring,
    *,
    selection_bias: Float[Array, " E"] | None = None,
) -> tuple[Int32[Array, "T K"], Float[Array, "T K"]]:
    """The K best experts of each token, ties to the lower expert, and their mixing weights, in float32, in plain jnp.

    `selection_bias` is added to the scores when experts are chosen; weights come from the scores without it.
    """
    scoring.check(logits.shape[1], num_experts_per_tok)
    return reference.route(logits, num_experts_per_tok, scoring, selection_bias)


def group_tokens(
    experts: Int32[Array, "T K"], valid: Bool[Array, " T"], num_experts: int, *, tile: int
) -> Routing:
    """Sort the pairs of valid tokens by expert and pad each expert's share to whole tiles of `tile` rows."""
    max_tiles = most_tiles(experts.shape[0] * experts.shape[1], num_experts, tile)
    return Routing(*reference.group_tokens(experts, valid, num_experts, tile, max_tiles))


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """Tiles of the worst case: as many experts as can be have one pair more than fills their tiles."""
    touched = min(experts, pairs)
    return touched + (pairs - touched) // tile
