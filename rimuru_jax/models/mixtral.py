"""Mixtral: experts named w1, w3, w2, normalised router weights. Source: transformers `MixtralForCausalLM`."""

from rimuru_jax.models.config import LayerSpec, ModelConfig, Moe
from rimuru_jax.models.config_reader import ConfigReader
from rimuru_jax.models.weights import TensorNames

NAMES = (
    TensorNames(
        router="block_sparse_moe.gate.weight",
        expert="block_sparse_moe.experts.{expert}.{matrix}.weight",
        matrices=("w1", "w3", "w2"),
    ),
)


def parse(reader: ConfigReader) -> ModelConfig:
    attention = reader.attention(sliding_window=reader.get("sliding_window") or None)
    moe = Moe(
        num_experts=reader.integer("num_local_experts", "num_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("intermediate_size"),
        normalize=True,
    )
    return reader.model(
        LayerSpec(mixer=attention, ffn=moe) for _ in range(reader.integer("num_hidden_layers"))
    )
