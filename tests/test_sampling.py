from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rimuru_jax.programs import Programs
from rimuru_jax.sampler import Sampler
from rimuru_jax.sampling import (
    BIAS_PIECE,
    DRAWS_AT_ONCE,
    HISTORY_PIECE,
    SampledTokens,
    SamplingFeatures,
    SamplingRow,
    build_sampling_inputs,
    choose_greedily,
    compute_logprobs,
    edit_logits,
    kept_tokens,
    sample,
)
from rimuru_jax.sampling_params import SamplingParams

sample_jit = jax.jit(sample, static_argnames="features")
edit_jit = jax.jit(edit_logits, static_argnames="features")
kept_jit = jax.jit(kept_tokens)
ALL_FILTERS = SamplingFeatures(random=True, filters=True)


@pytest.fixture(autouse=True, scope="module")
def strict_modes() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def row(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    *,
    seed: int = 0,
    index: int | None = None,
    stop: tuple[int, ...] = (),
    mask: int | None = None,
    **params: Any,
) -> SamplingRow:
    output = output or []
    return SamplingRow(
        params=SamplingParams(**params),
        seed=seed,
        prompt_token_ids=prompt or [0],
        output_token_ids=output,
        num_output_tokens=len(output) if index is None else index,
        stop_token_ids=stop,
        token_mask=None if mask is None else np.array([mask], np.uint32).view(np.int32),
    )


def run(logits: np.ndarray, rows: list[SamplingRow]) -> SampledTokens:
    """As a whole, by the programs of the sampler, and as a step does it where that is enough."""
    inputs, features = build_sampling_inputs(rows, *logits.shape)
    whole = sample_jit(jnp.asarray(logits), inputs, features=features)
    given = jnp.asarray(logits)
    parts = Sampler(Programs(None, None, shared=True), logits.shape[1])(given, inputs, features)
    np.testing.assert_array_equal(given, logits, "a step's logits stay as they are")
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    if features == SamplingFeatures():
        jax.tree.map(np.testing.assert_array_equal, whole, choose_greedily(jnp.asarray(logits)))
    return whole


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


# The specification of the filters: by sorting, in float64, one row at a time.


def reference_probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    exact = logits.astype(np.float64)
    weights = np.exp((exact - exact.max()) / np.float64(np.float32(temperature)))
    return weights / weights.sum()


def reference_kept(
    logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float
) -> np.ndarray:
    probabilities = reference_probabilities(logits, temperature)
    # p >= min_p * max(p), compared as logarithms: probabilities that differ by 1e-30 are not equal.
    exact = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        keep = (exact - exact.max()) / temperature >= np.log(min_p)
    descending = np.sort(logits)[::-1]
    if 0 < top_k < len(logits):
        keep &= logits >= descending[top_k - 1]
    if top_p < 1:
        left = np.where(keep, probabilities, 0.0)
        order = np.argsort(-logits, kind="stable")
        mass = np.cumsum(left[order]) / left.sum()
        last = min(np.searchsorted(mass, top_p), len(logits) - 1)
        keep &= logits >= logits[order[last]]
    return keep


