"""Qwen2-MoE and Qwen1.5-MoE: q/k/v biases, a shared expert behind a sigmoid gate. Source: transformers `Qwen2MoeForCausalLM`."""

from rimuru_jax.models.config import Dense, LayerSpec, ModelConfig, Moe
from rimuru_jax.models.config_reader import ConfigReader, sparse_layers
from rimuru_jax.models.weights import TensorNames

NAMES = (TensorNames(),)


def parse(reader: ConfigReader) -> ModelConfig:
    if reader.get("use_sliding_window", False):
        raise ValueError(
            "config.json: use_sliding_window is true, which no published Qwen2-MoE uses; it is not supported"
        )
    attention = reader.attention(qkv_bias=bool(reader.get("qkv_bias", True)))
    moe = Moe(
        num_experts=reader.integer("num_experts", "num_local_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        normalize=bool(reader.get("norm_topk_prob", False)),
        shared_intermediate_size=reader.integer("shared_expert_intermediate_size"),
    )
    dense = Dense(intermediate_size=reader.integer("intermediate_size"))
    sparse = sparse_layers(reader, reader.integer("num_hidden_layers"))
    return reader.model(LayerSpec(mixer=attention, ffn=moe if is_sparse else dense) for is_sparse in sparse)
