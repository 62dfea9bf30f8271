"""What is worth keeping in the pool: experts ranked by an offline profile, by their last use, or by what is routed now."""

from typing import Literal, Protocol

import numpy as np

from rimuru_jax.host.hotset import MOST_CERTAIN, HotsetProfile

type CachePolicy = Literal["online", "hotset", "lru"]

RANK_STEPS = 8
"""Steps after which a policy that learns ranks anew: sorting thousands of experts takes longer than counting them."""
HALF_LIFE = 64
"""Steps after which what was seen counts half: a request has its own experts, and is gone after some hundred tokens."""
PRIOR_STEPS = 16
"""Steps that the profile counts for."""
MOST_STEPS = 64
"""Steps that one long prompt counts for, at most."""
CLEARLY = 3.0
"""Standard deviations between two experts that are worth a copy: of thousands of equals a few will seem that different,
but waiting for certainty costs more reads than their copies."""


class ResidencyPolicy(Protocol):
    """Which experts matter most."""

    version: int
    """Changes whenever `scores` would."""

    def scores(self) -> np.ndarray:
        """float64[L, E]: higher is more worth keeping. Ties go to the lower expert id, then the lower layer."""
        ...

    def clearly_above(self, higher: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """bool[...]: whether scores are different, as far as the policy can tell."""
        ...

    def worth_swapping(self, coming: np.ndarray, going: np.ndarray) -> np.ndarray:
        """bool[...]: whether to copy experts with scores `coming` over others with scores `going`.

        Only a policy whose scores are chances, 0 to 1, of being chosen in a step can tell; others never swap.
        """
        ...

    def token_chances(self) -> np.ndarray:
        """float64[L, E], below 1: the chance that one token chooses each expert, as far as the policy knows."""
        ...

    def observe(self, counts: np.ndarray, tokens: int, rows: int) -> None:
        """Learn from a step over `tokens` tokens of `rows` requests: `int[L, E]`, how many tokens chose each expert."""
        ...


class _Ranking:
    """What a policy says whose scores are an order, and no chances: any difference counts, none is worth a copy, and
    only the profile knows chances."""

    def __init__(self, profile: HotsetProfile):
        self.version = 0
        self._token_chances = profile.token_chances()

    def token_chances(self) -> np.ndarray:
        return self._token_chances

    def clearly_above(self, higher: np.ndarray, lower: np.ndarray) -> np.ndarray:
        return higher > lower

    def worth_swapping(self, coming: np.ndarray, going: np.ndarray) -> np.ndarray:
        del going
        return np.zeros(coming.shape, bool)


class HotsetPolicy(_Ranking):
    """Static: the routing probabilities of an offline profile."""

    def __init__(self, profile: HotsetProfile):
        super().__init__(profile)
        self._scores = profile.probabilities()

    def scores(self) -> np.ndarray:
        return self._scores

    def observe(self, counts: np.ndarray, tokens: int, rows: int) -> None:
        del counts, tokens, rows


class LruPolicy(_Ranking):
    """Learning: the step of an expert's last use; among equals the profile's probability (always below 1) decides.

    It cannot tell what a swap would save, so that residency changes only where it grows or shrinks.
    """

    def __init__(self, profile: HotsetProfile, rank_steps: int = RANK_STEPS):
        super().__init__(profile)
        self._probabilities = np.minimum(profile.probabilities(), 0.5)
        self._scores = self._probabilities
        self._last_use = np.zeros(self._probabilities.shape)
        self._rank_steps = rank_steps
        self._step = 0

    def scores(self) -> np.ndarray:
        return self._scores

    def observe(self, counts: np.ndarray, tokens: int, rows: int) -> None:
        del tokens, rows
        self._step += 1
        self._last_use[counts > 0] = self._step
        if self._step % self._rank_steps == 0:
            self._scores = self._last_use + self._probabilities
            self.version += 1


class OnlinePolicy:
    """Learning: the chance that a decode of the present requests chooses an expert, which is what keeping it saves.

    The chance r of the step to come is estimated from w steps' worth of evidence that fades with `HALF_LIFE`: the steps
    in which an expert was chosen, beside the profile's expectation for `PRIOR_STEPS` more. A step with prompts in it
    is evidence for as many decodes as it has tokens per request: with c of T tokens choosing an expert, each of D
    requests' next tokens does so with chance c / T.

        r = (sum of w_i x_i + PRIOR_STEPS x_profile) / (sum of w_i + PRIOR_STEPS)
        x = [c > 0] for decodes, else 1 - exp(-D c / T)                      w = min(T / D, MOST_STEPS)

    One token chooses an expert with chance 1 - (1 - r)^(1 / D), with D the mean of the same evidence.
    """

    def __init__(self, profile: HotsetProfile):
        self.version = 0
        self._profile_chances = profile.token_chances()
        self._chosen = np.zeros(self._profile_chances.shape)  # steps, fading
        self._steps = self._row_steps = 0.0  # fading, the second times D
        self._rows = 1
        self._unranked = 0.0
        self._rank()

    def scores(self) -> np.ndarray:
        return self._scores

    def token_chances(self) -> np.ndarray:
        if self._token_chances is None:
            scores = np.minimum(self._scores, MOST_CERTAIN)
            self._token_chances = -np.expm1(np.log1p(-scores) / self._scored_rows)
        return self._token_chances

    def clearly_above(self, higher: np.ndarray, lower: np.ndarray) -> np.ndarray:
        if not self._steps:
            return higher > lower  # the profile says so
        # Fading evidence of n steps varies like an even mean of 2 n.
        variance = (higher * (1 - higher) + lower * (1 - lower)) / (2 * (self._steps + PRIOR_STEPS))
        return higher - lower > CLEARLY * np.sqrt(variance)

    def worth_swapping(self, coming: np.ndarray, going: np.ndarray) -> np.ndarray:
        """Whether the difference is clearly more than noise, and saves more reads than the copy within `HALF_LIFE`."""
        return ((coming - going) * HALF_LIFE > 1) & self.clearly_above(coming, going)

    def observe(self, counts: np.ndarray, tokens: int, rows: int) -> None:
        steps = min(tokens / rows, MOST_STEPS)
        chosen = counts > 0 if tokens == rows else steps * -np.expm1(counts * (-rows / tokens))
        left = 0.5 ** (steps / HALF_LIFE)
        self._chosen *= left
        self._chosen += chosen
        self._steps = self._steps * left + steps
        self._row_steps = self._row_steps * left + steps * rows
        self._rows = rows
        self._unranked += steps
        if self._unranked >= RANK_STEPS:
            self.version += 1
            self._rank()

    def _rank(self) -> None:
        expected = -np.expm1(-self._rows * self._profile_chances)
        steps = self._steps + PRIOR_STEPS
        self._scores = (self._chosen + PRIOR_STEPS * expected) / steps
        self._scored_rows = (self._row_steps + PRIOR_STEPS * self._rows) / steps
        self._token_chances: np.ndarray | None = None
        self._unranked = 0.0


def residency_policy(name: str, profile: HotsetProfile) -> ResidencyPolicy:
    """The policy that `expert_cache_policy` names."""
    policies = {"online": OnlinePolicy, "hotset": HotsetPolicy, "lru": LruPolicy}
    if name not in policies:
        raise ValueError(
            f"expert_cache_policy is {name!r}, it must be one of {', '.join(map(repr, policies))}"
        )
    return policies[name](profile)
