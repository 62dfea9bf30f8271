"""Layers whose memory of a sequence has a constant size: gated delta nets, Mamba-2 mixers, short convolutions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rimuru_jax.array_types import Hidden, Pool
from rimuru_jax.models.config import GatedDeltaNet, Mamba2, ShortConv
from rimuru_jax.models.context import LayerParams, StepContext
from rimuru_jax.models.layers import linear
from rimuru_jax.pallas.causal_conv1d import causal_conv1d
from rimuru_jax.pallas.gated_delta_rule import gated_delta_rule
from rimuru_jax.pallas.rms_norm import rms_norm
from rimuru_jax.pallas.selective_scan import selective_scan


@jax.named_scope("gated_delta_net")
def gated_delta_net(
    step: StepContext,
    layer: GatedDeltaNet,
    params: LayerParams,
    x: Hidden,
    pool: Pool,
    index: dict[str, Array],
) -> tuple[Hidden, Pool]:
    """Source: `Qwen3NextGatedDeltaNet` of transformers; Yang et al. 2024 (arXiv 2412.06464)."""
    tokens, heads = x.shape[0], layer.num_value_heads
    projected = linear(x, params["delta_in"])
    inner = heads * layer.value_dim
    channels = layer.channels
    qkv, z, b, a = jnp.split(projected, [channels, channels + inner, channels + inner + heads], axis=-1)
    qkv, pool = _conv(step, params, qkv, pool, index, activation="silu")
    keys = layer.num_key_heads * layer.key_dim
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    dt = jax.nn.softplus(a.astype(jnp.float32) + params["dt_bias"].astype(jnp.float32)[None])
    view, pages = step.state_pages("ssm", index["ssm"])
    out, pool = gated_delta_rule(
        q.reshape(tokens, layer.num_key_heads, layer.key_dim),
        k.reshape(tokens, layer.num_key_heads, layer.key_dim),
        v.reshape(tokens, heads, layer.value_dim),
        -jnp.exp(params["A_log"].astype(jnp.float32))[None] * dt,
        jax.nn.sigmoid(b.astype(jnp.float32)),
        pool,
        view,
        pages,
        step.batch.query_start,
        step.has_state,
        max_query_len=step.max_query_len,
    )
    # The norm's weight is a plain factor here, also in models whose other norms are zero-centred.
    normed = rms_norm(out, params["mixer_norm"], step.spec.config.rms_norm_eps)
    gate = jax.nn.silu(z.astype(jnp.float32)).reshape(normed.shape)
    gated = (normed.astype(jnp.float32) * gate).astype(x.dtype)
    return linear(gated.reshape(tokens, inner), params["mixer_output"]), pool


@jax.named_scope("mamba2")
def mamba2(
    step: StepContext, layer: Mamba2, params: LayerParams, x: Hidden, pool: Pool, index: dict[str, Array]
) -> tuple[Hidden, Pool]:
    """Source: `GraniteMoeHybridMambaLayer` and `NemotronHMamba2Mixer` of transformers; Dao and Gu 2024 (arXiv 2405.21060)."""
    tokens, inner, width = x.shape[0], layer.inner, layer.num_groups * layer.state_size
    z, xbc, dt = jnp.split(linear(x, params["mamba_in"]), [inner, inner + layer.channels], axis=-1)
    xbc, pool = _conv(step, params, xbc, pool, index, activation="silu")
    inputs, B, C = jnp.split(xbc, [inner, inner + width], axis=-1)
    groups = (tokens, layer.num_groups, layer.state_size)
    view, pages = step.state_pages("ssm", index["ssm"])
    # No limits on dt: transformers clamps it in prompts but not in decodes, other engines never do.
    out, pool = selective_scan(
        inputs.reshape(tokens, layer.num_heads, layer.head_dim),
        jax.nn.softplus(dt.astype(jnp.float32) + params["dt_bias"].astype(jnp.float32)[None]),
        -jnp.exp(params["A_log"].astype(jnp.float32)),
        B.reshape(groups),
        C.reshape(groups),
        params["D"],
        pool,
        view,
        pages,
        step.batch.query_start,
        step.has_state,
        max_query_len=step.max_query_len,
    )
    gated = out.reshape(tokens, inner).astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
    normed = _grouped_norm(gated, params["mixer_norm"], layer.norm_groups, step.spec.config.rms_norm_eps)
    return linear(normed.astype(x.dtype), params["mixer_output"]), pool


@jax.named_scope("short_conv")
def short_conv(
    step: StepContext, layer: ShortConv, params: LayerParams, x: Hidden, pool: Pool, index: dict[str, Array]
) -> tuple[Hidden, Pool]:
    """Source: `Lfm2MoeShortConv` of transformers."""
    before, behind, inputs = jnp.split(linear(x, params["conv_in"], params.get("conv_in_bias")), 3, axis=-1)
    mixed, pool = _conv(step, params, before * inputs, pool, index)
    return linear(behind * mixed, params["mixer_output"], params.get("mixer_output_bias")), pool


def _conv(
    step: StepContext,
    params: LayerParams,
    x: Float[Array, "T c"],
    pool: Pool,
    index: dict[str, Array],
    activation: str | None = None,
) -> tuple[Float[Array, "T c"], Pool]:
    view, pages = step.state_pages("conv", index["conv"])
    return causal_conv1d(
        x,
        params["conv"],
        params.get("conv_bias"),
        pool,
        view,
        pages,
        step.batch.query_start,
        step.has_state,
        max_query_len=step.max_query_len,
        activation=activation,
    )


def _grouped_norm(
    x: Float[Array, "T n"], weight: Float[Array, " n"], groups: int, eps: float
) -> Float[Array, "T n"]:
    """RMS norm of each of `groups` equal parts by itself, in float32."""
    parts = x.reshape(x.shape[0], groups, -1)
    normed = parts * jax.lax.rsqrt(jnp.mean(jnp.square(parts), axis=-1, keepdims=True) + eps)
    return normed.reshape(x.shape) * weight.astype(jnp.float32)[None]
