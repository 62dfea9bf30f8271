"""Attention layers: grouped queries over paged keys and values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rimuru_jax.array_types import Hidden, Pool
from rimuru_jax.models.config import Attention
from rimuru_jax.models.context import LayerParams, StepContext
from rimuru_jax.models.layers import linear, norm
from rimuru_jax.pallas.paged_attention import paged_attention
from rimuru_jax.pallas.qk_norm_rope_cache import HeadNorm, qk_norm_rope_cache


@jax.named_scope("attention")
def attention(
    step: StepContext, layer: Attention, params: LayerParams, x: Hidden, pool: Pool, index: dict[str, Array]
) -> tuple[Hidden, Pool]:
    """Write the tokens' keys and values, then attend to all of each row's."""
    batch, config = step.batch, step.spec.config
    tokens, heads, kv_heads, h = x.shape[0], layer.num_heads, layer.num_kv_heads, layer.head_dim
    # In float32, as the product writes it on a GPU: a conversion would be a launch of its own.
    qkv = linear(x, params["qkv"], params.get("qkv_bias"), dtype=jnp.float32)
    if layer.clip_qkv is not None:
        qkv = jnp.clip(qkv, -layer.clip_qkv, layer.clip_qkv)
    gate = head_norm = None
    if layer.output_gate:
        gate = qkv[:, : 2 * heads * h].reshape(tokens, heads, 2, h)[:, :, 1].astype(x.dtype)
    if layer.qk_norm == "full":
        q, k, v = jnp.split(qkv.astype(x.dtype), [heads * h, (heads + kv_heads) * h], axis=-1)
        q_weight, k_weight = jnp.split(params["qk_norm"], [heads * h])
        q, k = norm(q, q_weight, config), norm(k, k_weight, config)
        qkv = jnp.concatenate([q, k, v], axis=-1)
    elif layer.qk_norm == "head":
        head_norm = HeadNorm(params["qk_norm"], config.rms_norm_eps, config.norm)

    view, page_table = step.page_table("kv", index["kv"])
    q, pool = qk_norm_rope_cache(
        qkv,
        pool,
        view,
        page_table,
        batch.rows,
        batch.positions,
        batch.query_start,
        num_heads=heads,
        head_norm=head_norm,
        rotation=None if layer.rotary is None else step.rotations[layer.rotary, h],
    )
    mixed = paged_attention(
        q,
        pool,
        view,
        page_table,
        batch.query_start,
        batch.context_len,
        scale=layer.scale,
        max_query_len=step.max_query_len,
        sliding_window=layer.sliding_window,
        sinks=params.get("sinks"),
    )
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    mixed = mixed.reshape(tokens, heads * h)
    return linear(mixed, params["attention_output"], params.get("attention_output_bias")), pool
