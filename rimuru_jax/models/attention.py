"""Attention layers: grouped queries over paged keys and values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rimuru_jax.array_types import Hidden, Pool
from rimuru_jax.models.config import Attention
from rimuru_jax.models.context import LayerParams, StepContext
from rimuru_jax.models.layers import linear, norm, rotate
from rimuru_jax.pallas.page_update import write_kv
from rimuru_jax.pallas.paged_attention import paged_attention


@jax.named_scope("attention")
def attention(
    step: StepContext, layer: Attention, params: LayerParams, x: Hidden, pool: Pool, index: dict[str, Array]
) -> tuple[Hidden, Pool]:
    """Write the tokens' keys and values, then attend to all of each row's."""
    batch, config = step.batch, step.spec.config
    tokens, heads, kv_heads, h = x.shape[0], layer.num_heads, layer.num_kv_heads, layer.head_dim
    qkv = linear(x, params["qkv"], params.get("qkv_bias"))
    if layer.clip_qkv is not None:
        qkv = jnp.clip(qkv, -layer.clip_qkv, layer.clip_qkv)
    q, k, v = jnp.split(qkv, [qkv.shape[1] - 2 * kv_heads * h, qkv.shape[1] - kv_heads * h], axis=-1)
    gate = None
    if layer.output_gate:
        q, gate = jnp.split(q.reshape(tokens, heads, 2 * h), 2, axis=-1)
    if layer.qk_norm == "full":
        q, k = norm(q, params["q_norm"], config), norm(k, params["k_norm"], config)
    q, k, v = q.reshape(tokens, heads, h), k.reshape(tokens, kv_heads, h), v.reshape(tokens, kv_heads, h)
    if layer.qk_norm == "head":
        q, k = norm(q, params["q_norm"], config), norm(k, params["k_norm"], config)
    if layer.rotary is not None:
        q, k = rotate(q, batch.positions, layer.rotary), rotate(k, batch.positions, layer.rotary)

    view, page_table = step.page_table("kv", index["kv"])
    page_tokens = view.page_shape[2]
    pages = jnp.where(step.valid, page_table[batch.rows, batch.positions // page_tokens], 0)
    pool = write_kv(pool, view, k, v, pages, batch.positions % page_tokens)
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
