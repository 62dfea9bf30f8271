"""Where each weight of a model comes from in a checkpoint, as data.

The parameter tree of a layer is a flat dictionary; its entries are described once here, next to the tensor names
that published checkpoints use. Matrices keep the checkpoint's `[out, in]` orientation; those that read the same
input are stacked along `out` (q, k, v; gate, up) so that a step multiplies once.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from rimuru_jax.models.config import (
    Attention,
    Dense,
    GatedDeltaNet,
    LayerSpec,
    Mamba2,
    Mixer,
    ModelConfig,
    Moe,
    ShortConv,
)

type ParameterPath = tuple[str | int, ...]
"""("embedding",) or ("layers", 3, "qkv")."""
type Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One parameter: the checkpoint tensors stacked along their first axis, and their shapes."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    """Makes the parameter of the stacked tensors."""
    converted: Shape | None = None
    """Shape of what `convert` returns, if another."""
    float32: bool = False
    """Kept in float32 whatever the model is served in."""

    @property
    def shape(self) -> Shape:
        if self.converted is not None:
            return self.converted
        first = self.shapes[0]
        return (sum(shape[0] for shape in self.shapes), *first[1:])


@dataclass(frozen=True, slots=True)
class PageSource:
    """One expert matrix: a tensor of the checkpoint, or a part of one that holds several."""

    name: str
    stored: Shape
    """Shape of the tensor."""
    expert: int | None = None
    """Index along the first axis of a tensor that holds all experts."""
    rows: slice = slice(None)
    """Rows of the (then two-dimensional) tensor, after `transposed`."""
    transposed: bool = False


@runtime_checkable
class MixerWithSources(Protocol):
    """A mixer of one's own: it says itself where its parameters come from."""

    def sources(self, prefix: str, hidden: int) -> dict[str, TensorSource]:
        """Parameters by name; `prefix` begins the names of the layer's tensors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Tensor names of one architecture's checkpoints, those in a layer without the layer's own prefix."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm.weight"
    ffn_norm: str = "post_attention_layernorm.weight"

    attention: str = "self_attn."
    attention_output: str = "o_proj"
    q_norm: str = "q_norm.weight"
    k_norm: str = "k_norm.weight"
    recurrent: str = "linear_attn."
    """Prefix of gated delta nets, Mamba-2 mixers and short convolutions."""
    delta_by_key_head: bool = False
    """The rows of a gated delta net's projections are grouped by key head."""

    ffn: str = "mlp."
    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.router.bias"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{expert}.{matrix}.weight"
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of w1, w3, w2 in that order; of two matrices, the first is up."""
    fused_experts: tuple[str, str] | None = None
    """Instead of `expert`: names of all experts' gate and up `[E, 2 f, d]`, and of their down `[E, d, f]`."""
    experts_transposed: bool = False
    """The fused ones are `[E, d, 2 f]`, gate and up in turn, and `[E, f, d]`."""
    expert_biases: tuple[str, str] = ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias")
    """Of all experts: `[E, 2 f]`, gate and up in turn, and `[E, d]`."""
    shared: str = "mlp.shared_expert."
    shared_fused: tuple[str, str] | None = None
    """Names of the shared expert's gate and up `[2 s, d]` and of its down, where they are not like `matrices`."""
    shared_gate: str = "mlp.shared_expert_gate.weight"
    ignored: Callable[[str], bool] = field(default=lambda name: name.endswith("rotary_emb.inv_freq"))
    """Tensors of the checkpoint that serving does not need."""


