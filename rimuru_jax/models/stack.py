"""The decoder stack: any sequence of `LayerSpec`s over packed tokens, with everything large read from pages.

Repeating runs of layers become one `lax.scan` each, so that compile time follows the pattern, not the depth. The page
pool is carried through all of them and written in place.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import ExpertTable, Hidden, HostPages, PageTable, Pool, RouterCounts, TokenIds
from rimuru_jax.host.page_layout import PageLayout
from rimuru_jax.models.config import Attention, Dense, LayerSpec, ModelConfig, Moe
from rimuru_jax.models.layers import linear, rms_norm, rotate, swiglu
from rimuru_jax.pallas.memory_view import WORD_BYTES, MemoryView
from rimuru_jax.pallas.moe_routing import group_tokens, route
from rimuru_jax.pallas.page_update import load_pages, write_kv
from rimuru_jax.pallas.paged_attention import paged_attention
from rimuru_jax.pallas.paged_moe import paged_moe
from rimuru_jax.pallas.paged_moe.api import token_tile

type LayerParams = Mapping[str, Array]
type StackParams = Mapping[str, Any]
"""{"embedding", "final_norm", "head"?, "segments": one tuple per segment of one stacked `LayerParams` per layer}."""


class Segment(NamedTuple):
    """`repeats` times the same run of layers."""

    pattern: tuple[LayerSpec, ...]
    repeats: int


def segments(layers: Sequence[LayerSpec]) -> tuple[Segment, ...]:
    """Cut the layers into repeating runs such that the fewest layers have to be compiled."""
    best: list[tuple[int, tuple[Segment, ...]]] = [(0, ())]
    for end in range(1, len(layers) + 1):
        options = []
        for start in range(end):
            count = end - start
            for period in range(1, count + 1):
                if count % period == 0 and all(
                    layers[i] == layers[i - period] for i in range(start + period, end)
                ):
                    segment = Segment(tuple(layers[start : start + period]), count // period)
                    options.append((best[start][0] + period, (*best[start][1], segment)))
                    break
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]


def stack_params(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` with its list "layers" replaced by "segments": layers of a segment stacked along a new first axis.

    Takes the arrays out of `params` as it goes, so that no second copy of the model is ever held.
    """
    layers = list(params["layers"])
    stacked, first = [], 0
    for pattern, repeats in segments(config.layers):
        period = len(pattern)
        group = []
        for j in range(period):
            members = [layers[first + j + r * period] for r in range(repeats)]
            group.append(
                {name: np.stack([member.pop(name) for member in members]) for name in list(members[0])}
            )
        stacked.append(tuple(group))
        first += period * repeats
    return {**{k: v for k, v in params.items() if k != "layers"}, "segments": tuple(stacked)}


@struct.dataclass
class ModelSpec:
    """Everything static about a model in a pool; hashable, so it can be a static argument of `jax.jit`."""

    config: ModelConfig = struct.field(pytree_node=False)
    expert_view: MemoryView = struct.field(pytree_node=False)
    kv_view: MemoryView = struct.field(pytree_node=False)
    """One layer's KV page `[2, N, page_tokens, h]`."""
    layers_per_kv_page: int = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)
    """Activations and stored weights."""

    @classmethod
    def create(cls, config: ModelConfig, layout: PageLayout, dtype: Any) -> "ModelSpec":
        dtype = jnp.dtype(dtype)
        moe, attention = config.moe, config.attention
        expert, kv = layout["expert"], layout["kv"]
        return cls(
            config=config,
            expert_view=MemoryView(
                kind="expert",
                page_shape=(moe.intermediate_size, config.hidden_size),
                dtype=dtype,
                stride=expert.stride_bytes // WORD_BYTES,
            ),
            kv_view=MemoryView(
                kind="kv",
                page_shape=(2, attention.num_kv_heads, kv.kind.page_tokens, attention.head_dim),
                dtype=dtype,
                stride=kv.stride_bytes // kv.layers_per_page // WORD_BYTES,
            ),
            layers_per_kv_page=kv.layers_per_page,
            dtype=dtype,
        )


