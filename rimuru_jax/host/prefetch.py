"""Whether a step copies absent experts into loading buffers ahead of their layer, or reads those it needs in place."""

from typing import Literal

import numpy as np

type Prefetch = Literal["auto", "all", "none"]

WORTH_LOADING = 0.7
"""Chance that an absent expert is chosen above which it is loaded ahead: what nobody chooses is loaded for nothing, and
what is read in place holds the layer up."""


def loads_ahead(prefetch: Prefetch, tokens: int, chances: np.ndarray) -> bool:
    """For a step of `tokens` tokens: always, never, or ("auto") if most experts that it would load will be chosen.

    Args:
        chances: float[n], below 1, of one token choosing each expert that would be loaded.
    """
    if prefetch != "auto":
        return prefetch == "all"
    return chances.size > 0 and bool(-np.expm1(tokens * np.log1p(-chances)).mean() >= WORTH_LOADING)


def absent_and_loaded(chances: np.ndarray, absent: int, buffer_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """The experts that are away when each layer lacks `absent`, and which of them go into loading buffers.

    Args:
        chances: float64[L, E] of being chosen; the least likely are away, the likeliest of them are loaded.

    Returns expert ids int[L, absent] and int[L, min(absent, buffer_experts)].
    """
    away = np.argsort(chances, axis=1, kind="stable")[:, :absent]
    return away, away[:, max(0, absent - buffer_experts) :]