def attention_sources(
    prefix: str, names: TensorNames, attention: Attention, hidden: int
) -> dict[str, TensorSource]:
    """qkv, output and, where the model has them, biases, norms and sinks."""
    q = attention.num_heads * attention.head_dim
    kv = attention.num_kv_heads * attention.head_dim
    rows = (q * (2 if attention.output_gate else 1), kv, kv)
    output = prefix + names.attention_output
    sources = {
        "qkv": TensorSource(
            tuple(f"{prefix}{p}_proj.weight" for p in "qkv"), tuple((r, hidden) for r in rows)
        ),
        "attention_output": TensorSource((f"{output}.weight",), ((hidden, q),)),
    }
    if attention.qkv_bias:
        sources["qkv_bias"] = TensorSource(
            tuple(f"{prefix}{p}_proj.bias" for p in "qkv"), tuple((r,) for r in rows)
        )
    if attention.output_bias:
        sources["attention_output_bias"] = TensorSource((f"{output}.bias",), ((hidden,),))
    if attention.qk_norm:
        sizes = (q, kv) if attention.qk_norm == "full" else (attention.head_dim, attention.head_dim)
        norms = prefix + names.q_norm, prefix + names.k_norm
        sources["qk_norm"] = TensorSource(norms, tuple((size,) for size in sizes))
    if attention.sinks:
        sources["sinks"] = TensorSource((f"{prefix}sinks",), ((attention.num_heads,),))
    return sources


def gated_delta_sources(
    prefix: str, names: TensorNames, net: GatedDeltaNet, hidden: int
) -> dict[str, TensorSource]:
    """`delta_in` gives all q, all k, all v, all z, then b and a of each value head."""
    heads, inner = net.num_value_heads, net.num_value_heads * net.value_dim
    if names.delta_by_key_head:
        shapes = ((net.channels + inner, hidden), (2 * heads, hidden))
        parts = ("in_proj_qkvz", "in_proj_ba")
        convert = operator.itemgetter(_rows_of_delta(net))
    else:
        shapes = ((net.channels, hidden), (inner, hidden), (heads, hidden), (heads, hidden))
        parts, convert = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), None
    return {
        "delta_in": TensorSource(tuple(f"{prefix}{part}.weight" for part in parts), shapes, convert),
        **_conv_sources(f"{prefix}conv1d.", net.channels, net.kernel, bias=False),
        "A_log": TensorSource((f"{prefix}A_log",), ((heads,),), float32=True),
        "dt_bias": TensorSource((f"{prefix}dt_bias",), ((heads,),), float32=True),
        "mixer_norm": TensorSource((f"{prefix}norm.weight",), ((net.value_dim,),)),
        "mixer_output": TensorSource((f"{prefix}out_proj.weight",), ((hidden, inner),)),
    }


def _rows_of_delta(net: GatedDeltaNet) -> np.ndarray:
    """Where, in projections grouped by key head, the rows of q, k, v, z, b and a are.

    A group is q, k, and v and z of the key head's value heads; behind all groups, b and a of its value heads.
    """
    groups, share = net.num_key_heads, net.num_value_heads // net.num_key_heads
    sizes = (net.key_dim, net.key_dim, share * net.value_dim, share * net.value_dim)
    rows = np.arange(groups * sum(sizes)).reshape(groups, sum(sizes))
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    b, a = np.split(rows.size + np.arange(2 * net.num_value_heads).reshape(groups, 2 * share), 2, axis=1)
    return np.concatenate([part.reshape(-1) for part in (*parts, b, a)])


def mamba_sources(prefix: str, mamba: Mamba2, hidden: int) -> dict[str, TensorSource]:
    """`mamba_in` gives z, then x, B and C, then dt of each head."""
    heads = mamba.num_heads
    rows = mamba.inner + mamba.channels + heads
    return {
        "mamba_in": TensorSource((f"{prefix}in_proj.weight",), ((rows, hidden),)),
        **_conv_sources(f"{prefix}conv1d.", mamba.channels, mamba.kernel, bias=mamba.conv_bias),
        **{
            name: TensorSource((prefix + name,), ((heads,),), float32=True)
            for name in ("A_log", "D", "dt_bias")
        },
        "mixer_norm": TensorSource((f"{prefix}norm.weight",), ((mamba.inner,),)),
        "mixer_output": TensorSource((f"{prefix}out_proj.weight",), ((hidden, mamba.inner),)),
    }


