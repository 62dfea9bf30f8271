"""Building blocks that the oracle's models do not use."""

import math

import numpy as np
import pytest

from rimuru_jax.models.config import Rotary, Yarn
from rimuru_jax.models.layers import rotary_frequencies
from rimuru_jax.models.registry import parse_config
from tests.models.tiny_checkpoints import CONFIGS

# As in the published config.json of gpt-oss.
PUBLISHED = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def test_yarn_is_read_in_old_and_new_words():
    raw = {"model_type": "gpt_oss", **CONFIGS["gpt_oss"], "rope_theta": 150000.0}
    old = parse_config(raw | {"rope_scaling": PUBLISHED})
    new = parse_config(raw | {"rope_parameters": {**PUBLISHED, "rope_theta": 150000.0}})
    assert old == new
    assert old.layers[0].mixer.rotary == Rotary(  # type: ignore[union-attr]
        theta=150000.0, yarn=Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False)
    )


@pytest.mark.parametrize("truncate", [False, True])
def test_yarn_keeps_fast_pairs_and_slows_slow_ones(truncate):
    """By turns over the original context: 32 and more stay, 1 and less turn 32 times slower, a ramp in between."""
    theta, half, length = 150000.0, 32, 4096
    yarn = Yarn(factor=32.0, original_max_position_embeddings=length, truncate=truncate)
    got, factor = rotary_frequencies(Rotary(theta=theta, yarn=yarn), 2 * half)
    assert factor == pytest.approx(0.1 * math.log(32) + 1)
    plain = np.array([theta ** (-pair / half) for pair in range(half)])
    turns = length * plain / (2 * math.pi)
    share = np.asarray(got, np.float64) / plain  # 1 for pairs that stay, 1 / 32 for those that are slowed
    np.testing.assert_allclose(share[turns >= 32 * (1.5 if truncate else 1)], 1, rtol=1e-6)
    np.testing.assert_allclose(share[turns <= 1 / (1.5 if truncate else 1)], 1 / 32, rtol=1e-6)
    between = share[(turns < 32) & (turns > 1)]
    assert len(between) > 5 and (np.diff(between) < 0).all() and 1 / 32 < between[-1] < between[0] < 1
    if not truncate:  # linear in the number of the pair
        np.testing.assert_allclose(np.diff(between), np.diff(between)[0], rtol=1e-4)


def test_without_yarn_nothing_is_scaled():
    got, factor = rotary_frequencies(Rotary(theta=100.0), 8)
    assert factor == 1.0
    np.testing.assert_allclose(got, [1, 100**-0.25, 0.1, 100**-0.75], rtol=1e-6)
