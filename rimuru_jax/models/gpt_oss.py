"""gpt-oss: attention with sinks, every second layer in a sliding window, biases everywhere, clamped experts.

Source: transformers `GptOssForCausalLM`. Checkpoints in bfloat16; the published ones in MXFP4 are not read yet.
"""

import dataclasses

from rimuru_jax.models.config import LayerSpec, ModelConfig, Moe
from rimuru_jax.models.config_reader import ConfigReader
from rimuru_jax.models.weights import TensorNames

NAMES = (
    TensorNames(
        router="mlp.router.weight",
        fused_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        experts_transposed=True,
    ),
)


def parse(reader: ConfigReader) -> ModelConfig:
    integer = reader.integer
    num_layers = integer("num_hidden_layers")
    bias = bool(reader.get("attention_bias", True))
    full = reader.attention(qkv_bias=bias, output_bias=bias, sinks=True)
    sliding = dataclasses.replace(full, sliding_window=integer("sliding_window", default=128))
    moe = Moe(
        num_experts=integer("num_local_experts", "num_experts"),
        num_experts_per_tok=integer("num_experts_per_tok", "experts_per_token"),
        intermediate_size=integer("intermediate_size"),
        normalize=False,
        scoring="softmax_of_chosen",
        router_bias=True,
        activation="clamped_swiglu",
        swiglu_alpha=reader.number("swiglu_alpha", 1.702),
        swiglu_limit=reader.number("swiglu_limit", 7.0),
        expert_bias=True,
    )
    mixers = {"sliding_attention": sliding, "full_attention": full}
    if reader.get("layer_types"):
        kinds = reader.layer_types(num_layers, {kind: kind for kind in mixers})
    else:
        kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
    return reader.model(LayerSpec(mixer=mixers[kind], ffn=moe) for kind in kinds)