def short_conv_sources(prefix: str, conv: ShortConv, hidden: int) -> dict[str, TensorSource]:
    """`conv_in` gives the gate before the convolution, the gate behind it, and the input."""
    c = conv.channels
    sources = {
        "conv_in": TensorSource((f"{prefix}in_proj.weight",), ((3 * c, hidden),)),
        **_conv_sources(f"{prefix}conv.", c, conv.kernel, bias=conv.bias),
        "mixer_output": TensorSource((f"{prefix}out_proj.weight",), ((hidden, c),)),
    }
    if conv.bias:
        sources["conv_in_bias"] = TensorSource((f"{prefix}in_proj.bias",), ((3 * c,),))
        sources["mixer_output_bias"] = TensorSource((f"{prefix}out_proj.bias",), ((hidden,),))
    return sources


def _conv_sources(prefix: str, channels: int, kernel: int, *, bias: bool) -> dict[str, TensorSource]:
    sources = {
        "conv": TensorSource(
            (f"{prefix}weight",), ((channels, 1, kernel),), lambda weight: weight[:, 0], (channels, kernel)
        )
    }
    if bias:
        sources["conv_bias"] = TensorSource((f"{prefix}bias",), ((channels,),))
    return sources


def mixer_sources(prefix: str, names: TensorNames, mixer: Mixer, hidden: int) -> dict[str, TensorSource]:
    """Every parameter of a mixer. Raises TypeError for a mixer of one's own that lacks `sources`."""
    match mixer:
        case Attention():
            return attention_sources(prefix + names.attention, names, mixer, hidden)
        case GatedDeltaNet():
            return gated_delta_sources(prefix + names.recurrent, names, mixer, hidden)
        case Mamba2():
            return mamba_sources(prefix + names.recurrent, mixer, hidden)
        case ShortConv():
            return short_conv_sources(prefix + names.recurrent, mixer, hidden)
        case MixerWithSources():
            return mixer.sources(prefix, hidden)
    raise TypeError(f"{type(mixer).__name__} is no mixer that rimuru_jax knows, and has no method `sources`")


def mlp_sources(
    stem: str, prefix: str, matrices: Sequence[str], width: int, hidden: int
) -> dict[str, TensorSource]:
    """A feed-forward of `width` as `{stem}_gate_up` (or `{stem}_up`, for two matrices) and `{stem}_down`."""
    *inner, down = (f"{prefix}{name}.weight" for name in matrices)
    return {
        f"{stem}_{'gate_up' if len(inner) == 2 else 'up'}": TensorSource(
            tuple(inner), ((width, hidden),) * len(inner)
        ),
        f"{stem}_down": TensorSource((down,), ((hidden, width),)),
    }


def moe_sources(prefix: str, names: TensorNames, moe: Moe, hidden: int) -> dict[str, TensorSource]:
    """The router and what surrounds the routed experts, which are pages."""
    experts, f, shared = moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size
    sources = {"router": TensorSource((prefix + names.router,), ((experts, hidden),))}
    if moe.router_bias:
        sources["router_bias"] = TensorSource((prefix + names.router_bias,), ((experts,),))
    if moe.selection_bias:
        sources["selection_bias"] = TensorSource(
            (prefix + names.selection_bias,), ((experts,),), float32=True
        )
    if moe.expert_bias:
        gate_up, down = (prefix + name for name in names.expert_biases)
        sources["expert_gate_up_bias"] = TensorSource(
            (gate_up,),
            ((experts, 2 * f),),
            lambda bias: bias.reshape(experts, f, 2).swapaxes(1, 2),
            (experts, 2, f),
        )
        sources["expert_down_bias"] = TensorSource((down,), ((experts, hidden),))
    if shared:
        if names.shared_fused:
            gate_up, down = (f"{prefix}{name}.weight" for name in names.shared_fused)
            sources["shared_gate_up"] = TensorSource((gate_up,), ((2 * shared, hidden),))
            sources["shared_down"] = TensorSource((down,), ((hidden, shared),))
        else:
            matrices = names.matrices[-moe.matrices :]
            sources |= mlp_sources("shared", prefix + names.shared, matrices, shared, hidden)
        if moe.shared_gate:
            sources["shared_expert_gate"] = TensorSource((prefix + names.shared_gate,), ((1, hidden),))
    return sources


