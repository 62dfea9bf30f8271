"""Qwen3.5-MoE, its language model: Qwen3-Next with split projections. Source: transformers `Qwen3_5MoeForCausalLM`.

Published checkpoints also hold a vision tower and a multi-token-prediction head, which are skipped, and keep all
experts of a layer in two tensors; a language model saved by itself has a tensor per expert.
"""

import dataclasses

from rimuru_jax.models.config import LayerSpec, ModelConfig
from rimuru_jax.models.config_reader import ConfigReader
from rimuru_jax.models.qwen3_next import hybrid_mixers, shared_moe
from rimuru_jax.models.weights import TensorNames


def _ignored(name: str) -> bool:
    return name.startswith(("model.visual.", "mtp.")) or name.endswith("rotary_emb.inv_freq")


_TEXT = TensorNames(ignored=_ignored)
_PUBLISHED = dataclasses.replace(
    _TEXT,
    embedding="model.language_model.embed_tokens.weight",
    final_norm="model.language_model.norm.weight",
    layer="model.language_model.layers.{layer}.",
)
_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
NAMES = (
    dataclasses.replace(_PUBLISHED, fused_experts=_FUSED),
    _TEXT,
    dataclasses.replace(_TEXT, fused_experts=_FUSED),
    _PUBLISHED,
)


def parse(reader: ConfigReader) -> ModelConfig:
    moe = shared_moe(reader, normalize=True)
    return reader.model(
        (LayerSpec(mixer=mixer, ffn=moe) for mixer in hybrid_mixers(reader)), norm="zero_centred"
    )
