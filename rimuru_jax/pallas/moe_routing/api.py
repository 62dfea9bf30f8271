"""Routing: checks and choice of implementation."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int32

from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.moe_routing import reference


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


def route(
    logits: Float[Array, "T E"],
    num_experts_per_tok: int,
    *,
    normalize: bool,
    implementation: Implementation | None = None,
) -> tuple[Int32[Array, "T K"], Float[Array, "T K"]]:
    """Softmax over all experts in float32, then the K most probable; ties go to the lower expert.

    Returns experts and mixing weights, float32, divided by their sum if `normalize`.
    """
    resolve("moe_routing", implementation, ("reference",))
    if not 1 <= num_experts_per_tok <= logits.shape[1]:
        raise ValueError(f"{num_experts_per_tok} experts per token asked of {logits.shape[1]} experts")
    return reference.route(logits, num_experts_per_tok, normalize)


def group_tokens(
    experts: Int32[Array, "T K"],
    valid: Bool[Array, " T"],
    num_experts: int,
    *,
    tile: int,
    implementation: Implementation | None = None,
) -> Routing:
    """Sort the pairs of valid tokens by expert and pad each expert's share to whole tiles of `tile` rows."""
    resolve("moe_routing", implementation, ("reference",))
    pairs = experts.shape[0] * experts.shape[1]
    # The worst case: as many experts as can be have one pair more than fills their tiles.
    touched = min(num_experts, pairs)
    max_tiles = touched + (pairs - touched) // tile
    return Routing(*reference.group_tokens(experts, valid, num_experts, tile, max_tiles))
