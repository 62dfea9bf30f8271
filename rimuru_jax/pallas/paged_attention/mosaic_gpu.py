"""Paged attention on Hopper in Mosaic GPU kernels: decode rows and prefill rows of one call each get theirs.

`mosaic_decode` cuts long contexts into pieces and joins them in a second pass; `mosaic_prefill` serves rows of several
queries. Both plan their work from the row lengths at run time, so a call costs what its rows need.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Pool, Queries
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.paged_attention import mosaic_decode, mosaic_prefill
from rimuru_jax.pallas.paged_attention.mosaic_decode import DecodeConfig
from rimuru_jax.pallas.paged_attention.mosaic_packing import UNIT_ROWS, Packing
from rimuru_jax.pallas.paged_attention.mosaic_prefill import PrefillConfig

H200_MULTIPROCESSORS = 132


def refusal(queries: Queries, view: MemoryView, *, scale: float) -> str | None:
    """Why these operands have no kernel, or None."""
    _, kv_heads, page_tokens, head_dim = view.page_shape
    if queries.dtype != jnp.bfloat16 or view.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, but queries are {queries.dtype} and pages {view.dtype}"
    if not 64 <= head_dim <= 256 or head_dim % 32:
        return f"head_dim is {head_dim}, but must be a multiple of 32 from 64 to 256"
    if queries.shape[1] // kv_heads > UNIT_ROWS[-1]:
        return f"{queries.shape[1]} query heads share {kv_heads} key/value heads, but at most {UNIT_ROWS[-1]} may share one"
    if page_tokens % 8 or view.stride % (8 * head_dim):
        return (
            f"pages hold {page_tokens} tokens and lie {view.stride / head_dim:g} rows apart, "
            "but both must be multiples of 8"
        )
    if scale <= 0:
        return f"scale is {scale}, but must be positive"
    return None


def paged_attention(
    queries: Queries,
    pool: Pool,
    view: MemoryView,
    page_table: Int32[Array, "S W"],
    query_start: Int32[Array, " S+1"],
    context_len: Int32[Array, " S"],
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    decode: DecodeConfig | None = None,
    prefill: PrefillConfig | None = None,
    interpret: Any = None,
) -> Queries:
    """The kernels behind `api.paged_attention`, for operands without a `refusal`.

    Args:
        decode, prefill: sizes of the kernels' tiles; chosen from the shapes by default.
        interpret: an `InterpretGPUParams` runs the kernels on a CPU, slowly.
    """
    tokens, num_heads, head_dim = queries.shape
    _, kv_heads, page_tokens, _ = view.page_shape
    group = num_heads // kv_heads
    packing = Packing.choose(group, max_query_len)
    if decode is None:
        decode = DecodeConfig.choose(head_dim, kv_heads, packing.rows, _multiprocessors())
    if prefill is None:
        prefill = PrefillConfig.choose(head_dim)

    unit_start = packing.starts(query_start)
    q = packing.pack(queries.reshape(tokens, kv_heads, group, head_dim), query_start, unit_start)
    if sinks is not None:
        sinks = jnp.pad(
            sinks.astype(jnp.float32).reshape(kv_heads, group), ((0, 0), (0, packing.heads - group))
        )
        sinks = jnp.tile(sinks, (1, packing.tokens))
    kv = view.typed(pool)
    kv = kv.reshape(kv.shape[0], -1, head_dim)

    options = {
        "page_tokens": page_tokens,
        "scale": scale,
        "window": sliding_window,
        "interpret": interpret,
    }
    items, rows = mosaic_decode.plan(context_len, query_start, unit_start[:-1], decode, sliding_window)
    partial, lse = mosaic_decode.attend_items(q, kv, page_table, items, config=decode, **options)
    if max_query_len == 1:
        out = q  # tokens of no row give their queries, which are finite, at no cost
    else:
        tiles = mosaic_prefill.plan(context_len, query_start, unit_start, tokens, packing)
        out = mosaic_prefill.attend_tiles(
            q, kv, page_table, tiles, sinks, packing=packing, config=prefill, **options
        )
    ref = jax.new_ref(out)
    mosaic_decode.merge_items(ref, partial, lse, rows, sinks, interpret=interpret)
    return packing.unpack(jax.freeze(ref), query_start, unit_start, tokens, group).reshape(queries.shape)


def _multiprocessors() -> int:
    """Of the default device; without a GPU (compiling ahead of time, interpreting) those of an H200."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else H200_MULTIPROCESSORS