def layer_sources(index: int, layer: LayerSpec, hidden: int, names: TensorNames) -> dict[str, TensorSource]:
    """Every resident parameter of one layer. Routed experts are not among them: they are pages."""
    prefix = names.layer.format(layer=index)
    sources: dict[str, TensorSource] = {}
    if layer.mixer is not None:
        sources["input_norm"] = TensorSource((prefix + names.input_norm,), ((hidden,),))
        sources |= mixer_sources(prefix, names, layer.mixer, hidden)
    if layer.ffn is not None:
        sources["ffn_norm"] = TensorSource((prefix + names.ffn_norm,), ((hidden,),))
    match layer.ffn:
        case Dense(intermediate_size=width, activation=activation):
            matrices = names.matrices if activation == "silu" else names.matrices[-2:]
            sources |= mlp_sources("dense", prefix + names.ffn, matrices, width, hidden)
        case Moe() as moe:
            sources |= moe_sources(prefix, names, moe, hidden)
    return sources


def resident_sources(config: ModelConfig, names: TensorNames) -> Mapping[ParameterPath, TensorSource]:
    """Every parameter that stays on the device, by its path in the parameter tree."""
    d, v = config.hidden_size, config.vocab_size
    sources: dict[ParameterPath, TensorSource] = {
        ("embedding",): TensorSource((names.embedding,), ((v, d),)),
        ("final_norm",): TensorSource((names.final_norm,), ((d,),)),
    }
    if not config.tie_word_embeddings:
        sources["head",] = TensorSource((names.head,), ((v, d),))
    for index, layer in enumerate(config.layers):
        for key, source in layer_sources(index, layer, d, names).items():
            sources["layers", index, key] = source
    return sources


def expert_sources(config: ModelConfig, names: TensorNames) -> list[PageSource]:
    """Where every expert page comes from, in (MoE layer, expert, matrix) order: w1 (gate), w3 (up), w2 (down)."""
    moe, d = config.moe, config.hidden_size
    sources = []
    for layer in config.moe_layers:
        prefix = names.layer.format(layer=layer)
        for expert in range(moe.num_experts):
            if names.fused_experts:
                sources += _fused_sources(prefix, names, moe, d, expert)
                continue
            for matrix, name in enumerate(names.matrices[-moe.matrices :]):
                down = matrix == moe.matrices - 1
                shape = (d, moe.intermediate_size) if down else (moe.intermediate_size, d)
                tensor = prefix + names.expert.format(expert=expert, matrix=name)
                sources.append(PageSource(tensor, shape))
    return sources


def _fused_sources(
    prefix: str, names: TensorNames, moe: Moe, hidden: int, expert: int
) -> Iterable[PageSource]:
    assert names.fused_experts
    gate_up, down = (prefix + name for name in names.fused_experts)
    experts, f, swap = moe.num_experts, moe.intermediate_size, names.experts_transposed
    if swap:
        stored, parts = (experts, hidden, 2 * f), (slice(0, None, 2), slice(1, None, 2))
    else:
        stored, parts = (experts, 2 * f, hidden), (slice(0, f), slice(f, None))
    for rows in parts:
        yield PageSource(gate_up, stored, expert, rows, transposed=swap)
    yield PageSource(down, (experts, f, hidden) if swap else (experts, hidden, f), expert, transposed=swap)