@struct.dataclass
class Batch:
    """The tokens of one step: chunks of S sequences, packed. All int32, padded to a bucket."""

    token_ids: TokenIds
    positions: Int32[Array, " T"]
    """Position of each token in its sequence."""
    rows: Int32[Array, " T"]
    """Batch row of each token; S - 1 for padding."""
    slots: Int32[Array, " S"]
    """Row of each sequence in the page tables."""
    query_start: Int32[Array, " S+1"]
    """Row s owns tokens query_start[s] to query_start[s + 1]; the last entry counts the real tokens."""
    context_len: Int32[Array, " S"]
    """Tokens of a row once this step is done; 0 for padding rows."""
    logit_tokens: Int32[Array, " S"]
    """Token of each row whose logits are wanted: its last."""


@struct.dataclass
class ExpertTables:
    """Where the step finds expert weights, and which it copies into loading buffers on the way."""

    pages: ExpertTable
    """Pool page of each matrix, HOST (-1) if it is only in host memory. Loading buffers are overlaid."""
    load_sources: Int32[Array, "L+1 loads"]
    """Host pages to copy before layer l computes; the copies of layer l + 1 run beside layer l. Row L is empty."""
    load_targets: Int32[Array, "L+1 loads"]
    load_counts: Int32[Array, " L+1"]


class StackOutput(NamedTuple):
    pool: Pool
    hidden: Hidden
    """After the final norm."""
    router_counts: RouterCounts
    """Tokens that chose each expert of each MoE layer."""
    router_experts: Int32[Array, "L T K"]
    router_weights: Float[Array, "L T K"]


class _Environment(NamedTuple):
    """What every layer of a step sees."""

    spec: ModelSpec
    batch: Batch
    valid: Array
    kv_tables: PageTable
    experts: ExpertTables
    host_pages: HostPages
    decode: bool


def forward(
    spec: ModelSpec,
    params: StackParams,
    pool: Pool,
    host_pages: HostPages,
    kv_tables: PageTable,
    experts: ExpertTables,
    batch: Batch,
    *,
    decode: bool,
) -> StackOutput:
    """Run the packed tokens of `batch` through the stack, writing their keys and values into the pool.

    `decode` promises at most one token per row. Call it under `jax.jit` with the pool donated.
    """
    config = spec.config
    valid = jnp.arange(batch.token_ids.shape[0]) < batch.query_start[-1]
    env = _Environment(spec, batch, valid, kv_tables, experts, host_pages, decode)
    hidden = params["embedding"][batch.token_ids]
    pool = _load_experts(env, pool, jnp.int32(0))

    routed = []
    attention_index = moe_index = 0
    for (pattern, repeats), stacked in zip(segments(config.layers), params["segments"], strict=True):
        num_attention = sum(isinstance(layer.mixer, Attention) for layer in pattern)
        num_moe = sum(isinstance(layer.ffn, Moe) for layer in pattern)

        def run(carry, xs, pattern=pattern, num_attention=num_attention, num_moe=num_moe):
            hidden, pool, attention_index, moe_index = carry
            decisions = []
            for layer, layer_params in zip(pattern, xs, strict=True):
                normed = rms_norm(hidden, layer_params["input_norm"], config.rms_norm_eps)
                mixed, pool = _attention(env, layer.mixer, layer_params, normed, pool, attention_index)
                hidden = hidden + mixed
                attention_index += 1
                normed = rms_norm(hidden, layer_params["ffn_norm"], config.rms_norm_eps)
                if isinstance(layer.ffn, Dense):
                    hidden = hidden + swiglu(
                        normed, layer_params["dense_gate_up"], layer_params["dense_down"]
                    )
                else:
                    mixed, pool, decision = _moe(env, layer.ffn, layer_params, normed, pool, moe_index)
                    hidden = hidden + mixed
                    moe_index += 1
                    decisions.append(decision)
            stacked_decisions = jax.tree.map(lambda *x: jnp.stack(x), *decisions) if decisions else None
            return (hidden, pool, attention_index, moe_index), stacked_decisions

        carry = (hidden, pool, jnp.int32(attention_index), jnp.int32(moe_index))
        (hidden, pool, _, _), decisions = lax.scan(run, carry, stacked, length=repeats)
        if num_moe:
            routed.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), decisions))
        attention_index += num_attention * repeats
        moe_index += num_moe * repeats

    counts, chosen, weights = (jnp.concatenate(parts) for parts in zip(*routed, strict=True))
    hidden = rms_norm(hidden, params["final_norm"], config.rms_norm_eps)
    return StackOutput(pool, hidden, counts, chosen, weights)


