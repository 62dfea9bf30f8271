"""How long a step takes: every layer is as slow as the slowest of what it reads, multiplies and fetches from the host.

A roofline per part of a layer. Copies from the host run beside the computing of the same layer, as they do in the
kernels; a page that is read in place takes the same link.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rimuru_jax.experiments.cards import Card
from rimuru_jax.models.config import Attention, ElementBytes, ModelConfig
from rimuru_jax.models.registry import tensor_names
from rimuru_jax.models.weights import resident_sources
from rimuru_jax.pallas.paged_moe.mosaic_gpu import token_tile


class Work(NamedTuple):
    """Tokens of one row in a step, and the tokens of its context once the step is done."""

    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class StepTime:
    seconds: float
    host_seconds: float
    """For which the link to the host is busy."""
    host_bytes: float


class CostModel:
    """Of one model on one card.

    Args:
        popularity: float64[L, E], share of a layer's (token, choice) pairs that each expert gets; rows sum to 1.
        fused: whether the experts' kernel finds weights wherever they lie and fetches while it computes. If not, the
            weights that a layer needs are first copied side by side, from pool and host, and then multiplied.
        experts_on_host: as in `ModelSpec`.
    """

    def __init__(
        self,
        model: ModelConfig,
        size: ElementBytes,
        card: Card,
        popularity: np.ndarray,
        *,
        fused: bool = True,
        experts_on_host: bool = False,
    ) -> None:
        self.model, self.card, self._size, self._fused = model, card, size, fused
        self._experts_on_host = experts_on_host
        moe = model.moe
        self.expert_bytes = moe.matrices * moe.intermediate_size * model.hidden_size * size.weight
        # A token takes each expert at most once, so that no expert gets more than one of its choices.
        self._chance = np.minimum(popularity * moe.num_experts_per_tok, 1.0)
        sources = resident_sources(model, tensor_names(model.model_type)[0])
        parameters = {path: math.prod(source.shape) for path, source in sources.items()}
        embedding = model.vocab_size * model.hidden_size
        self._layer_parameters = sum(parameters.values()) - embedding * (1 + (("head",) in parameters))
        self._head_parameters = embedding
        self._attention = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
        states = [
            state
            for layer in model.layers
            for state in (layer.mixer.states() if layer.mixer else ())
            if state.token_axis is None
        ]
        self._state_bytes = sum(
            math.prod(state.page_shape) * state.run * (size.recurrent if state.recurrent else size.state)
            for state in states
        )

    def step(self, rows: Sequence[Work], resident: np.ndarray, loaded: np.ndarray) -> StepTime:
        """The time of a step over `rows`.

        Args:
            resident: bool[L, E], experts in the pool.
            loaded: bool[L, E], experts that the step copies into loading buffers.
        """
        card, model = self.card, self.model
        tokens = sum(row.tokens for row in rows)
        fixed = card.step_seconds + card.layer_seconds * len(model.layers)
        dense = self._product(self._layer_parameters, tokens) + self._product(
            self._head_parameters, len(rows)
        )
        mixing = self._mixing(rows)

        experts, touched = self._experts(tokens)
        # What one layer computes is shared out evenly; what it fetches is its own.
        other = (dense + mixing + fixed) / len(model.moe_layers)
        if not self._fused:
            host_bytes = self.expert_bytes * np.where(resident, 0.0, touched).sum(axis=1)
            gathered = self.expert_bytes * np.where(resident, touched, 0.0).sum(axis=1)
            host = host_bytes / card.host_rate
            seconds = float(np.sum(other + experts + host + 2 * gathered / card.memory_rate))
            return StepTime(seconds, float(host.sum()), float(host_bytes.sum()))
        in_place = np.where(resident | loaded, 0.0, touched)
        pairs, experts_of_layer = tokens * model.moe.num_experts_per_tok, model.moe.num_experts
        # What is read in place is read for every tile of tokens.
        tile = token_tile(pairs, experts_of_layer, from_host=self._experts_on_host)
        reads = np.maximum(1.0, self._chance * tokens / tile)
        host_bytes = self.expert_bytes * (loaded.sum(axis=1) + (in_place * reads).sum(axis=1))
        host = host_bytes / card.host_rate
        # The copies of a layer run while the layer before computes its experts.
        copies = np.roll(host, -1) if loaded.any() else host
        seconds = float(np.sum(other + np.maximum(experts, copies)))
        return StepTime(seconds, float(host.sum()), float(host_bytes.sum()))

    def _product(self, parameters: int, tokens: int) -> float:
        """Weights read once against products with all tokens."""
        reading = parameters * self._size.weight / self.card.memory_rate
        return max(reading, 2 * parameters * tokens / self.card.product_rate)

    def _mixing(self, rows: Sequence[Work]) -> float:
        """Attention over the contexts, and states read and written."""
        card = self.card
        seconds = 2 * self._state_bytes * len(rows) / card.memory_rate
        tokens = np.array([row.tokens for row in rows], float)
        context = np.array([row.context for row in rows], float)
        for mixer in self._attention:
            width = mixer.num_kv_heads * mixer.head_dim
            seen = context if mixer.sliding_window is None else np.minimum(context, mixer.sliding_window)
            reading = float(seen.sum()) * 2 * width * self._size.state / card.memory_rate
            # Query i of n sees what was there before and half of the others, on average.
            pairs = float((tokens * np.maximum(seen - tokens / 2, 1)).sum())
            products = 4 * pairs * mixer.num_heads * mixer.head_dim / card.product_rate
            seconds += max(reading, products)
        return seconds

    def _experts(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the experts of each layer when all are in the pool, and the chance that each is touched."""
        moe, card = self.model.moe, self.card
        touched = 1 - (1 - self._chance) ** tokens
        pairs = tokens * moe.num_experts_per_tok
        rows = pairs * (4 * self.model.hidden_size + 2 * moe.intermediate_size) * self._size.state
        weights = touched.sum(axis=1) * self.expert_bytes / card.memory_rate
        operations = 2 * moe.matrices * moe.intermediate_size * self.model.hidden_size * pairs
        # Reading weights and products of small tiles overlap little: their sum is what was measured, not the larger.
        return weights + max(rows / card.memory_rate, operations / card.product_rate), touched
