"""Loading ahead against reading in place: by the share of absent experts that a step would need."""

import numpy as np

from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint
from rimuru_jax.host.prefetch import WORTH_LOADING, absent_and_loaded, loads_ahead
from rimuru_jax.host.residency import OnlinePolicy


def test_by_a_draw():
    rng = np.random.default_rng(0)
    for tokens, experts, chosen in (
        (1, 128, 8),
        (16, 128, 8),
        (20, 128, 8),
        (64, 128, 8),
        (15, 60, 4),
        (20, 60, 4),
    ):
        draws = np.argsort(rng.random((400, tokens, experts)), axis=2)[:, :, :chosen]
        share = np.mean([len(np.unique(draw)) for draw in draws]) / experts
        assert abs(share - WORTH_LOADING) > 0.02, "too near to tell by a draw"
        chances = np.full((2, experts), chosen / experts)
        assert loads_ahead("auto", tokens, chances) == (share > WORTH_LOADING)


def test_what_is_seldom_chosen_is_not_loaded_though_much_is_chosen():
    """Of 64 experts the rarer half is away; the policy knows only what decodes of 16 requests chose."""
    rng, experts, rows = np.random.default_rng(0), 64, 16
    chances = 0.6 * np.arange(1, experts + 1) ** -0.8
    model = ModelFingerprint(model_type="test", num_layers=1, num_experts=experts, experts_per_token=8)
    policy = OnlinePolicy(HotsetProfile.uniform(model))
    for _ in range(300):
        policy.observe(rng.binomial(rows, chances)[None], rows, rows)
    away = np.argsort(policy.scores()[0])[: experts // 2]
    decisions = []
    for tokens in (4, 16, 24, 64, 96, 256):
        share = (rng.random((100, tokens, len(away))) < chances[away]).any(axis=1).mean()
        assert abs(share - WORTH_LOADING) > 0.05, "too near to tell by a draw"
        decisions.append(share > WORTH_LOADING)
        assert loads_ahead("auto", tokens, policy.token_chances()[0, away]) == decisions[-1]
    assert decisions == [False] * 3 + [True] * 3
    assert loads_ahead("auto", 24, np.full(len(away), 8 / experts)), "as if all were chosen equally often"


def test_by_order():
    chances = np.full(4, 1 / 16)
    assert loads_ahead("all", 1, chances) and not loads_ahead("none", 8192, chances)
    assert not loads_ahead("auto", 8192, chances[:0])


def test_the_likeliest_of_the_absent_are_loaded():
    chances = np.array([[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]])
    absent, loaded = absent_and_loaded(chances, 3, 2)
    assert np.sort(absent).tolist() == [[1, 2, 3], [0, 1, 2]]
    assert np.sort(loaded).tolist() == [[2, 3], [1, 2]]
    assert [ids.shape for ids in absent_and_loaded(chances, 0, 2)] == [(2, 0), (2, 0)]
