"""What running requests ask of the sampler, kept by slot: `build_sampling_inputs` without going over all rows in every step.

A request is written down when it gets its slot, and a step takes the numbers of its slots out of arrays. What changes from
token to token, or is as wide as a list of tokens, is still made anew, for those rows alone that ask for it.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from rimuru_jax.sampling import SamplingFeatures, SamplingInputs, SamplingRow, build_sampling_inputs

_WIDE = {
    "history": -1,
    "bias_ids": -1,
    "bias_values": 0,
    "allowed_ids": -1,
    "token_mask": -1,
    "banned_ids": -1,
}
"""Fields of `SamplingInputs` with a width, and what they are padded with."""
_FILTERS = ("random", "top_k", "top_p")
"""Features that follow from numbers alone."""
_NONE = build_sampling_inputs([], 0)


class SamplingTable:
    """The sampling parameters of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        padding, _ = build_sampling_inputs([], num_slots + 1)  # of which the last row stays
        names = {field.name for field in dataclasses.fields(SamplingInputs)} - {*_WIDE, "token_index"}
        self._columns: dict[str, np.ndarray] = {name: getattr(padding, name) for name in names}
        self._filters = np.zeros((num_slots + 1, len(_FILTERS)), bool)
        self._num_logprobs = np.full(num_slots + 1, -1)  # -1: none asked for
        self._is_wide = np.zeros(num_slots + 1, bool)

    def set(self, slot: int, row: SamplingRow) -> None:
        """A request has got `slot`; `row` is how its next token is to be chosen."""
        inputs, features = build_sampling_inputs([row], 1)
        for name, column in self._columns.items():
            column[slot] = getattr(inputs, name)[0]
        self._filters[slot] = [getattr(features, name) for name in _FILTERS]
        self._num_logprobs[slot] = -1 if features.num_logprobs is None else features.num_logprobs
        self._is_wide[slot] = any(getattr(inputs, name).shape[1] for name in _WIDE)

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
            row: the i-th row as it is now, or None if nobody reads its token any more; asked for wide ones only.
        """
        n = len(slots)
        where = np.full(num_rows, len(self._is_wide) - 1)
        where[:n] = slots
        columns = {name: column[where] for name, column in self._columns.items()}
        index = np.zeros(num_rows, np.int32)
        index[:n] = np.maximum(context_len - columns["prompt_length"][:n], 0)
        wide = {i: now for i in self._is_wide[slots].nonzero()[0].tolist() if (now := row(i)) is not None}
        parts, features = build_sampling_inputs(list(wide.values()), len(wide)) if wide else _NONE
        for name, pad in _WIDE.items():
            part: np.ndarray = getattr(parts, name)
            columns[name] = np.full((num_rows, part.shape[1]), pad, part.dtype)
            columns[name][list(wide)] = part
        filters = dict(zip(_FILTERS, self._filters[slots].any(axis=0).tolist(), strict=True))
        num_logprobs = int(self._num_logprobs[slots].max(initial=-1))
        return SamplingInputs(token_index=index, **columns), dataclasses.replace(
            features, num_logprobs=None if num_logprobs < 0 else num_logprobs, **filters
        )
