"""The Mosaic GPU kernels of routing: numbers in the GPU interpreter, code for real shapes, refusals.

Tests marked gpu compare them on the card with the same brute force.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.moe_routing import Scoring, mosaic_gpu, route_and_group
from rimuru_jax.pallas.moe_routing.api import most_tiles


@dataclass(frozen=True, kw_only=True)
class Case:
    """Random logits of few values, so that ties are likely, and what they must give."""

    tokens: int
    experts: int
    top_k: int
    tile: int = 8
    share: float = 0.8
    """Of tokens that are valid."""
    scoring: str = "softmax"
    normalize: bool = True
    biased: bool = False
    groups: tuple[int, int] = (1, 1)
    skewed: bool = False
    """Everybody wants the last experts."""

    @property
    def inputs(self):
        rng = np.random.default_rng(self.tokens)
        logits = (rng.integers(-64, 64, (self.tokens, self.experts)) / 16).astype(np.float32)
        if self.skewed:
            logits += np.arange(self.experts, dtype=np.float32) / 4
        bias = (rng.integers(-8, 8, self.experts) / 8).astype(np.float32) if self.biased else None
        return logits, rng.random(self.tokens) < self.share, bias

    @property
    def asked(self) -> Scoring:
        return Scoring(
            normalize=self.normalize,
            function=self.scoring,
            num_groups=self.groups[0],
            top_groups=self.groups[1],
            normalize_epsilon=0.125,
            scale=2.5,
        )

    def check(self, chosen, weights, tile_experts, row_tokens, pair_rows, num_tiles, counts):
        logits, valid, bias = self.inputs
        best, mixing = self.route(logits.astype(np.float64), 0.0 if bias is None else bias)
        np.testing.assert_array_equal(chosen, best)
        np.testing.assert_allclose(weights, mixing, rtol=3e-6)

        queues = [[] for _ in range(self.experts)]
        for token in np.flatnonzero(valid):
            for choice, expert in enumerate(best[token]):
                queues[expert].append((token, choice))
        rows = np.full(len(row_tokens), self.tokens)
        places = np.full((self.tokens, self.top_k), len(row_tokens))
        tiles = []
        for expert, queue in enumerate(queues):
            for rank, (token, choice) in enumerate(queue):
                places[token, choice] = len(tiles) * self.tile + rank
                rows[places[token, choice]] = token
            tiles += [expert] * -(-len(queue) // self.tile)
        np.testing.assert_array_equal(counts, [len(queue) for queue in queues])
        assert num_tiles == len(tiles)
        np.testing.assert_array_equal(tile_experts, tiles + [self.experts] * (len(tile_experts) - len(tiles)))
        np.testing.assert_array_equal(row_tokens, rows)
        np.testing.assert_array_equal(np.minimum(pair_rows, len(row_tokens)), places)

    def route(self, logits, bias):
        softmax = np.exp(logits - logits.max(1, keepdims=True))
        softmax /= softmax.sum(1, keepdims=True)
        sigmoid = 1 / (1 + np.exp(-logits))
        scores = {"softmax": softmax, "sigmoid": sigmoid}.get(self.scoring, logits)
        biased = scores + bias
        num_groups, top_groups = self.groups
        if top_groups < num_groups:
            grouped = biased.reshape(self.tokens, num_groups, -1)
            strength = np.sort(grouped, axis=2)[:, :, -2:].sum(2)
            lost = np.argsort(-strength, axis=1, kind="stable")[:, top_groups:]
            np.put_along_axis(grouped, lost[:, :, None], -np.inf, axis=1)
        best = np.argsort(-biased, axis=1, kind="stable")[:, : self.top_k]
        weights = np.take_along_axis(scores, best, axis=1)
        if self.scoring == "softmax_of_chosen":
            weights = np.exp(weights - weights.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
        if self.normalize:
            weights /= weights.sum(1, keepdims=True) + 0.125
        return best, weights * 2.5

    def kernel(self, config=None, interpret=None):
        logits, valid, bias = self.inputs
        tiles = most_tiles(self.tokens * self.top_k, self.experts, self.tile)

        @jax.jit
        def run(logits, valid, bias):
            return mosaic_gpu.route_and_group(
                logits,
                valid,
                bias,
                self.top_k,
                self.tile,
                tiles,
                self.asked,
                config=config,
                interpret=interpret,
            )

        chosen, weights, routing = jax.device_get(run(logits, valid, bias))
        return chosen, weights, *routing


SIGMOID = {"scoring": "sigmoid", "biased": True}
INTERPRETED = {
    "two launches, groups": (Case(tokens=6, experts=16, top_k=3, tile=2, groups=(4, 2), **SIGMOID), (4, 1)),
    "one launch, two lines": (
        Case(tokens=3, experts=130, top_k=3, scoring="softmax_of_chosen", normalize=False),
        (4, 2),
    ),
    "biased softmax, all experts, nobody valid": (
        Case(tokens=1, experts=8, top_k=8, share=0.0, biased=True),
        (4, 1),
    ),
}


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The race detector of the interpreter only prints."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(("case", "config"), INTERPRETED.values(), ids=INTERPRETED)
def test_interpreted(case, config):
    config = mosaic_gpu.Config(block=config[0], warpgroups=config[1])
    case.check(*case.kernel(config, plgpu.InterpretGPUParams()))


@pytest.mark.parametrize("blocks", [1, 2])
def test_warpgroups_do_not_race(blocks):
    case = Case(tokens=8, experts=2, top_k=1, tile=2)
    config = mosaic_gpu.Config(block=8 // blocks, warpgroups=2)
    case.check(*case.kernel(config, plgpu.InterpretGPUParams(detect_races=True)))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (512, 10)])
@pytest.mark.parametrize(("tokens", "launches"), [(1, 1), (16, 1), (17, 2), (8192, 2)])
def test_lowers_for_cuda_in_few_launches(experts, top_k, tokens, launches):
    def run(logits, valid, bias):
        return mosaic_gpu.route_and_group(
            logits,
            valid,
            bias,
            top_k,
            8,
            most_tiles(tokens * top_k, experts, 8),
            Case(tokens=1, experts=1, top_k=1, scoring="sigmoid", groups=(4, 2)).asked,
        )

    struct = jax.ShapeDtypeStruct
    text = (
        jax.jit(run)
        .trace(
            struct((tokens, experts), jnp.float32),
            struct((tokens,), jnp.bool_),
            struct((experts,), jnp.float32),
        )
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert text.count("@mosaic_gpu") == launches


def test_refusals():
    assert mosaic_gpu.refusal(512, 8, 10) is None
    for refused in ((513, 1, 8), (256, 32, 8), (512, 1, 33)):
        assert f"{refused[2]} of {refused[0]} experts in {refused[1]} groups" in str(
            mosaic_gpu.refusal(*refused)
        )


REAL = {
    "qwen3-30b": Case(tokens=0, experts=128, top_k=8),
    "qwen1.5-moe": Case(tokens=0, experts=60, top_k=4, normalize=False),
    "qwen3.5": Case(tokens=0, experts=256, top_k=8, skewed=True),
    "qwen3-next": Case(tokens=0, experts=512, top_k=10),
    "gpt-oss": Case(tokens=0, experts=32, top_k=4, scoring="softmax_of_chosen"),
    "nemotron": Case(tokens=0, experts=128, top_k=6, **SIGMOID),
    "deepseek": Case(tokens=0, experts=256, top_k=8, groups=(8, 4), **SIGMOID),
}


@pytest.mark.gpu
@pytest.mark.parametrize("model", REAL.values(), ids=REAL)
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 1000, 8192])
def test_on_the_card(model, tokens):
    tile = 1 << max(3, (2 * tokens * model.top_k // model.experts - 1).bit_length())
    case = Case(**{**vars(model), "tokens": tokens, "tile": min(tile, 128)})
    logits, valid, bias = case.inputs
    run = jax.jit(
        lambda logits, valid, bias, implementation: route_and_group(
            logits,
            valid,
            case.top_k,
            case.asked,
            tile=case.tile,
            selection_bias=bias,
            implementation=implementation,
        ),
        static_argnums=3,
    )
    chosen, weights, routing = jax.device_get(run(logits, valid, bias, "mosaic_gpu"))
    case.check(chosen, weights, *routing)
    again = jax.device_get(run(logits, valid, bias, "mosaic_gpu"))
    jax.tree.map(np.testing.assert_array_equal, again, (chosen, weights, routing))