def kept(logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    one = SamplingRow(
        params=params,
        seed=0,
        prompt_token_ids=[0],
        output_token_ids=[],
        num_output_tokens=0,
        stop_token_ids=(),
    )
    inputs, _ = build_sampling_inputs([one] * len(logits), *logits.shape)
    return np.asarray(kept_jit(jnp.asarray(logits), inputs.draws))


def check_against_reference(
    logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float, slack: float = 2e-6
) -> None:
    """Equal to the reference, up to the float32 rounding of masses (slack) exactly at a boundary."""
    got = kept(logits, temperature, min_p, top_k, top_p)
    for mask, values in zip(got, logits, strict=True):
        least = reference_kept(
            values, temperature, min(min_p * (1 + slack), 1.0), top_k, max(top_p - slack, 1e-12)
        )
        most = reference_kept(values, temperature, min_p * (1 - slack), top_k, min(top_p + slack, 1.0))
        assert np.all(mask[least]), (least & ~mask).nonzero()
        assert not np.any(mask & ~most), (mask & ~most).nonzero()


FILTERS = [
    (1.0, 0.0, 0, 1.0),
    (1.0, 0.0, 1, 1.0),
    (0.7, 0.0, 5, 1.0),
    (1.0, 0.0, 10**9, 1.0),
    (1.0, 0.0, 0, 0.9),
    (1.5, 0.0, 0, 1e-6),
    (0.3, 0.0, 0, 0.999),
    (1.0, 0.1, 0, 1.0),
    (1.0, 1.0, 0, 1.0),
    (0.8, 0.02, 12, 0.7),
    (1.2, 0.05, 3, 0.95),
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_on_random_logits(filters):
    logits = normal(8, 100, seed=1)
    check_against_reference(logits, *filters)
    exact = np.stack([reference_kept(values, *filters) for values in logits])
    np.testing.assert_array_equal(kept(logits, *filters), exact)


ADVERSARIAL = {
    "all equal": np.zeros(32),
    "all equal, negative": np.full(32, -7.25),
    "three levels": np.repeat([2.0, 1.0, 0.0, 2.0], 8),
    "signed zeros": np.where(np.arange(32) % 2 == 0, 0.0, -0.0),
    "one hot": np.where(np.arange(32) == 17, 0.0, -np.inf),
    "two left": np.where(np.arange(32) % 31 == 0, -5.0, -np.inf),
    "half masked": np.where(np.arange(32) < 16, -np.inf, np.arange(32) / 8),
    "huge range": np.concatenate([[3e38, -3e38, 1e30, -1e30], np.linspace(-100, 100, 28)]),
    "huge, close": 1e6 + np.arange(32) / 4,
    "tiny differences": np.nextafter(np.float32(1.0), np.float32(2.0)) * np.ones(32) - (np.arange(32) < 9) * 2**-23,
    "small magnitudes": (np.arange(32) - 16) * 1e-30,
    "powers": -np.arange(32) * np.log(2.0),
}  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_on_adversarial_logits(filters):
    check_against_reference(np.stack(list(ADVERSARIAL.values())).astype(np.float32), *filters)


def test_ties_stay_together():
    logits = np.array([[0.0, 1.0, 1.0, 1.0, 2.0, -1.0, -1.0, -1.0]], np.float32)
    assert kept(logits, 1.0, 0.0, 2, 1.0)[0].tolist() == [False, True, True, True, True, False, False, False]
    # softmax: 0.42 for the 2.0, 0.155 for each 1.0: 0.5 needs one of three equal tokens, so all three stay.
    assert kept(logits, 1.0, 0.0, 0, 0.5)[0].tolist() == [False, True, True, True, True, False, False, False]
    assert kept(logits, 1.0, 0.0, 0, 0.4)[0].tolist() == [False] * 4 + [True] + [False] * 3


def test_top_p_counts_what_top_k_left():
    # Probabilities 0.5, 0.25, 0.125, ...: top_k=2 renormalises to 2/3, 1/3, so 0.6 is reached by the first alone.
    logits = (-np.arange(8) * np.log(2.0)).astype(np.float32)[None]
    assert kept(logits, 1.0, 0.0, 2, 0.6)[0].sum() == 1
    assert kept(logits, 1.0, 0.0, 0, 0.6)[0].sum() == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    values=st.lists(
        st.one_of(st.integers(-4, 4).map(float), st.floats(-50, 50, width=32), st.just(-np.inf)),
        min_size=16,
        max_size=16,
    ).filter(lambda values: max(values) > -np.inf),
    temperature=st.floats(0.05, 5.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    top_k=st.integers(0, 18),
    top_p=st.floats(0.01, 1.0),
)
def test_filters_property(values, temperature, min_p, top_k, top_p):
    check_against_reference(np.array([values], np.float32), temperature, min_p, top_k, top_p)


def test_filters_on_a_large_vocabulary():
    logits = np.stack([normal(151936, seed=3), np.round(normal(151936, seed=4))])
    check_against_reference(logits, 0.8, 0.0, 20_000, 0.95, slack=1e-4)
    check_against_reference(logits, 1.0, 0.0, 50, 0.8)
    # Independent of any tolerance: the k-th largest is found exactly.
    assert kept(logits[:1], 1.0, 0.0, 1234, 1.0).sum() == 1234


# Greedy, temperature and random numbers.


def test_greedy_is_argmax_and_compiles_nothing_else():
    logits = normal(5, 50)
    logits[2, [7, 30]] = 99.0
    inputs, features = build_sampling_inputs([row(temperature=0.0)] * 4, 5, 50)
    assert features == SamplingFeatures()
    sampled = sample_jit(jnp.asarray(logits), inputs, features=features)
    assert sampled.token_ids.tolist() == logits.argmax(axis=1).tolist()
    assert sampled.token_ids[2] == 7
    assert sampled.logprobs is None
    primitives = {
        str(e.primitive) for e in jax.make_jaxpr(lambda x: sample(x, inputs, features))(logits).eqns
    }
    assert not primitives & {"while", "scan", "sort", "top_k", "random_bits", "scatter", "exp"}


def test_the_filters_do_not_sort():
    inputs, features = build_sampling_inputs([row(top_k=5, top_p=0.5, min_p=0.1)], 1, 50)
    text = str(jax.make_jaxpr(lambda x: sample(x, inputs, features))(normal(1, 50)))
    assert "random_bits" in text
    assert "sort" not in text and "top_k" not in text


@pytest.mark.parametrize("count", [9, 2 * DRAWS_AT_ONCE])
def test_a_row_gives_the_same_token_alone_and_in_any_batch(count):
    logits = normal(count, 200, scale=1.0)
    rows = [
        row(seed=i, index=i * 3, temperature=[0.5, 1.0, 2.0][i % 3], top_k=[0, 20][i % 2], top_p=[1.0, 0.9, 0.5][i % 3])
        for i in range(count)
    ]  # fmt: skip
    together = run(logits, rows).token_ids.tolist()
    alone = []
    for i in range(count):
        inputs, _ = build_sampling_inputs([rows[i]], 1, 200)
        sampled = sample_jit(jnp.asarray(logits[i : i + 1]), inputs, features=ALL_FILTERS)
        alone.append(int(sampled.token_ids[0]))
    order = np.random.default_rng(0).permutation(count)
    shuffled = run(logits[order], [rows[i] for i in order]).token_ids.tolist()
    mixed = run(logits, [rows[0], *[row(temperature=0.0)] * (count - 1)]).token_ids.tolist()
    assert together == alone
    assert shuffled == [together[i] for i in order]
    assert mixed == [together[0], *logits[1:].argmax(axis=1).tolist()]
    assert len(set(together)) > 4


def test_random_numbers_are_fold_in_of_seed_and_token_index():
    logits = normal(8, 64, scale=1.0)
    rows, expected = [], []
    for values, (seed, index) in zip(logits, [(0, 0), (5, 7), (2**31 - 1, 100), (5, 8)] * 2, strict=True):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
        noise = np.asarray(jax.random.gumbel(key, (64,), jnp.float32, mode="high"))
        expected.append(int(np.argmax(values.astype(np.float64) / 0.5 + noise)))
        rows.append(row(seed=seed, index=index, temperature=0.5))
    assert run(logits, rows).token_ids.tolist() == expected


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1, -1, 7])
def test_all_64_bits_of_the_seed_matter(seed):
    def tokens(seed: int) -> list[int]:
        flat = np.zeros((8, 64), np.float32)
        return [
            token
            for start in range(0, 64, 8)
            for token in run(flat, [row(seed=seed, index=start + i) for i in range(8)]).token_ids.tolist()
        ]

    first = tokens(seed)
    assert first == tokens(seed)
    for bit in (0, 31, 32, 63):
        assert sum(a == b for a, b in zip(first, tokens(seed ^ (1 << bit)), strict=True)) < 12


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """The statistic, and the value it exceeds by chance once in 1e9."""
    total = counts.sum()
    possible = probabilities * total >= 5
    observed = np.append(counts[possible], counts[~possible].sum())
    expected = np.append(probabilities[possible], probabilities[~possible].sum()) * total
    if expected[-1] == 0:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    return float(((observed - expected) ** 2 / expected).sum()), float(
        stats.chi2.isf(1e-9, len(observed) - 1)
    )


