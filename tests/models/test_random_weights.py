"""Random weights: their scale, their independence, and routing that is as skewed as asked."""

import json

import numpy as np
import pytest

from rimuru_jax import Engine, SamplingParams
from rimuru_jax.models.config import Moe
from rimuru_jax.models.hybrid import hybrid
from rimuru_jax.models.random_weights import random_model, skewed
from tests.models.tiny_checkpoints import CONFIGS

MOE = Moe(num_experts=32, num_experts_per_tok=4, intermediate_size=64, normalize=True)
CONFIG = hybrid(("attn", "gdn"), hidden_size=128, vocab_size=96, moe=MOE)


def test_matrices_are_normal_and_independent():
    model = random_model(CONFIG, "float32")
    pages = model.host_pages.view(np.float32).reshape(2, 32, 3, -1)
    np.testing.assert_allclose(pages[:, :, :2].std(axis=-1), 128**-0.5, rtol=0.05)
    np.testing.assert_allclose(pages[:, :, 2].std(axis=-1), 64**-0.5, rtol=0.05)
    assert abs(pages.mean()) < 1e-3
    # No two of them, nor two rows of one, are nearly the same.
    for rows in (pages.reshape(-1, pages.shape[-1]), pages[0, 0, 0].reshape(64, 128)):
        similarity = np.corrcoef(rows) - np.eye(len(rows))
        assert np.abs(similarity).max() < 6 / rows.shape[1] ** 0.5


def test_a_skewed_router_prefers_experts():
    """Against a simulation of biases and noise."""
    rng = np.random.default_rng(1)
    popularity = -0.8 * np.log(np.arange(1, 33))
    draws = popularity + rng.standard_normal((20000, 32))
    simulated = np.bincount(np.argsort(-draws)[:, :4].ravel(), minlength=32)
    layer = random_model(skewed(CONFIG, 0.8), "float32", router_skew=0.8).params["layers"][0]
    logits = rng.standard_normal((20000, 128)) @ layer["router"].T + layer["router_bias"]
    counts = np.bincount(np.argsort(-logits)[:, :4].ravel(), minlength=32)

    def busiest_quarter(counts):
        return np.sort(counts)[::-1][:8].sum() / counts.sum()

    assert busiest_quarter(counts) == pytest.approx(busiest_quarter(simulated), abs=0.02)
    assert busiest_quarter(simulated) > 0.5


def test_an_engine_needs_no_more_than_a_config(tmp_path):
    config = tmp_path / "some.json"
    config.write_text(json.dumps({"model_type": "qwen3_moe", **CONFIGS["qwen3_moe"]}))
    arguments = {"dtype": "float32", "page_pool_bytes": 1 << 20, "max_model_len": 64, "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def tokens(**more) -> list[int]:
        engine = Engine(config, load_format="dummy", **(arguments | more))
        (output,) = engine.generate([[5, 6, 7]], params, use_tqdm=False)
        return output.outputs[0].token_ids

    assert len(tokens()) == 6
    assert tokens() == tokens() != tokens(seed=1)
    assert len(tokens(dummy_router_skew=0.8)) == 6
    with pytest.raises(ValueError, match='give a model folder, or load_format="dummy"'):
        Engine(config, **arguments)
    with pytest.raises(ValueError, match="router_skew is -1"):
        Engine(config, load_format="dummy", dummy_router_skew=-1, **arguments)
