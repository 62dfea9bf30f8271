"""Sampling parameters by slot against the same made row by row."""

from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_jax.sampling import SamplingFeatures, SamplingRow, build_sampling_inputs
from rimuru_jax.sampling_params import SamplingParams
from rimuru_jax.sampling_table import SamplingTable

VOCAB = 90
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
    {"logit_bias": {3: 1.5, 9: -2.0}},
    {"allowed_token_ids": [1, 2, 3]},
    {"min_tokens": 4},
]


def sampling_row(kind: int, seed: int, prompt: int, output: int) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**KINDS[kind]),
        seed=seed,
        prompt_token_ids=range(prompt),
        output_token_ids=range(10, 10 + output),
        num_output_tokens=output,
        stop_token_ids=(7, 8),
        token_mask=np.arange(3, dtype=np.int32) if kind == 0 and seed % 2 else None,
    )


rows = st.tuples(
    st.integers(0, len(KINDS) - 1), st.integers(0, 2**64 - 1), st.integers(1, 9), st.integers(0, 9)
)


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=6), st.permutations(range(6)), st.lists(rows, max_size=6))
def test_equals_row_by_row(wanted, slots, before):
    table = SamplingTable(6, VOCAB)
    for slot, (kind, seed, prompt, _) in enumerate(before):  # other requests had the slots
        table.set(slot, sampling_row(kind, seed, prompt, 0))
    for slot, (kind, seed, prompt, _) in zip(slots, wanted, strict=False):
        table.set(slot, sampling_row(kind, seed, prompt, 0))
    now = [sampling_row(*row) for row in wanted]
    context_len = np.array([prompt + output for _, _, prompt, output in wanted])
    found, features = table.inputs(np.array(slots[: len(now)]), context_len, 8, now.__getitem__)
    expected, expected_features = build_sampling_inputs(now, 8, VOCAB)
    assert features == expected_features
    plain = all(row.params == SamplingParams(temperature=0.0) and row.token_mask is None for row in now)
    assert table.all_greedy(np.array(slots[: len(now)])) == plain
    assert not plain or features == SamplingFeatures()
    for (name, mine), theirs in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=jax.tree_util.keystr(name), strict=True)


def test_who_has_ended_asks_for_no_edits():
    table = SamplingTable(2, VOCAB)
    for slot, kind in enumerate((4, 1)):
        table.set(slot, sampling_row(kind, 0, 3, 0))
    inputs, features = table.inputs(np.array([0, 1]), np.array([3, 3]), 2, lambda i: None)
    assert inputs.history.rows.shape == (0,) and not features.penalties
    assert features.filters  # the other goes on


def test_nothing_is_shared_with_the_table():
    table = SamplingTable(1, VOCAB)
    table.set(0, sampling_row(1, 0, 3, 0))
    inputs, _ = table.inputs(np.array([0]), np.array([3]), 1, lambda i: None)
    inputs.draws.temperature[:] = 9  # type: ignore[index]
    again, _ = table.inputs(np.array([0]), np.array([3]), 1, lambda i: None)
    assert again.draws.temperature.tolist() == [np.float32(0.7)]
