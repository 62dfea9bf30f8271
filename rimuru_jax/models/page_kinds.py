"""The pages a model needs, from its config.json alone: enough to plan a pool, also for hybrids not served yet.

Architectures that are served go through `ModelConfig`. For the others one small function per `model_type` reads the
fields of the published file. Shapes of states: the gated delta net keeps [value heads, key dim, value dim] per layer
and sequence, Mamba2 [heads, head dim, state size]; both keep the last kernel - 1 inputs of a causal convolution.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rimuru_jax.host.page_layout import PageKind
from rimuru_jax.models.config import ConfigReader, ModelConfig
from rimuru_jax.models.registry import ARCHITECTURES, parse_config, tensor_names
from rimuru_jax.models.weights import resident_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes per element of what lies in the pool."""

    weight: int = 2
    kv: int = 2
    ssm: int = 4
    """Of recurrent states, kept in float32 unless asked otherwise."""
    conv: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PageModel:
    """What a page pool must know about a model."""

    model_type: str
    served: bool
    """Whether rimuru_jax can run the model, not only plan it."""
    num_experts: int
    """Routed experts per layer."""
    num_experts_per_tok: int
    matrices: int
    """Pages of one expert: 3 (gate, up, down) or 2 (up, down)."""
    max_position_embeddings: int
    resident_parameters: int
    """Weights outside the pool: all but the routed experts."""
    page_kinds: Callable[[ElementBytes, int], tuple[PageKind, ...]]
    """The kinds of pages for these element sizes and that many tokens per KV page."""


def page_model(raw: Mapping[str, Any]) -> PageModel:
    """Read the contents of a config.json. Raises ValueError, in one sentence, for what cannot be planned."""
    model_type = str(raw.get("model_type"))
    if model_type in ARCHITECTURES:
        return _served(parse_config(raw))
    if model_type not in _HYBRIDS:
        raise ValueError(
            f"model_type {model_type!r} in config.json cannot be planned; "
            f"known are {', '.join(sorted({*ARCHITECTURES, *_HYBRIDS}))}"
        )
    # Models that also see images keep the language model's fields in a part of their own.
    hybrid = _HYBRIDS[model_type](ConfigReader({**raw, **(raw.get("text_config") or {})}))
    if not hybrid.attention_layers or not hybrid.recurrent_layers:
        raise ValueError(f"this {model_type} model is no hybrid of attention and recurrent layers")
    return PageModel(
        model_type=model_type,
        served=False,
        num_experts=hybrid.num_experts,
        num_experts_per_tok=hybrid.num_experts_per_tok,
        matrices=hybrid.matrices,
        max_position_embeddings=hybrid.max_position_embeddings,
        resident_parameters=hybrid.resident_parameters,
        page_kinds=functools.partial(_hybrid_kinds, hybrid),
    )


