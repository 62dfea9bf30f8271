"""Hotset profile: how often each expert of each layer was routed to, measured offline, and kept as a JSON
file.

A profile is only as good as its data: a hot quarter learned on one domain covers .43 to .61 of that domain's
routing and .29 to .33 of another's, .25 being chance. So a profile names its data, and its model.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

FORMAT = "rimuru-hotset-1"

MOST_CERTAIN = 1 - 1e-9
"""The largest chance there is: the logarithm of its opposite is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFingerprint:
    """What must agree for a profile to say anything about a model.

    Attributes:
      model_type: the checkpoint's `model_type`.
      num_layers: MoE layers.
      num_experts: routed experts per layer.
      experts_per_token: experts chosen per token (top-k).
    """

    model_type: str
    num_layers: int
    num_experts: int
    experts_per_token: int

    def __str__(self) -> str:
        return (
            f"{self.model_type} with {self.num_layers} MoE layers of {self.num_experts} experts, "
            f"{self.experts_per_token} per token"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HotsetProfile:
    """Routing counts of one model on named data.

    Attributes:
      model: the model they were counted on.
      counts: int64[L, E], (token, slot) assignments per layer and expert.
      tokens: tokens counted.
      data: what the tokens were, in words.
    """

    model: ModelFingerprint
    counts: np.ndarray
    tokens: int
    data: str

    def __post_init__(self) -> None:
        wanted = (self.model.num_layers, self.model.num_experts)
        if self.counts.shape != wanted:
            raise ValueError(
                f"hotset counts have shape {self.counts.shape}, the model {self.model} needs {wanted}"
            )
        if self.counts.size and self.counts.min() < 0:
            raise ValueError(f"hotset counts must not be negative, got {self.counts.min()}")

    @classmethod
    def uniform(cls, model: ModelFingerprint) -> Self:
        """The profile used when none is given: nothing counted, every expert equally likely."""
        counts = np.zeros((model.num_layers, model.num_experts), np.int64)
        return cls(model=model, counts=counts, tokens=0, data="none (uniform)")

    def record(self, counts: np.ndarray, tokens: int) -> Self:
        """Return the profile with the router counts `int[L, E]` of one or more steps over `tokens` tokens
        added.
        """
        return replace(self, counts=self.counts + counts.astype(np.int64), tokens=self.tokens + tokens)

    def probabilities(self) -> np.ndarray:
        """Share of a layer's assignments that each expert gets: float64[L, E], rows sum to 1; uniform for
        layers without counts.
        """
        totals = self.counts.sum(axis=1, keepdims=True)
        uniform = np.full(self.counts.shape, 1.0 / max(1, self.model.num_experts))
        return np.divide(self.counts, totals, out=uniform, where=totals > 0)

    def token_chances(self) -> np.ndarray:
        """Chance that one token chooses each expert: float64[L, E], below 1."""
        return np.minimum(self.probabilities() * self.model.experts_per_token, MOST_CERTAIN)

    def order(self) -> np.ndarray:
        """Experts of each layer, most probable first, ties by expert id: int32[L, E]."""
        return np.argsort(-self.counts, axis=1, kind="stable").astype(np.int32)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        content = {
            "format": FORMAT,
            "model_type": self.model.model_type,
            "num_layers": self.model.num_layers,
            "num_experts": self.model.num_experts,
            "experts_per_token": self.model.experts_per_token,
            "tokens": self.tokens,
            "data": self.data,
            "counts": self.counts.tolist(),
        }
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, model: ModelFingerprint) -> Self:
        """Read a profile and check that it belongs to `model`.

        Raises:
          ValueError: the file is not JSON, is damaged, or was recorded on another model.
          OSError: it cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"hotset profile {path} is not JSON ({error}); check expert_hotset_path"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(
                f'hotset profile {path} does not say "format": "{FORMAT}"; check expert_hotset_path'
            )
        try:
            recorded = ModelFingerprint(
                model_type=_field(content, "model_type", str),
                num_layers=_field(content, "num_layers", int),
                num_experts=_field(content, "num_experts", int),
                experts_per_token=_field(content, "experts_per_token", int),
            )
            tokens, data = _field(content, "tokens", int), _field(content, "data", str)
            counts = _counts(_field(content, "counts", list))
            profile = cls(model=recorded, counts=counts, tokens=tokens, data=data)
        except ValueError as error:
            raise ValueError(f"hotset profile {path} is damaged: {error}; record it again") from error
        if recorded != model:
            raise ValueError(
                f"hotset profile {path} was recorded on {recorded}, but the model is {model}; "
                "check expert_hotset_path"
            )
        return profile


def _field(content: dict[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f'"{name}" must be {kind.__name__}, got {type(value).__name__}')
    return value


def _counts(rows: list[Any]) -> np.ndarray:
    """int64[L, E] from nested lists of integers."""
    if not all(isinstance(row, list) and all(type(count) is int for count in row) for row in rows):
        raise ValueError('"counts" must be lists of integers, one list per layer')
    if len({len(row) for row in rows}) > 1:
        raise ValueError('"counts" has layers of different lengths')
    return np.array(rows, np.int64)
