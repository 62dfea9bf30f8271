"""Qwen3-MoE: per-head query/key norms, no shared expert. Source: transformers `Qwen3MoeForCausalLM`, hub configs."""

from rimuru_jax.models.config import Dense, LayerSpec, ModelConfig, Moe
from rimuru_jax.models.config_reader import ConfigReader, sparse_layers
from rimuru_jax.models.weights import TensorNames

NAMES = (TensorNames(),)


def parse(reader: ConfigReader) -> ModelConfig:
    if reader.get("use_sliding_window", False):
        raise ValueError(
            "config.json: use_sliding_window is true, which no published Qwen3-MoE uses; it is not supported"
        )
    bias = bool(reader.get("attention_bias", False))
    attention = reader.attention(qk_norm="head", qkv_bias=bias, output_bias=bias)
    moe = Moe(
        num_experts=reader.integer("num_experts", "num_local_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        normalize=bool(reader.get("norm_topk_prob", False)),
    )
    sparse = sparse_layers(reader, reader.integer("num_hidden_layers"))
    dense = Dense(intermediate_size=reader.integer("intermediate_size", default=moe.intermediate_size))
    return reader.model(LayerSpec(mixer=attention, ffn=moe if is_sparse else dense) for is_sparse in sparse)
