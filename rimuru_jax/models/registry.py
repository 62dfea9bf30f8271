"""The architectures rimuru serves, by the `model_type` of their config.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rimuru_jax.models import (
    gpt_oss,
    granitemoehybrid,
    lfm2_moe,
    mixtral,
    nemotron_h,
    olmoe,
    qwen2_moe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from rimuru_jax.models.config import ModelConfig
from rimuru_jax.models.config_reader import ConfigReader
from rimuru_jax.models.weights import TensorNames, resident_sources

ARCHITECTURES: Mapping[str, ModuleType] = {
    "gpt_oss": gpt_oss,
    "granitemoehybrid": granitemoehybrid,
    "lfm2_moe": lfm2_moe,
    "mixtral": mixtral,
    "nemotron_h": nemotron_h,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}
"""A module has `parse`, from a `ConfigReader` to a `ModelConfig`, and `NAMES`, the layouts its checkpoints come in."""


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A `ModelConfig` from the contents of a config.json. Raises ValueError naming what is missing or unsupported."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type {model_type!r} in config.json is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    # Models that also see images keep the language model's fields in a part of their own.
    text = {name: value for name, value in (raw.get("text_config") or {}).items() if value is not None}
    config = ARCHITECTURES[model_type].parse(ConfigReader({**raw, **text}))
    moe = config.moe
    if moe.num_experts_per_tok > moe.num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok {moe.num_experts_per_tok} exceeds the number of experts {moe.num_experts}"
        )
    return config


def tensor_names(model_type: str) -> tuple[TensorNames, ...]:
    """The layouts in which checkpoints of an architecture come, the usual one first; of a new one, the usual names."""
    return ARCHITECTURES[model_type].NAMES if model_type in ARCHITECTURES else (TensorNames(),)


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of `folder`/config.json, or of a file of any name that is given in place of a folder.

    Raises ValueError in one sentence when there is none or it is damaged.
    """
    path = folder if folder.is_file() else folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder; give the folder that holds one"
        )
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise ValueError(
            f"{path} holds a {type(raw).__name__}, but a JSON object is needed; download it again"
        )
    return raw


def resident_bytes(model: ModelConfig, weight_bytes: int) -> int:
    """Bytes of all weights that are no routed experts, `weight_bytes` each but for those kept in float32."""
    sources = resident_sources(model, tensor_names(model.model_type)[0]).values()
    return sum(math.prod(source.shape) * (4 if source.float32 else weight_bytes) for source in sources)


def host_embedding_bytes(model: ModelConfig, weight_bytes: int) -> int:
    """Bytes of the resident weights that a GPU reads from the host, a row for each token: embeddings but for tied ones."""
    return 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * weight_bytes
