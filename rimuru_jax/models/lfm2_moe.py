"""LFM2-MoE: gated short convolutions and attention, a sigmoid router with a bias. Source: transformers `Lfm2MoeForCausalLM`."""

from rimuru_jax.models.config import Dense, LayerSpec, ModelConfig, Moe, ShortConv
from rimuru_jax.models.config_reader import ConfigReader
from rimuru_jax.models.weights import TensorNames

NAMES = (
    TensorNames(
        final_norm="model.embedding_norm.weight",
        input_norm="operator_norm.weight",
        ffn_norm="ffn_norm.weight",
        attention_output="out_proj",
        q_norm="q_layernorm.weight",
        k_norm="k_layernorm.weight",
        recurrent="conv.",
        ffn="feed_forward.",
        router="feed_forward.gate.weight",
        selection_bias="feed_forward.expert_bias",
        expert="feed_forward.experts.{expert}.{matrix}.weight",
        matrices=("w1", "w3", "w2"),
    ),
)


def parse(reader: ConfigReader) -> ModelConfig:
    integer = reader.integer
    num_layers = integer("num_hidden_layers")
    kinds = reader.layer_types(num_layers, {"conv": "conv", "full_attention": "full_attention"})
    mixers = {
        "full_attention": reader.attention(qk_norm="head"),
        "conv": ShortConv(
            channels=integer("hidden_size"),
            kernel=integer("conv_L_cache", default=3),
            bias=bool(reader.get("conv_bias", False)),
        ),
    }
    moe = Moe(
        num_experts=integer("num_experts"),
        num_experts_per_tok=integer("num_experts_per_tok"),
        intermediate_size=integer("moe_intermediate_size"),
        normalize=bool(reader.get("norm_topk_prob", True)),
        scoring="sigmoid",
        normalize_epsilon=1e-6,
        scale=reader.number("routed_scaling_factor", 1.0),
        selection_bias=bool(reader.get("use_expert_bias", True)),
    )
    dense = Dense(intermediate_size=integer("intermediate_size"))
    num_dense = reader.get("num_dense_layers", 0)
    return reader.model(
        (
            LayerSpec(mixer=mixers[kind], ffn=dense if index < num_dense else moe)
            for index, kind in enumerate(kinds)
        ),
        eps_field="norm_eps",
    )