DRAWS = 20_000


@pytest.mark.parametrize("over", ["seeds", "token indices"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.15, "top_k": 30, "top_p": 0.95},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params, over):
    values = normal(40, seed=7, scale=1.5)
    logits = jnp.broadcast_to(jnp.asarray(values), (DRAWS, 40))
    inputs, features = build_sampling_inputs([row(**params)], DRAWS, 40)
    features = features if len(params) == 1 else ALL_FILTERS
    numbers = np.arange(DRAWS, dtype=np.uint32)
    if over == "seeds":
        seeds, indices = np.stack([np.zeros_like(numbers), numbers], axis=1), np.zeros(DRAWS, np.int32)
    else:
        seeds, indices = np.tile(np.array([0, 11], np.uint32), (DRAWS, 1)), numbers.astype(np.int32)
    same = {
        name: np.repeat(getattr(inputs.draws, name)[:1], DRAWS, axis=0)
        for name in ("temperature", "min_p", "top_k", "top_p")
    }
    draws = inputs.draws.replace(seed=seeds, token_index=indices, **same)  # type: ignore[attr-defined]
    inputs = inputs.replace(draws=draws)  # type: ignore[attr-defined]
    counts = np.bincount(np.asarray(sample_jit(logits, inputs, features=features).token_ids), minlength=40)

    def exact(temperature: float, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
        keep = reference_kept(values, temperature, min_p, top_k, top_p)
        weights = np.where(keep, reference_probabilities(values, temperature), 0.0)
        return weights / weights.sum()

    statistic, limit = chi_square(counts, exact(**params))
    assert statistic < limit
    # The test sees a temperature that is 25 % off, and filters that were forgotten.
    wrong, limit = chi_square(counts, exact(**{**params, "temperature": params["temperature"] * 1.25}))
    assert wrong > 1.5 * limit
    if len(params) > 1:
        wrong, limit = chi_square(counts, exact(params["temperature"]))
        assert wrong > 5 * limit


def test_a_large_flat_vocabulary_is_drawn_evenly():
    """Coarse noise would tie and favour small ids."""
    rows = [row(seed=s) for s in range(32)]
    vocab = 152_000
    tokens = np.asarray(run(np.zeros((32, vocab), np.float32), rows).token_ids)
    assert len(set(tokens.tolist())) > 28
    assert abs(tokens.mean() / vocab - 0.5) < 6 * np.sqrt(1 / 12 / 32)


# Edits of the logits.


def reference_edits(logits: np.ndarray, one: SamplingRow) -> np.ndarray:
    """Token by token, in float64."""
    p = one.params
    edited = logits.astype(np.float64)
    for token, bias in (p.logit_bias or {}).items():
        edited[token] += bias
    for token in range(len(edited)):
        if p.allowed_token_ids and token not in p.allowed_token_ids:
            edited[token] = -np.inf
        if one.token_mask is not None and not int(one.token_mask[0]) >> token & 1:
            edited[token] = -np.inf
        if one.num_output_tokens < p.min_tokens and token in one.stop_token_ids:
            edited[token] = -np.inf
        prompt, output = list(one.prompt_token_ids), list(one.output_token_ids)
        if token in prompt or token in output:
            edited[token] *= 1 / p.repetition_penalty if edited[token] > 0 else p.repetition_penalty
        edited[token] -= p.frequency_penalty * output.count(token)
        edited[token] -= p.presence_penalty * (token in output)
    return edited


EDITED_ROWS = [
    row(logit_bias={3: 5.0, 0: -100.0, 29: 0.5}),
    row(allowed_token_ids=[1, 5, 29]),
    row(mask=1 << 29 | 1 << 3 | 1),
    row(mask=2**32 - 2, repetition_penalty=1.3, prompt=[0, 1]),
    row(min_tokens=3, output=[4, 4], stop=(2, 7)),
    row(min_tokens=2, output=[4, 4], stop=(2, 7)),
    row(repetition_penalty=1.3, prompt=[0, 1, 1, 9], output=[5, 29]),
    row(repetition_penalty=0.7, prompt=[29], output=[]),
    row(presence_penalty=1.5, prompt=[3, 3], output=[3, 8, 8, 8]),
    row(frequency_penalty=-0.5, prompt=[2], output=[8, 8, 1]),
    row(
        logit_bias={1: 2.0}, allowed_token_ids=range(20), min_tokens=9, stop=(0, 4), repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3, prompt=list(range(10)), output=[1, 1, 4, 12] * 2,
    ),
    row(),
]  # fmt: skip


def test_edits_equal_the_reference():
    logits = normal(len(EDITED_ROWS) + 1, 30, seed=5)
    expected = np.stack([reference_edits(v, r) for v, r in zip(logits, [*EDITED_ROWS, row()], strict=True)])
    inputs, features = build_sampling_inputs(EDITED_ROWS, *logits.shape)
    assert features.biases and features.token_mask and features.penalties
    together = edit_jit(jnp.asarray(logits), inputs, features=features)
    np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-5)
    for i, one in enumerate(EDITED_ROWS):
        _, features = build_sampling_inputs([one], 1, 30)
        changed = not np.array_equal(expected[i], logits[i].astype(np.float64))
        assert changed == (features != SamplingFeatures(random=True))