def _served(config: ModelConfig) -> PageModel:
    sources = resident_sources(config, tensor_names(config.model_type)).values()
    return PageModel(
        model_type=config.model_type,
        served=True,
        num_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.num_experts_per_tok,
        matrices=config.moe.matrices,
        max_position_embeddings=config.max_position_embeddings,
        resident_parameters=sum(math.prod(source.shape) for source in sources),
        page_kinds=lambda size, tokens: config.page_kinds(
            weight_bytes=size.weight, kv_bytes=size.kv, page_tokens=tokens
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hybrid:
    """Shapes of a model with attention, recurrent and routed layers."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    expert_width: int
    matrices: int
    moe_layers: int
    attention_layers: int
    num_kv_heads: int
    head_dim: int
    recurrent_layers: int
    state: tuple[int, int, int]
    """Of one layer and sequence; the last axis is a row."""
    conv_channels: int
    conv_kernel: int
    max_position_embeddings: int
    resident_parameters: int


def _hybrid_kinds(model: _Hybrid, size: ElementBytes, page_tokens: int) -> tuple[PageKind, ...]:
    f, d = model.expert_width, model.hidden_size
    kv_row, conv_row = model.head_dim * size.kv, model.conv_channels * size.conv
    return (
        PageKind(
            name="expert",
            level=2,
            page_bytes=f * d * size.weight,
            row_bytes=math.gcd(f, d) * size.weight,
            layers=model.moe_layers,
        ),
        PageKind(
            name="ssm",
            level=2,
            page_bytes=math.prod(model.state) * size.ssm,
            row_bytes=model.state[-1] * size.ssm,
            layers=model.recurrent_layers,
        ),
        PageKind(
            name="kv",
            level=3,
            page_bytes=2 * model.num_kv_heads * page_tokens * kv_row,
            row_bytes=kv_row,
            layers=model.attention_layers,
            page_tokens=page_tokens,
            groupable=True,
        ),
        PageKind(
            name="conv",
            level=3,
            page_bytes=conv_row,
            row_bytes=conv_row,
            layers=model.recurrent_layers,
            run=model.conv_kernel - 1,
        ),
    )


def _qwen_hybrid(reader: ConfigReader) -> _Hybrid:
    """Qwen3-Next and Qwen3.5-MoE: gated delta nets and gated attention, a shared expert in every layer."""
    integer = reader.integer
    d, vocab = integer("hidden_size"), integer("vocab_size")
    num_layers = integer("num_hidden_layers")
    if reader.get("mlp_only_layers") or reader.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"config.json: dense layers of a {reader.model_type} model cannot be planned")
    interval = integer("full_attention_interval", default=4)
    kinds = reader.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)
    ]
    attention_layers = _count(kinds, num_layers, "full_attention", others=("linear_attention",))
    heads, kv_heads, head_dim = _attention_shape(reader)
    key_heads, value_heads = integer("linear_num_key_heads"), integer("linear_num_value_heads")
    dk, dv = integer("linear_key_head_dim"), integer("linear_value_head_dim")
    kernel = integer("linear_conv_kernel_dim", default=4)
    keys, values = key_heads * dk, value_heads * dv
    experts, shared = integer("num_experts"), integer("shared_expert_intermediate_size")

    # The query projection also gives a gate of the same width; delta nets have z, beta and alpha beside q, k and v.
    attention = 3 * heads * head_dim * d + 2 * kv_heads * head_dim * d + 2 * head_dim
    delta_net = (2 * keys + 2 * values + 2 * value_heads) * d + values * d
    delta_net += (2 * keys + values) * kernel + 2 * value_heads + dv
    everywhere = 2 * d + experts * d + 3 * shared * d + d
    return _Hybrid(
        hidden_size=d,
        num_experts=experts,
        num_experts_per_tok=integer("num_experts_per_tok"),
        expert_width=integer("moe_intermediate_size"),
        matrices=3,
        moe_layers=num_layers,
        attention_layers=attention_layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        recurrent_layers=num_layers - attention_layers,
        state=(value_heads, dk, dv),
        conv_channels=2 * keys + values,
        conv_kernel=kernel,
        max_position_embeddings=integer("max_position_embeddings"),
        resident_parameters=_embeddings(reader, vocab, d)
        + attention_layers * attention
        + (num_layers - attention_layers) * delta_net
        + num_layers * everywhere,
    )


def _granite(reader: ConfigReader) -> _Hybrid:
    """Granite 4.0 H: Mamba2 and attention without positions, a shared MLP in every layer."""
    integer = reader.integer
    d, num_layers = integer("hidden_size"), integer("num_hidden_layers")
    words = {"attention": "full_attention", "mamba": "linear_attention"}
    kinds = [words.get(kind, kind) for kind in reader.get("layer_types", ())]
    attention_layers = _count(kinds, num_layers, "full_attention", others=("linear_attention",))
    heads, kv_heads, head_dim = _attention_shape(reader)
    mamba = _Mamba2(
        heads=integer("mamba_n_heads"),
        head_dim=integer("mamba_d_head"),
        state_size=integer("mamba_d_state"),
        groups=integer("mamba_n_groups", default=1),
        kernel=integer("mamba_d_conv", default=4),
    )
    if not reader.get("num_local_experts"):
        raise _no_experts(reader)
    experts, shared = integer("num_local_experts"), integer("shared_intermediate_size")
    everywhere = 2 * d + experts * d + 3 * shared * d
    return _Hybrid(
        hidden_size=d,
        num_experts=experts,
        num_experts_per_tok=integer("num_experts_per_tok", default=1)
        if not experts
        else integer("num_experts_per_tok"),
        expert_width=integer("intermediate_size"),
        matrices=3,
        moe_layers=num_layers,
        attention_layers=attention_layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        recurrent_layers=num_layers - attention_layers,
        state=mamba.state,
        conv_channels=mamba.channels,
        conv_kernel=mamba.kernel,
        max_position_embeddings=integer("max_position_embeddings"),
        resident_parameters=_embeddings(reader, integer("vocab_size"), d)
        + attention_layers * 2 * (heads + kv_heads) * head_dim * d
        + (num_layers - attention_layers) * mamba.parameters(d)
        + num_layers * everywhere,
    )


def _nemotron(reader: ConfigReader) -> _Hybrid:
    """Nemotron-H: one mixer per block, M (Mamba2), * (attention), E (experts of two matrices) or - (MLP)."""
    integer = reader.integer
    d, num_layers = integer("hidden_size"), integer("num_hidden_layers")
    letters = {"mamba": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}
    pattern = reader.get("hybrid_override_pattern") or [
        letters.get(kind, kind) for kind in reader.get("layers_block_type", ())
    ]
    blocks = {kind: _count(pattern, num_layers, kind, others=("M", "*", "E", "-")) for kind in "M*E-"}
    if not blocks["E"]:
        raise _no_experts(reader)
    if reader.get("moe_latent_size"):
        raise ValueError(
            "config.json: nemotron_h experts in a latent space (moe_latent_size) cannot be planned"
        )
    heads, kv_heads, head_dim = _attention_shape(reader)
    mamba = _Mamba2(
        heads=integer("mamba_num_heads"),
        head_dim=integer("mamba_head_dim"),
        state_size=integer("ssm_state_size"),
        groups=integer("n_groups"),
        kernel=integer("conv_kernel", default=4),
    )
    experts, shared = integer("n_routed_experts"), integer("moe_shared_expert_intermediate_size")
    dense = integer("intermediate_size") if blocks["-"] else 0
    return _Hybrid(
        hidden_size=d,
        num_experts=experts,
        num_experts_per_tok=integer("num_experts_per_tok"),
        expert_width=integer("moe_intermediate_size"),
        matrices=2,
        moe_layers=blocks["E"],
        attention_layers=blocks["*"],
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        recurrent_layers=blocks["M"],
        state=mamba.state,
        conv_channels=mamba.channels,
        conv_kernel=mamba.kernel,
        max_position_embeddings=integer("max_position_embeddings"),
        resident_parameters=_embeddings(reader, integer("vocab_size"), d)
        + num_layers * d
        + blocks["*"] * 2 * (heads + kv_heads) * head_dim * d
        + blocks["M"] * mamba.parameters(d)
        + blocks["E"] * (experts * d + experts + 2 * shared * d)
        + blocks["-"] * 2 * dense * d,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mamba2:
    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_size

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    def parameters(self, hidden_size: int) -> int:
        """Weights of one mixer: both projections, convolution with bias, A, D and dt of each head, the norm."""
        projected = self.inner + self.channels + self.heads
        return (
            (projected + self.inner) * hidden_size
            + self.channels * (self.kernel + 1)
            + 3 * self.heads
            + self.inner
        )


def _no_experts(reader: ConfigReader) -> ValueError:
    return ValueError(
        f"this {reader.model_type} model has no routed experts, so there is no page pool to plan"
    )


def _attention_shape(reader: ConfigReader) -> tuple[int, int, int]:
    """Query heads, key and value heads, head dimension."""
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", default=heads)
    return heads, kv_heads, reader.integer("head_dim", default=reader.integer("hidden_size") // heads)


def _embeddings(reader: ConfigReader, vocab_size: int, hidden_size: int) -> int:
    """Parameters of the embedding, the head unless tied, and the last norm."""
    return vocab_size * hidden_size * (1 if reader.get("tie_word_embeddings", False) else 2) + hidden_size


def _count(kinds: Any, num_layers: int, wanted: str, *, others: tuple[str, ...]) -> int:
    """How many layers are of the wanted kind, once every layer is known to be of some kind."""
    unknown = sorted({kind for kind in kinds if kind != wanted and kind not in others})
    if unknown:
        raise ValueError(f"config.json: layers of kind {', '.join(map(repr, unknown))} cannot be planned")
    if len(kinds) != num_layers:
        raise ValueError(
            f"config.json names the kinds of {len(kinds)} layers, but num_hidden_layers is {num_layers}"
        )
    return sum(kind == wanted for kind in kinds)


_HYBRIDS: Mapping[str, Callable[[ConfigReader], _Hybrid]] = {
    "qwen3_next": _qwen_hybrid,
    "qwen3_5_moe": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron,
}
