"""Where each weight of a model comes from in a checkpoint, as data.

The parameter tree of a layer is a flat dictionary; its entries are described once here, next to the tensor names
that published checkpoints use. Matrices keep the checkpoint's `[out, in]` orientation; those that read the same
input are stacked along `out` (q, k, v; gate, up) so that a step multiplies once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rimuru_jax.models.config import Attention, Dense, LayerSpec, ModelConfig, Moe

type ParameterPath = tuple[str | int, ...]
"""("embedding",) or ("layers", 3, "qkv")."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One parameter: the checkpoint tensors stacked along their first axis, and their shapes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.shapes[0]
        return (sum(shape[0] for shape in self.shapes), *first[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Tensor names of one architecture's checkpoints; `{}` stands for the name inside the layer."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    input_norm: str = "input_layernorm.weight"
    ffn_norm: str = "post_attention_layernorm.weight"
    attention: str = "self_attn."
    ffn: str = "mlp."
    router: str = "gate.weight"
    expert: str = "experts.{expert}.{matrix}.weight"
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of w1, w3, w2 in that order."""
    ignored: Callable[[str], bool] = field(default=lambda name: name.endswith("rotary_emb.inv_freq"))
    """Tensors of the checkpoint that serving does not need."""


def attention_sources(prefix: str, attention: Attention, hidden: int) -> dict[str, TensorSource]:
    """Parameters of an attention layer: qkv, output and, where the model has them, biases and norms."""
    q = attention.num_heads * attention.head_dim
    kv = attention.num_kv_heads * attention.head_dim
    sources = {
        "qkv": TensorSource(
            tuple(f"{prefix}{p}_proj.weight" for p in "qkv"), ((q, hidden), (kv, hidden), (kv, hidden))
        ),
        "attention_output": TensorSource((f"{prefix}o_proj.weight",), ((hidden, q),)),
    }
    if attention.qkv_bias:
        sources["qkv_bias"] = TensorSource(
            tuple(f"{prefix}{p}_proj.bias" for p in "qkv"), ((q,), (kv,), (kv,))
        )
    if attention.output_bias:
        sources["attention_output_bias"] = TensorSource((f"{prefix}o_proj.bias",), ((hidden,),))
    if attention.qk_norm:
        full = attention.qk_norm == "full"
        sources["q_norm"] = TensorSource((f"{prefix}q_norm.weight",), ((q if full else attention.head_dim,),))
        sources["k_norm"] = TensorSource(
            (f"{prefix}k_norm.weight",), ((kv if full else attention.head_dim,),)
        )
    if attention.sinks:
        sources["sinks"] = TensorSource((f"{prefix}sinks",), ((attention.num_heads,),))
    return sources


def mlp_sources(
    prefix: str, names: TensorNames, width: int, hidden: int, stem: str
) -> dict[str, TensorSource]:
    """A SwiGLU feed-forward of `width` as `{stem}_gate_up` and `{stem}_down`."""
    gate, up, down = (f"{prefix}{name}.weight" for name in names.matrices)
    return {
        f"{stem}_gate_up": TensorSource((gate, up), ((width, hidden), (width, hidden))),
        f"{stem}_down": TensorSource((down,), ((hidden, width),)),
    }


def layer_sources(index: int, layer: LayerSpec, hidden: int, names: TensorNames) -> dict[str, TensorSource]:
    """Every resident parameter of one layer. Routed experts are not among them: they are pages."""
    prefix = names.layer.format(layer=index)
    ffn = prefix + names.ffn
    sources = {
        "input_norm": TensorSource((prefix + names.input_norm,), ((hidden,),)),
        "ffn_norm": TensorSource((prefix + names.ffn_norm,), ((hidden,),)),
        **attention_sources(prefix + names.attention, layer.mixer, hidden),
    }
    match layer.ffn:
        case Dense(intermediate_size=width):
            sources |= mlp_sources(ffn, names, width, hidden, "dense")
        case Moe() as moe:
            sources["router"] = TensorSource((ffn + names.router,), ((moe.num_experts, hidden),))
            if moe.shared_intermediate_size:
                shared = f"{ffn}shared_expert."
                sources |= mlp_sources(shared, names, moe.shared_intermediate_size, hidden, "shared")
                sources["shared_expert_gate"] = TensorSource(
                    (f"{ffn}shared_expert_gate.weight",), ((1, hidden),)
                )
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


def expert_sources(config: ModelConfig, names: TensorNames) -> list[TensorSource]:
    """The tensor of every expert page, in (MoE layer, expert, matrix) order: w1 (gate), w3 (up), w2 (down)."""
    moe = config.moe
    down = (config.hidden_size, moe.intermediate_size)
    sources = []
    for layer in config.moe_layers:
        prefix = (names.layer + names.ffn).format(layer=layer)
        for expert in range(moe.num_experts):
            for matrix, name in enumerate(names.matrices):
                shape = down if matrix == moe.matrices - 1 else down[::-1]
                tensor = prefix + names.expert.format(expert=expert, matrix=name)
                sources.append(TensorSource((tensor,), (shape,)))
    return sources