def logits(spec: ModelSpec, params: StackParams, hidden: Float[Array, "n d"]) -> Float[Array, "n V"]:
    """Unnormalised scores of the next token, float32."""
    head = params["embedding"] if spec.config.tie_word_embeddings else params["head"]
    return linear(hidden, head).astype(jnp.float32)


@jax.named_scope("attention")
def _attention(
    env: _Environment, layer: Attention, params: LayerParams, x: Hidden, pool: Pool, index: Array
) -> tuple[Hidden, Pool]:
    spec, batch = env.spec, env.batch
    tokens = x.shape[0]
    q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    qkv = linear(x, params["qkv"], params.get("qkv_bias"))
    if layer.clip_qkv is not None:
        qkv = jnp.clip(qkv, -layer.clip_qkv, layer.clip_qkv)
    q, k, v = jnp.split(qkv, [q_size, q_size + kv_size], axis=-1)
    if layer.qk_norm == "full":
        q = rms_norm(q, params["q_norm"], spec.config.rms_norm_eps)
        k = rms_norm(k, params["k_norm"], spec.config.rms_norm_eps)
    q = q.reshape(tokens, layer.num_heads, layer.head_dim)
    k, v = (y.reshape(tokens, layer.num_kv_heads, layer.head_dim) for y in (k, v))
    if layer.qk_norm == "head":
        q = rms_norm(q, params["q_norm"], spec.config.rms_norm_eps)
        k = rms_norm(k, params["k_norm"], spec.config.rms_norm_eps)
    if layer.rotary is not None:
        q, k = rotate(q, batch.positions, layer.rotary), rotate(k, batch.positions, layer.rotary)

    # A table entry names a run of `layers_per_kv_page` one-layer pages.
    per_page = spec.layers_per_kv_page
    page_table = env.kv_tables[index // per_page][batch.slots] * per_page + index % per_page
    page_tokens = spec.kv_view.page_shape[2]
    pages = jnp.where(env.valid, page_table[batch.rows, batch.positions // page_tokens], 0)
    pool = write_kv(pool, spec.kv_view, k, v, pages, batch.positions % page_tokens)
    mixed = paged_attention(
        q,
        pool,
        spec.kv_view,
        page_table,
        batch.query_start,
        batch.context_len,
        scale=layer.scale,
        max_query_len=1 if env.decode else tokens,
        sliding_window=layer.sliding_window,
        sinks=params.get("sinks"),
    )
    return linear(
        mixed.reshape(tokens, q_size), params["attention_output"], params.get("attention_output_bias")
    ), pool


@jax.named_scope("moe")
def _moe(
    env: _Environment, layer: Moe, params: LayerParams, x: Hidden, pool: Pool, index: Array
) -> tuple[Hidden, Pool, tuple[Array, Array, Array]]:
    chosen, weights = route(linear(x, params["router"]), layer.num_experts_per_tok, normalize=layer.normalize)
    pairs = x.shape[0] * layer.num_experts_per_tok
    routing = group_tokens(chosen, env.valid, layer.num_experts, tile=token_tile(pairs, layer.num_experts))
    # The smaller of the number of tiles and 0 is 0, which XLA does not know: the loads wait for the router, thus for
    # the attention that reads the pool. With no such order XLA copies the whole pool for the reader.
    pool = _load_experts(env, pool, index + 1 + jnp.minimum(routing.num_tiles, 0))
    mixed = paged_moe(
        x,
        weights,
        routing,
        pool,
        env.spec.expert_view,
        env.host_pages,
        env.experts.pages[index],
        index * (layer.num_experts * layer.matrices),
    )
    if layer.shared_intermediate_size:
        shared = swiglu(x, params["shared_gate_up"], params["shared_down"])
        gate = jax.nn.sigmoid(linear(x, params["shared_expert_gate"]).astype(jnp.float32))
        mixed = mixed + (shared.astype(jnp.float32) * gate).astype(x.dtype)
    return mixed, pool, (routing.counts, chosen, weights)


def _load_experts(env: _Environment, pool: Pool, layer: Array) -> Pool:
    """Fill the loading buffers of one MoE layer."""
    tables = env.experts
    return load_pages(
        pool,
        env.host_pages,
        tables.load_sources[layer],
        tables.load_targets[layer],
        tables.load_counts[layer],
    )
