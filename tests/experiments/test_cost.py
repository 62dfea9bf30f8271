"""The cost model against what was measured on the card (`benchmarks/results/kernels.md`), and its own promises."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from rimuru_jax.experiments.cards import CARDS
from rimuru_jax.experiments.cost import CostModel, Work
from rimuru_jax.experiments.simulator import popularity
from rimuru_jax.models.config import ElementBytes
from rimuru_jax.models.registry import parse_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
QWEN3 = parse_config(json.loads((CONFIGS / "Qwen3-30B-A3B.json").read_text()))
LAYERS, EXPERTS = 48, 128


def cost(exponent: float = 0.0, **card) -> CostModel:
    chosen = dataclasses.replace(CARDS["h200"], **card)
    return CostModel(QWEN3, ElementBytes(), chosen, popularity(QWEN3, exponent))


def away(count: int) -> np.ndarray:
    """The first experts of every layer."""
    return np.broadcast_to(np.arange(EXPERTS) < count, (LAYERS, EXPERTS))


NONE = away(0)


@pytest.mark.parametrize(
    ("tokens", "microseconds"), [(16, 208), (64, 309), (256, 353), (1024, 454), (4096, 811), (8192, 1337)]
)
def test_experts_take_what_was_measured(tokens, microseconds):
    """Within a quarter: the measured times have a gather and a sum, and launches, which are counted elsewhere here."""
    seconds, _ = cost()._experts(tokens)
    assert microseconds * 0.75 <= seconds[0] * 1e6 <= microseconds * 1.25


def test_touched_experts_are_those_of_a_draw():
    rng = np.random.default_rng(0)
    chosen = [len(np.unique(np.argsort(rng.random((16, EXPERTS)))[:, :8])) for _ in range(200)]
    _, touched = cost()._experts(16)
    assert touched[0].sum() == pytest.approx(np.mean(chosen), rel=0.02)


def test_what_is_fetched_takes_the_link():
    model, rows = cost(), [Work(1, 100)] * 64
    resident = model.step(rows, ~NONE, NONE)
    assert resident.host_bytes == 0
    half = model.step(rows, ~away(64), away(64))
    assert half.host_bytes == LAYERS * 64 * 3 * 2 * 768 * 2048
    assert half.seconds >= half.host_seconds > 5 * resident.seconds
    # Unless they are few, and computing is slow.
    slow = cost(memory_rate=5e11)
    few = slow.step(rows, ~away(2), away(2))
    assert few.seconds == pytest.approx(slow.step(rows, ~NONE, NONE).seconds)


def test_in_place_fetches_only_what_is_touched():
    model, rows = cost(), [Work(1, 100)]
    in_place = model.step(rows, ~away(64), NONE)
    assert in_place.host_bytes == pytest.approx(LAYERS * 64 * 8 / 128 * 3 * 2 * 768 * 2048)
    popular = cost(1.2)
    order = np.argsort(-popular._chance, axis=1)
    hot = np.zeros_like(NONE)
    np.put_along_axis(hot, order[:, :64], True, axis=1)
    assert popular.step(rows, hot, NONE).host_bytes < 0.5 * popular.step(rows, ~hot, NONE).host_bytes


def test_without_the_kernel_weights_are_copied_before_they_are_read():
    """Twice more over the memory for those in the pool, and nothing hides behind anything for those that are not."""
    rows = [Work(1, 100)] * 64
    card, (_, touched) = CARDS["h200"], cost()._experts(64)
    loose = CostModel(QWEN3, ElementBytes(), card, popularity(QWEN3, 0.0), fused=False)
    expert = 3 * 2 * 768 * 2048
    more = loose.step(rows, ~NONE, NONE).seconds - cost().step(rows, ~NONE, NONE).seconds
    assert more == pytest.approx(2 * expert * touched.sum() / card.memory_rate)
    away_from_all = loose.step(rows, away(64), NONE)
    assert away_from_all.host_bytes == pytest.approx(expert * touched[:, 64:].sum())
    assert away_from_all.seconds > away_from_all.host_seconds + cost().step(rows, ~NONE, NONE).seconds


def test_decode_floor():
    """All weights once at 4.2 TB/s: 13.9 ms at 64 requests by `peers`' reckoning with 4.3, and fixed costs beside it."""
    free = cost(layer_seconds=0.0, step_seconds=0.0)
    seconds = free.step([Work(1, 200)] * 64, ~NONE, NONE).seconds
    assert seconds == pytest.approx(13.9e-3, rel=0.1)
