"""Granite-4.0-H: Mamba-2 and attention without positions, multipliers. Source: transformers `GraniteMoeHybridForCausalLM`."""

from rimuru_jax.models.config import Dense, LayerSpec, Mamba2, ModelConfig, Moe
from rimuru_jax.models.config_reader import ConfigReader
from rimuru_jax.models.weights import TensorNames

NAMES = (
    TensorNames(
        recurrent="mamba.",
        router="block_sparse_moe.router.layer.weight",
        fused_experts=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        shared_fused=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    ),
)
_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


def parse(reader: ConfigReader) -> ModelConfig:
    integer = reader.integer
    if reader.get("mamba_proj_bias", False):
        raise ValueError(
            "config.json: mamba_proj_bias is true, which no published model uses; it is not supported"
        )
    positions = reader.get("position_embedding_type", "nope")
    if positions not in ("nope", "rope"):
        raise ValueError(
            f"config.json: position_embedding_type {positions!r} is not supported, only 'nope' and 'rope'"
        )
    bias = bool(reader.get("attention_bias", False))
    head_dim = integer("head_dim", default=integer("hidden_size") // integer("num_attention_heads"))
    attention = reader.attention(
        rotary=reader.rotary(head_dim) if positions == "rope" else None,
        scale=reader.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    mamba = Mamba2(
        num_heads=integer("mamba_n_heads"),
        head_dim=integer("mamba_d_head"),
        state_size=integer("mamba_d_state"),
        num_groups=integer("mamba_n_groups", default=1),
        kernel=integer("mamba_d_conv", default=4),
        norm_groups=1,
        conv_bias=bool(reader.get("mamba_conv_bias", True)),
    )
    shared = integer("shared_intermediate_size")
    ffn: Dense | Moe = Dense(intermediate_size=shared)
    if reader.get("num_local_experts", 0):
        ffn = Moe(
            num_experts=integer("num_local_experts"),
            num_experts_per_tok=integer("num_experts_per_tok"),
            intermediate_size=integer("intermediate_size"),
            normalize=False,
            scoring="softmax_of_chosen",
            shared_intermediate_size=shared,
            shared_gate=False,
        )
    mixers = {"mamba": mamba, "attention": attention}
    kinds = reader.layer_types(integer("num_hidden_layers"), _KINDS)
    return reader.model(
        (LayerSpec(mixer=mixers[kind], ffn=ffn) for kind in kinds),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        residual_scale=reader.number("residual_multiplier", 1.0),
        logits_scale=1 / reader.number("logits_scaling", 1.0),
    )