def test_edits_change_the_choice():
    logits = np.array([[5.0, 4.0, 3.0, 2.0]], np.float32)
    cases = [
        (row(temperature=0.0), 0),
        (row(temperature=0.0, logit_bias={3: 50.0}), 3),
        (row(temperature=0.0, allowed_token_ids=[2, 3]), 2),
        (row(temperature=0.0, min_tokens=1, stop=(0, 1)), 2),
        (row(temperature=0.0, repetition_penalty=2.0, prompt=[0], output=[1]), 2),
        (row(temperature=0.0, presence_penalty=1.5, prompt=[1], output=[0]), 1),
        (row(temperature=0.0, frequency_penalty=0.6, prompt=[1, 1, 1], output=[0, 0]), 1),
        (row(logit_bias={3: 100.0}), 3),
    ]
    got = run(np.repeat(logits, len(cases), axis=0), [one for one, _ in cases]).token_ids.tolist()
    assert got == [expected for _, expected in cases]


def test_edits_of_more_than_one_piece():
    vocab = 3000
    logits = normal(2, vocab, seed=6)
    rng = np.random.default_rng(1)
    rows = [
        row(logit_bias={token: token % 7 - 3.0 for token in range(0, vocab, 2)}, min_tokens=1, stop=(4, 5)),
        row(
            rng.integers(0, vocab, HISTORY_PIECE).tolist(), rng.integers(0, 50, HISTORY_PIECE).tolist(),
            presence_penalty=0.5, frequency_penalty=0.01, repetition_penalty=1.2,
        ),
    ]  # fmt: skip
    inputs, features = build_sampling_inputs(rows, 2, vocab)
    assert inputs.biases.rows.shape == (2 * BIAS_PIECE,) and inputs.history.rows.shape == (2 * HISTORY_PIECE,)
    edited = np.asarray(edit_jit(jnp.asarray(logits), inputs, features=features))
    np.testing.assert_allclose(edited[0], reference_edits(logits[0], rows[0]), rtol=1e-5, atol=1e-5)
    prompt, output = (
        np.bincount(ids, minlength=vocab) for ids in (rows[1].prompt_token_ids, rows[1].output_token_ids)
    )
    expected = np.where(
        prompt + output > 0, np.where(logits[1] > 0, logits[1] / 1.2, logits[1] * 1.2), logits[1]
    )
    np.testing.assert_allclose(edited[1], expected - 0.01 * output - 0.5 * (output > 0), rtol=1e-5, atol=1e-4)
    run(logits, rows)


