"""Whether a step copies absent experts into loading buffers ahead of their layer, or reads those it needs in place."""

from typing import Literal

type Prefetch = Literal["auto", "all", "none"]

WORTH_LOADING = 0.7
"""Chance that an absent expert is chosen above which it is loaded ahead: what nobody chooses is loaded for nothing, and
what is read in place holds the layer up."""


def loads_ahead(prefetch: Prefetch, tokens: int, num_experts: int, num_experts_per_tok: int) -> bool:
    """For a step of `tokens` tokens: always, never, or ("auto") if most absent experts will be chosen.

    As if tokens chose evenly; unequal routing makes choices of what is absent rarer still.
    """
    if prefetch != "auto":
        return prefetch == "all"
    return 1 - (1 - num_experts_per_tok / num_experts) ** tokens >= WORTH_LOADING
