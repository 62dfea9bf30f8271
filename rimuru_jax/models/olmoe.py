"""OLMoE: query and key norms over the whole projection, raw router probabilities. Source: transformers `OlmoeForCausalLM`."""

from rimuru_jax.models.config import LayerSpec, ModelConfig, Moe
from rimuru_jax.models.config_reader import ConfigReader
from rimuru_jax.models.weights import TensorNames

NAMES = (TensorNames(),)


def parse(reader: ConfigReader) -> ModelConfig:
    clip = reader.get("clip_qkv")
    bias = bool(reader.get("attention_bias", False))
    attention = reader.attention(
        qk_norm="full", qkv_bias=bias, output_bias=bias, clip_qkv=None if clip is None else float(clip)
    )
    moe = Moe(
        num_experts=reader.integer("num_experts", "num_local_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("intermediate_size"),
        normalize=bool(reader.get("norm_topk_prob", False)),
    )
    return reader.model(
        LayerSpec(mixer=attention, ffn=moe) for _ in range(reader.integer("num_hidden_layers"))
    )