# Log-probabilities and broken logits.


def reference_logprobs(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("num_logprobs", [4, 16, 32, 64])
def test_compute_logprobs(num_logprobs):
    logits = np.round(normal(6, 80, seed=8), 1)  # some are equal
    logits[1, 40:] = -np.inf
    logits[2] *= 100
    targets = np.array([0, 39, 5, 79, 11, 60], np.int32)
    got = jax.jit(compute_logprobs, static_argnums=2)(jnp.asarray(logits), jnp.asarray(targets), num_logprobs)
    expected = reference_logprobs(logits)
    rows = np.arange(6)
    np.testing.assert_allclose(got.logprob, expected[rows, targets], rtol=1e-5, atol=1e-5)
    assert got.rank.tolist() == [1 + int((v > v[t]).sum()) for v, t in zip(logits, targets, strict=True)]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_logprobs]
    possible = expected[rows[:, None], order] > -np.inf
    np.testing.assert_array_equal(np.where(possible, got.top_ids, 0), np.where(possible, order, 0))
    np.testing.assert_allclose(got.top_logprobs, expected[rows[:, None], order], rtol=1e-5, atol=1e-5)


def test_reported_logprobs_are_those_of_the_model_itself():
    logits = normal(2, 40, seed=9)
    rows = [
        row(temperature=0.3, logit_bias={7: 100.0}, logprobs=3),
        row(temperature=0.0, logprobs=0, presence_penalty=1.0),
    ]
    sampled = run(logits, rows)
    assert sampled.logprobs is not None
    token = int(sampled.token_ids[0])
    assert token == 7
    np.testing.assert_allclose(sampled.logprobs.logprob[0], reference_logprobs(logits)[0, 7], rtol=1e-5)
    assert int(sampled.logprobs.rank[0]) == 1 + int((logits[0] > logits[0, 7]).sum())
    assert int(sampled.logprobs.rank[1]) == 1
    assert sampled.logprobs.top_ids.shape == (2, 16)


def test_num_logprobs_never_exceeds_the_vocabulary():
    sampled = run(normal(1, 6), [row(temperature=0.0, logprobs=6)])
    assert sampled.logprobs is not None
    assert sorted(sampled.logprobs.top_ids[0].tolist()) == list(range(6))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 3, "top_p": 0.9}], ids=str)
