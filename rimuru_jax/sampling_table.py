"""What running requests ask of the sampler, kept by slot: `build_sampling_inputs` without going over all rows in every step.

A request is written down when it gets its slot, and a step takes the numbers of its slots out of arrays. What changes from
token to token, or is as wide as a list of tokens, is still made anew, for those rows alone that ask for it.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from rimuru_jax.sampling import (
    Draws,
    Penalties,
    SamplingFeatures,
    SamplingInputs,
    SamplingRow,
    build_edits,
    build_sampling_inputs,
)

_DRAWS = [field.name for field in dataclasses.fields(Draws) if field.name != "token_index"]  # type: ignore[arg-type]
_PENALTIES = [field.name for field in dataclasses.fields(Penalties)]  # type: ignore[arg-type]


class SamplingTable:
    """The sampling parameters of `num_slots` slots."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        padding, _ = build_sampling_inputs([], num_slots + 1, vocab_size)  # of which the last row stays
        self._columns = _columns(padding)
        self._prompt_length = np.zeros(num_slots + 1, np.int32)
        self._random, self._filters, self._is_edited = np.zeros((3, num_slots + 1), bool)
        self._num_logprobs = np.full(num_slots + 1, -1)  # -1: none asked for

    def set(self, slot: int, row: SamplingRow) -> None:
        """A request has got `slot`; `row` is how its next token is to be chosen."""
        inputs, features = build_sampling_inputs([row], 1, self._vocab_size)
        for name, values in _columns(inputs).items():
            self._columns[name][slot] = values[0]
        self._prompt_length[slot] = len(row.prompt_token_ids)
        self._random[slot], self._filters[slot] = features.random, features.filters
        self._is_edited[slot] = features.biases or features.token_mask or features.penalties
        self._num_logprobs[slot] = -1 if features.num_logprobs is None else features.num_logprobs

    def all_greedy(self, slots: np.ndarray) -> bool:
        """Whether nobody at these slots asks for more than the most probable token."""
        asks = self._random[slots] | self._is_edited[slots] | (self._num_logprobs[slots] >= 0)
        return not asks.any()

    def inputs(
        self,
        slots: np.ndarray,
        context_len: np.ndarray,
        num_rows: int,
        row: Callable[[int], SamplingRow | None],
    ) -> tuple[SamplingInputs, SamplingFeatures]:
        """What `build_sampling_inputs` makes of the rows at these slots.

        Args:
            slots: `int[n]`.
            context_len: `int[n]`, tokens of prompt and output before the one to choose.
            num_rows: rows of the result, padded.
            row: the i-th row as it is now, or None if nobody reads its token any more; asked for rows whose logits are
                edited only.
        """
        n = len(slots)
        where = np.full(num_rows, len(self._random) - 1)
        where[:n] = slots
        columns = {name: column[where] for name, column in self._columns.items()}
        index = np.zeros(num_rows, np.int32)
        index[:n] = np.maximum(context_len - self._prompt_length[slots], 0)
        edited = {i: now for i in self._is_edited[slots].nonzero()[0].tolist() if (now := row(i)) is not None}
        biases, token_mask, history = build_edits(edited, num_rows, self._vocab_size)
        num_logprobs = int(self._num_logprobs[slots].max(initial=-1))
        inputs = SamplingInputs(
            draws=Draws(token_index=index, **{name: columns[name] for name in _DRAWS}),
            biases=biases,
            token_mask=token_mask,
            history=history,
            penalties=Penalties(**{name: columns[name] for name in _PENALTIES}),
        )
        return inputs, SamplingFeatures(
            random=bool(self._random[slots].any()),
            filters=bool(self._filters[slots].any()),
            biases=biases.rows.size > 0,
            token_mask=token_mask.size > 0,
            penalties=history.rows.size > 0,
            num_logprobs=None if num_logprobs < 0 else num_logprobs,
        )


def _columns(inputs: SamplingInputs) -> dict[str, np.ndarray]:
    """The arrays with one entry for each row that stays."""
    draws = {name: getattr(inputs.draws, name) for name in _DRAWS}
    return draws | {name: getattr(inputs.penalties, name) for name in _PENALTIES}
