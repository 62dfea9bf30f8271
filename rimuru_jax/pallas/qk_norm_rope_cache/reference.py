"""Norm, rotation and the writing of keys and values in plain jnp: the specification, and the path on a CPU."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from rimuru_jax.array_types import Keys, Pool, Queries
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.qk_norm_rope_cache.head_norm import HeadNorm
from rimuru_jax.pallas.rms_norm import rms_norm


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
) -> tuple[Queries, Pool]:
    _, kv_heads, page_tokens, h = view.page_shape
    tokens = qkv.shape[0]
    qkv = qkv.astype(view.dtype)
    q, k, v = jnp.split(qkv, [qkv.shape[1] - 2 * kv_heads * h, qkv.shape[1] - kv_heads * h], axis=-1)
    q = q.reshape(tokens, num_heads, -1)[:, :, :h]
    k, v = k.reshape(tokens, kv_heads, h), v.reshape(tokens, kv_heads, h)
    if head_norm is not None:
        weights, eps, style = head_norm
        q, k = rms_norm(q, weights[:h], eps, style), rms_norm(k, weights[h:], eps, style)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)

    is_token = jnp.arange(tokens, dtype=jnp.int32) < query_start[-1]
    pages = jnp.where(is_token, page_table[rows, positions // page_tokens], 0)
    # Page [K or V, head, token, dim]: one token's entry is 2 * heads rows, page_tokens apart.
    row_in_page = jnp.arange(2 * kv_heads, dtype=jnp.int32) * page_tokens
    first = pages * (2 * kv_heads * page_tokens) + positions % page_tokens
    entries = jnp.concatenate([k, v], axis=1)  # [T, 2N, h]
    places = first[:, None] + row_in_page[None, :]
    return q, view.rows(3).write(pool, places.reshape(-1), entries.reshape(-1, h))


def rotate(x: Keys, cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]) -> Keys:
    """Rotary embedding of queries or keys `[T, heads, h]`, computed in float32; dimensions from `2 half` on stay.

    Source: Su et al. 2021, in the half-rotation layout of Hugging Face checkpoints: dimension i of the rotated part
    turns with dimension i + half.
    """
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype)
