"""Qwen3-Next: gated delta nets and, every few layers, attention with an output gate. Source: transformers `Qwen3NextForCausalLM`."""

from rimuru_jax.models.config import Dense, GatedDeltaNet, LayerSpec, Mixer, ModelConfig, Moe
from rimuru_jax.models.config_reader import ConfigReader, sparse_layers
from rimuru_jax.models.weights import TensorNames

NAMES = (TensorNames(delta_by_key_head=True),)


def parse(reader: ConfigReader) -> ModelConfig:
    mixers = hybrid_mixers(reader)
    moe = shared_moe(reader, normalize=bool(reader.get("norm_topk_prob", True)))
    layers = []
    for mixer, is_sparse in zip(mixers, sparse_layers(reader, len(mixers)), strict=True):
        ffn = moe if is_sparse else Dense(intermediate_size=reader.integer("intermediate_size"))
        layers.append(LayerSpec(mixer=mixer, ffn=ffn))
    return reader.model(layers, norm="zero_centred")


def hybrid_mixers(reader: ConfigReader) -> list[Mixer]:
    """The mixer of every layer, by `layer_types` or `full_attention_interval`."""
    num_layers = reader.integer("num_hidden_layers")
    bias = bool(reader.get("attention_bias", False))
    head_dim = reader.integer("head_dim", default=256)
    attention = reader.attention(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=reader.rotary(head_dim, fraction=0.25),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        output_gate=bool(reader.get("attn_output_gate", True)),
    )
    delta_net = GatedDeltaNet(
        num_key_heads=reader.integer("linear_num_key_heads"),
        num_value_heads=reader.integer("linear_num_value_heads"),
        key_dim=reader.integer("linear_key_head_dim"),
        value_dim=reader.integer("linear_value_head_dim"),
        kernel=reader.integer("linear_conv_kernel_dim", default=4),
    )
    if delta_net.num_value_heads % delta_net.num_key_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads {delta_net.num_value_heads} is no multiple of linear_num_key_heads "
            f"{delta_net.num_key_heads}"
        )
    if reader.get("layer_types"):
        words = {"linear_attention": "linear_attention", "full_attention": "full_attention"}
        full = [kind == "full_attention" for kind in reader.layer_types(num_layers, words)]
    else:
        interval = reader.integer("full_attention_interval", default=4)
        full = [(i + 1) % interval == 0 for i in range(num_layers)]
    return [attention if is_full else delta_net for is_full in full]


def shared_moe(reader: ConfigReader, *, normalize: bool) -> Moe:
    """Routed experts beside a shared one behind a sigmoid gate."""
    return Moe(
        num_experts=reader.integer("num_experts", "num_local_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        normalize=normalize,
        shared_intermediate_size=reader.integer("shared_expert_intermediate_size"),
    )
