"""Paged attention in plain jnp: the specification, and the path on a CPU.

The step's tokens are cut into tiles of one sequence each; a loop over the tiles that exist runs an online softmax
over the pages that tile may see. Work follows the real lengths, and temporaries stay at one tile by a few pages.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Pool, Queries
from rimuru_jax.pallas.memory_view import MemoryView

NEGATIVE = -1e30  # below every real score; minus infinity would make exp(-inf - -inf) a NaN
TOKENS_PER_TURN = 128  # keys of one turn of the softmax loop


def paged_attention(
    queries: Queries,
    pool: Pool,
    view: MemoryView,
    page_table: Int32[Array, "S W"],
    query_start: Int32[Array, " S+1"],
    context_len: Int32[Array, " S"],
    *,
    scale: float,
    sliding_window: int | None,
    sinks: Float[Array, " H"] | None,
    tile: int,
) -> Queries:
    tokens, num_heads, head_dim = queries.shape
    _, kv_heads, page_tokens, _ = view.page_shape
    group = num_heads // kv_heads
    turn_pages = max(1, min(TOKENS_PER_TURN // page_tokens, page_table.shape[1]))
    turn = turn_pages * page_tokens
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % turn_pages)))

    query_len = query_start[1:] - query_start[:-1]
    tile_end = jnp.cumsum((query_len + (tile - 1)) // tile)
    # Rows past the last token let the last tile be sliced whole.
    padded = jnp.pad(queries, ((0, tile), (0, 0), (0, 0)))
    first_sum = jnp.zeros((kv_heads, group, tile), jnp.float32)
    first_max = jnp.full_like(first_sum, NEGATIVE)
    if sinks is not None:
        first_max = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, group, 1), first_max.shape)
        first_sum = jnp.ones_like(first_sum)

    def attend(i, outputs):
        row = jnp.searchsorted(tile_end, i, side="right").astype(jnp.int32)
        tile_in_row = i - jnp.where(row > 0, tile_end[row - 1], 0)
        start = query_start[row] + tile_in_row * tile
        # Position of the tile's first query: the row's queries are its last query_len tokens.
        first = context_len[row] - query_len[row] + tile_in_row * tile
        end = jnp.minimum(first + tile, context_len[row])
        positions = first + jnp.arange(tile, dtype=jnp.int32)
        q = lax.dynamic_slice(padded, (start, 0, 0), (tile, num_heads, head_dim)).astype(jnp.float32) * scale
        q = (
            q.reshape(tile, kv_heads, group, head_dim)
            .transpose(1, 2, 0, 3)
            .reshape(kv_heads, group * tile, head_dim)
        )
        pages = page_table[row]

        def turn_body(j, carry):
            best, total, mixed = carry
            ids = lax.dynamic_slice(pages, (j * turn_pages,), (turn_pages,))
            entries = view.read(pool, ids)  # [pages, 2, N, page_tokens, h]
            entries = (
                entries.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, turn, head_dim).astype(jnp.float32)
            )
            key_positions = j * turn + jnp.arange(turn, dtype=jnp.int32)
            # Select before multiplying: what lies beyond the context may be NaN.
            written = (key_positions < end)[None, :, None]
            keys, values = jnp.where(written, entries[0], 0.0), jnp.where(written, entries[1], 0.0)
            scores = jnp.einsum("nqh,nkh->nqk", q, keys).reshape(kv_heads, group, tile, turn)
            visible = key_positions[None, :] <= positions[:, None]
            if sliding_window is not None:
                visible &= key_positions[None, :] > positions[:, None] - sliding_window
            scores = jnp.where(visible, scores, NEGATIVE)
            new_best = jnp.maximum(best, jnp.max(scores, axis=-1))
            decay = jnp.exp(best - new_best)
            shares = jnp.where(visible, jnp.exp(scores - new_best[..., None]), 0.0)
            mix = jnp.einsum("nqk,nkh->nqh", shares.reshape(kv_heads, group * tile, turn), values)
            mixed = mixed * decay[..., None] + mix.reshape(kv_heads, group, tile, head_dim)
            return new_best, total * decay + jnp.sum(shares, axis=-1), mixed

        first_turn = jnp.int32(0)
        if sliding_window is not None:
            first_turn = jnp.maximum(first - (sliding_window - 1), 0) // turn
        last_turn = (end + (turn - 1)) // turn
        first_mix = jnp.zeros((kv_heads, group, tile, head_dim), jnp.float32)
        _, total, mixed = lax.fori_loop(first_turn, last_turn, turn_body, (first_max, first_sum, first_mix))
        # A query with nothing to see (a tile's filling rows) divides 0 by 1.
        out = mixed / jnp.where(total > 0, total, 1.0)[..., None]
        out = out.transpose(2, 0, 1, 3).reshape(tile, num_heads, head_dim)
        # Filling rows of one sequence's last tile are overwritten by the next sequence's tile.
        return lax.dynamic_update_slice(outputs, out.astype(queries.dtype), (start, 0, 0))

    outputs = lax.fori_loop(jnp.int32(0), tile_end[-1], attend, jnp.zeros_like(padded))
    return outputs[:tokens]
