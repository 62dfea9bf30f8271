"""Loading ahead against reading in place: by the share of absent experts that a step would need."""

import numpy as np

from rimuru_jax.host.prefetch import WORTH_LOADING, loads_ahead


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
        assert loads_ahead("auto", tokens, experts, chosen) == (share > WORTH_LOADING)


def test_by_order():
    assert loads_ahead("all", 1, 128, 8) and not loads_ahead("none", 8192, 128, 8)
