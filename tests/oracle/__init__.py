"""Tiny checkpoints of real architectures with logits, tokens and routing computed by `transformers` in float32.

`make_oracle.py` (needs torch) builds `data/`: a checkpoint folder and an .npz of expected values per case. Tokens and
expert choices must be reproduced exactly: every margin is at least 5e-3, every router gap at least 1e-4.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
ATTENTION_ONLY = ("qwen3_moe", "qwen3_moe_tied", "qwen2_moe", "olmoe", "mixtral", "gpt_oss")
HYBRIDS = ("qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "lfm2_moe")
CASES = (*ATTENTION_ONLY, *HYBRIDS)
NUM_PROMPTS = 5
LONGEST = 4  # index of the prompt whose routing is recorded
LOGIT_TOLERANCE = (
    1e-3  # float32 against float32, ours being below 1e-4; wrong details move logits by 3 and more
)


@dataclass(frozen=True)
class Case:
    """One case: `prompts[i]` is followed greedily by `tokens[i]`, taken from `logits[i]`."""

    name: str
    folder: Path
    prompts: list[list[int]]
    prompt_logits: list[np.ndarray]
    tokens: list[list[int]]
    logits: list[np.ndarray]
    values: dict[str, np.ndarray]


def load(name: str) -> Case:
    """A case; "qwen3_5_moe_mm" is the model of "qwen3_5_moe" in the layout in which it is published."""
    values = dict(np.load(DATA / f"{name.removesuffix('_mm')}.npz"))
    per_prompt = {
        key: [values[f"{key}.{i}"] for i in range(NUM_PROMPTS)]
        for key in ("prompt", "prompt_logits", "greedy_tokens", "greedy_logits")
    }
    return Case(
        name=name,
        folder=DATA / name,
        prompts=[p.tolist() for p in per_prompt["prompt"]],
        prompt_logits=per_prompt["prompt_logits"],
        tokens=[t.tolist() for t in per_prompt["greedy_tokens"]],
        logits=per_prompt["greedy_logits"],
        values=values,
    )
