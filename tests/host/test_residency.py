"""What policies make of router counts."""

from dataclasses import replace

import numpy as np
import pytest

from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint
from rimuru_jax.host.residency import (
    HALF_LIFE,
    PRIOR_STEPS,
    RANK_STEPS,
    LruPolicy,
    OnlinePolicy,
    residency_policy,
)

MODEL = ModelFingerprint(model_type="test", num_layers=2, num_experts=4, experts_per_token=2)
COUNTS = np.array([[30, 10, 50, 12], [13, 14, 26, 45]])


def _profile() -> HotsetProfile:
    return HotsetProfile.uniform(MODEL).record(COUNTS, 100)


@pytest.mark.parametrize("name", ["online", "hotset", "lru"])
def test_without_evidence_the_profile_ranks(name: str):
    order = np.argsort(-residency_policy(name, _profile()).scores(), axis=None, kind="stable")
    np.testing.assert_array_equal(order, np.argsort(-_profile().probabilities(), axis=None, kind="stable"))
    uniform = residency_policy(name, HotsetProfile.uniform(MODEL)).scores()
    assert (uniform == uniform[0, 0]).all()


@pytest.mark.parametrize("policy", [OnlinePolicy, LruPolicy])
def test_ranks_change_with_the_version_and_not_before(policy: type[OnlinePolicy] | type[LruPolicy]):
    learning = policy(_profile())
    before = learning.scores().copy()
    for step in range(1, 3 * RANK_STEPS + 1):
        learning.observe(np.eye(2, 4, dtype=int), 1, 1)
        assert learning.version == step // RANK_STEPS
        if step < RANK_STEPS:
            np.testing.assert_array_equal(learning.scores(), before)
    assert (learning.scores() != before).any()


def test_scores_are_chances_that_fade():
    """Against sums over all steps; one request decodes, so that what it chose is what counts."""
    policy, rng = OnlinePolicy(_profile()), np.random.default_rng(0)
    steps = 5 * HALF_LIFE
    chosen = rng.integers(0, 2, (steps, 2, 4))
    for counts in chosen:
        policy.observe(counts, 1, 1)
    weight = 0.5 ** (np.arange(steps)[::-1] / HALF_LIFE)
    expected = PRIOR_STEPS * (1 - np.exp(-2 * _profile().probabilities()))
    evidence = (weight[:, None, None] * chosen).sum(axis=0)
    np.testing.assert_allclose(policy.scores(), (evidence + expected) / (weight.sum() + PRIOR_STEPS))


@pytest.mark.parametrize("name", ["online", "hotset", "lru"])
def test_without_evidence_the_profile_tells_chances(name: str):
    """100 tokens chose expert 0 of layer 0 30 times."""
    chances = residency_policy(name, _profile()).token_chances()
    np.testing.assert_allclose(chances, COUNTS / COUNTS.sum(axis=1, keepdims=True) * 2, rtol=0.4)
    assert (chances < 1).all()


def test_chances_of_a_token_do_not_depend_on_how_many_ran():
    """Steps of 40 requests, then of 2, and the same while both are remembered: each token chooses with the same chances."""
    wanted, rng = np.array([[0.02, 0.08, 0.6, 0.3], [0.7, 0.01, 0.04, 0.25]]), np.random.default_rng(0)
    profile = HotsetProfile.uniform(replace(MODEL, experts_per_token=1)).record(1000 * wanted, 1000)
    policy = OnlinePolicy(profile)
    # Steps of 40 choose all others, and who is always there might be there twice as often.
    seldom = wanted < 0.1
    for rows, steps, known, within in ((40, 400, seldom, 1.3), (2, 64, seldom, 3), (2, 600, wanted > 0, 1.3)):
        for _ in range(steps):
            policy.observe(rng.binomial(rows, wanted), rows, rows)
        found = policy.token_chances()
        assert ((found < wanted * within + 0.01) & (found > wanted / within - 0.01))[known].all()


def test_a_prompt_is_evidence_for_the_decodes_that_follow():
    """A prompt of 40 tokens, and 40 decodes that choose as it did, lead to the same experts first."""
    counts = np.array([[40, 0, 30, 10], [0, 4, 36, 40]])
    prompt, decodes = OnlinePolicy(_profile()), OnlinePolicy(_profile())
    prompt.observe(counts, 40, 1)
    for token in range(40):
        decodes.observe((counts > token).astype(int), 1, 1)
    np.testing.assert_array_equal(np.argsort(-prompt.scores()), [[0, 2, 3, 1], [3, 2, 1, 0]])
    np.testing.assert_array_equal(np.argsort(-decodes.scores()), [[0, 2, 3, 1], [3, 2, 1, 0]])
    assert prompt.version == 1 and (prompt.scores() <= 1).all()


def test_a_long_prompt_does_not_outweigh_everything():
    policy = OnlinePolicy(HotsetProfile.uniform(MODEL))
    policy.observe(np.array([[4000, 4000, 0, 0]] * 2), 4000, 1)
    for _ in range(2 * HALF_LIFE):
        policy.observe(np.array([[0, 0, 1, 1]] * 2), 1, 1)
    assert (policy.scores()[:, 2:] > policy.scores()[:, :2]).all()


def test_only_clear_differences_are_worth_a_copy():
    policy = OnlinePolicy(HotsetProfile.uniform(MODEL))
    for _ in range(HALF_LIFE):
        policy.observe(np.eye(2, 4, dtype=int), 1, 1)
    coming, going = np.array([0.9, 0.5, 0.3, 0.0, 0.1]), np.array([0.1, 0.45, 0.3, 1.0, 0.9])
    assert policy.worth_swapping(coming, going).tolist() == [True, False, False, False, False]
    for name in ("hotset", "lru"):
        assert not residency_policy(name, _profile()).worth_swapping(coming, going).any()
