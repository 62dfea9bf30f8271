"""What a model's authors recommend for sampling."""

import json
from pathlib import Path
from typing import Any

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(folder: Path | None) -> dict[str, Any]:
    """Fields of `SamplingParams` from `folder`/generation_config.json; empty where there is none."""
    if folder is None:
        return {}
    try:
        raw = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(raw, dict) or raw.get("do_sample") is False:
        return {}
    return {name: raw[name] for name in _NAMES if raw.get(name) is not None}
