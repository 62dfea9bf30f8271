"""Small random checkpoints in the Hugging Face layout, for tests of everything that needs a model.

    tensors = write_checkpoint(tmp_path, "qwen3_moe", seed=3, num_hidden_layers=2)

writes config.json and safetensors with the published tensor names and returns what it wrote.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from rimuru_jax.models.registry import parse_config, tensor_names
from rimuru_jax.models.weights import expert_sources, resident_sources

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 6,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": _COMMON
    | {"intermediate_size": 16, "num_local_experts": 4, "head_dim": 8, "sliding_window": 16},
    "granitemoehybrid": _COMMON
    | {
        "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
        "intermediate_size": 16,
        "shared_intermediate_size": 24,
        "num_local_experts": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
    },
    "lfm2_moe": _COMMON
    | {
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_dense_layers": 1,
        "norm_eps": 1e-5,
    },
    "nemotron_h": _COMMON
    | {
        "num_hidden_layers": 6,
        "hybrid_override_pattern": "ME*EM-",
        "head_dim": 8,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "ssm_state_size": 12,
        "n_groups": 2,
        "conv_kernel": 4,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "n_routed_experts": 6,
        "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5,
    },
    "qwen3_next": _COMMON | _DELTA_NET,
    "qwen3_5_moe": _COMMON | _DELTA_NET,
    "qwen3_5_moe_text": _COMMON | _DELTA_NET,
    "mixtral": _COMMON | {"intermediate_size": 24, "num_local_experts": 4},
    "olmoe": _COMMON | {"intermediate_size": 16, "num_experts": 6, "norm_topk_prob": False},
    # One dense layer, and a shared expert in the others.
    "qwen2_moe": _COMMON
    | {
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "mlp_only_layers": [1],
    },
    # Heads wider than hidden_size / num_attention_heads.
    "qwen3_moe": _COMMON
    | {
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "head_dim": 12,
        "norm_topk_prob": True,
    },
}
"""config.json of each supported architecture, by model_type."""


def write_checkpoint(
    folder: Path, model_type: str, *, seed: int = 0, shards: int = 1, **overrides: Any
) -> dict[str, np.ndarray]:
    """Write a random bfloat16 model to `folder` (made if need be) and return its tensors by name.

    `overrides` replace fields of config.json. Weights are scaled so that activations keep their size from layer to
    layer, and norms differ from one, so that a forgotten weight shows. With `shards` > 1 the tensors are spread over
    that many files under an index.
    """
    raw = {**CONFIGS[model_type], "model_type": model_type, **overrides}
    tensors = _random_tensors(raw, np.random.default_rng(seed))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    write_weights(folder, tensors, shards=shards)
    return tensors


def write_weights(folder: Path, tensors: Mapping[str, np.ndarray], *, shards: int = 1) -> None:
    """Write `tensors` to `folder` as safetensors, dealt out to `shards` files."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = {name: tensors[name] for name in names[shard::shards]}
        save_file(mine, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random_tensors(raw: Mapping[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    config, names = parse_config(raw), tensor_names(raw["model_type"])[0]
    shapes = {
        name: shape
        for source in resident_sources(config, names).values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    shapes |= {page.name: page.stored for page in expert_sources(config, names)}
    return {name: _random(name, shape, rng) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape, np.float32)
    if "norm" in name:
        values = 1 + 0.2 * noise
    elif len(shape) == 1:
        values = 0.2 * noise
    else:
        values = noise * shape[-1] ** -0.5
    return values.astype(ml_dtypes.bfloat16)