def test_broken_rows_are_flagged_and_leave_the_others_alone(params):
    logits = normal(9, 200, seed=10)
    rows = [row(seed=i, **params) for i in range(9)]
    clean = run(logits, rows)
    assert clean.finite.tolist() == [True] * 9
    broken = logits.copy()
    broken[1, 5] = np.nan
    broken[2, :] = np.nan
    broken[3, 5] = np.inf
    broken[4, :] = -np.inf
    broken[5, :190] = -np.inf
    sampled = run(broken, rows)
    assert sampled.finite.tolist() == [True, False, False, False, False, True, True, True, True]
    for i in (0, 6, 7, 8):
        assert sampled.token_ids[i] == clean.token_ids[i]
    assert np.all((np.asarray(sampled.token_ids) >= 0) & (np.asarray(sampled.token_ids) < 200))
    assert sampled.token_ids[5] >= 190


def test_a_row_without_any_allowed_token_is_flagged():
    rows = [
        row(temperature=0.0, allowed_token_ids=[2], min_tokens=1, stop=(2,)),
        row(temperature=0.0, allowed_token_ids=[2]),
    ]
    sampled = run(normal(2, 10), rows)
    assert sampled.finite.tolist() == [False, True]
    assert sampled.token_ids[1] == 2


def test_a_masked_nan_is_still_a_broken_row():
    logits = normal(1, 10)
    logits[0, 3] = np.nan
    assert run(logits, [row(temperature=0.0, allowed_token_ids=[2])]).finite.tolist() == [False]


def test_bfloat16_logits():
    logits = jnp.asarray(normal(2, 50)).astype(jnp.bfloat16)
    inputs, features = build_sampling_inputs([row(temperature=0.0, logprobs=1)], 2, 50)
    sampled = sample_jit(logits, inputs, features=features)
    assert sampled.token_ids[0] == np.asarray(logits.astype(jnp.float32))[0].argmax()
    assert sampled.logprobs is not None and sampled.logprobs.logprob.dtype == jnp.float32


# The host side.


def test_build_pads_rows_and_pieces():
    rows = [
        row(prompt=[7, 8], output=[3], repetition_penalty=1.1, logit_bias=dict.fromkeys(range(17), 1.0)),
        row(temperature=1e-7, logprobs=5, prompt=[1] * 99),
    ]
    inputs, features = build_sampling_inputs(rows, 4, 40)
    assert features == SamplingFeatures(random=True, penalties=True, biases=True, num_logprobs=16)
    assert inputs.history.rows.shape == inputs.history.token_ids.shape == (HISTORY_PIECE,)
    assert inputs.history.token_ids[:4].tolist() == [~7, ~8, 3, 0]
    assert inputs.history.rows[:4].tolist() == [0, 0, 0, 4]
    assert inputs.biases.rows[16:18].tolist() == [0, 4] and inputs.biases.values.shape == (BIAS_PIECE,)
    assert inputs.token_mask.shape == (4, 0)
    assert inputs.draws.temperature.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert inputs.draws.token_index.tolist() == [1, 0, 0, 0]
    plain, features = build_sampling_inputs([row(allowed_token_ids=[1, 33])], 2, 40)
    assert plain.biases.rows.shape == plain.history.rows.shape == (0,) and features.token_mask
    assert plain.token_mask.tolist() == [[2, 2], [-1, -1]]


def test_no_more_logprobs_than_wanted_are_compiled_anew():
    widths = {
        n: build_sampling_inputs([row(logprobs=n)], 1, 100)[1].num_logprobs for n in (0, 16, 17, 20, 33, 90)
    }
    assert widths == {0: 16, 16: 16, 17: 32, 20: 32, 33: 64, 90: 100}


def test_filters_of_greedy_rows_compile_nothing():
    _, features = build_sampling_inputs([row(temperature=0.0, top_k=5, top_p=0.5)], 1, 10)
    assert features == SamplingFeatures()
    assert hash(features) == hash(SamplingFeatures())


def test_build_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="2 rows came; wanted at most num_rows, 1"):
        build_sampling_inputs([row(), row()], 1, 9)
    for index in (0, 3):
        with pytest.raises(ValueError, match=f"num_output_tokens is {index} with 1 known tokens"):
            build_sampling_inputs([row(output=[1], index=index, presence_penalty=1.0)], 1, 9)
    build_sampling_inputs([row(output=[1], index=3)], 1, 9)
