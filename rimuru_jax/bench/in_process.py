"""Random prompts, and an engine of this process that serves them."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rimuru_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rimuru_jax.engine import Engine


def random_requests(
    engine: "Engine", lengths: Sequence[tuple[int, int]], seed: int = 0
) -> list[tuple[list[int], SamplingParams]]:
    """A prompt of random tokens of each length, and greedy parameters that end at the length."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(0, engine.model_config.vocab_size, prompt).tolist(),
            SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False),
        )
        for prompt, output in lengths
    ]


def run_requests(
    engine: "Engine", requests: Sequence[tuple[list[int], SamplingParams]]
) -> tuple[float, list[float]]:
    """Serve requests that are all there at once; returns seconds in all and of every step."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(f"bench-{index}", prompt, params)
    begin = last = time.perf_counter()
    steps = []
    while engine.has_unfinished_requests():
        engine.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    return last - begin, steps
