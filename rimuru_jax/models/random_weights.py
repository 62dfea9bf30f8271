"""Models with random weights, made as fast as memory can be written: for tests, benchmarks and models of one's own."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping

import numpy as np

from rimuru_jax.host_memory import empty_pages
from rimuru_jax.models.checkpoint import (
    DTYPES,
    Dtype,
    LoadedModel,
    Progress,
    byte_progress,
    in_threads,
    page_shape,
    parameter_dtype,
    parameter_tree,
)
from rimuru_jax.models.config import ModelConfig, Moe
from rimuru_jax.models.weights import ParameterPath, TensorNames, TensorSource, resident_sources

_NUM_VALUES = (1 << 20) + 7
"""Independent values; a prime, so that no matrix has two equal rows in step with each other."""
_FILL_BYTES = 64 * 2**20  # filled by a thread at a time


def skewed(config: ModelConfig, router_skew: float) -> ModelConfig:
    """The model with router biases, if it has none and a skew is wanted: what `random_model` needs to make one."""
    if not router_skew:
        return config
    layers = tuple(
        dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, router_bias=True))
        if isinstance(layer.ffn, Moe)
        else layer
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=layers)


def random_model(
    config: ModelConfig,
    dtype: Dtype,
    seed: int = 0,
    *,
    router_skew: float = 0.0,
    progress: Progress | None = None,
) -> LoadedModel:
    """Random weights for `config`: normal, scaled so that activations keep their size; norms are ones.

    A million values are drawn; every matrix is a window of them, or repeats them, from a random start.

    Args:
        router_skew: exponent s of the experts' popularity, in each layer in another order: the expert of rank r has a
            router bias of -s ln(r), beside logits of unit variance. 0 is uniform; at 0.3 the busiest quarter of 128
            experts gets about half of all choices of 8. The configuration must be `skewed`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but weights are served in one of {', '.join(DTYPES)}")
    if router_skew < 0:
        raise ValueError(f"router_skew is {router_skew}, it must not be negative (0 is uniform)")
    rng = np.random.default_rng(seed)
    moe, shape = config.moe, page_shape(config, dtype)
    values = rng.standard_normal(_NUM_VALUES, np.float32)

    def leaf(name: str, source: TensorSource) -> np.ndarray:
        kept = parameter_dtype(source, dtype)
        if router_skew and name == "router_bias":
            ranks = rng.permuted(np.arange(1, moe.num_experts + 1))
            return (-router_skew * np.log(ranks)).astype(kept)
        return _parameter(name, source, config, rng, values, kept)

    resident = resident_sources(config, TensorNames())
    leaves: dict[ParameterPath, np.ndarray] = {
        path: leaf(str(path[-1]), source) for path, source in resident.items()
    }

    pages = empty_pages(*shape)
    report = byte_progress(progress, pages.nbytes, "making random experts")
    size = moe.intermediate_size * config.hidden_size
    windows = np.resize(values, size + _NUM_VALUES)
    fan_in = [config.hidden_size] * (moe.matrices - 1) + [moe.intermediate_size]
    scaled = {fan: (windows * fan**-0.5).astype(DTYPES[dtype]).view(np.uint16) for fan in set(fan_in)}
    words = pages.shape[1] // size
    starts = rng.integers(0, _NUM_VALUES, len(pages)) * words
    step = max(1, _FILL_BYTES // (2 * pages.shape[1]))

    def fill(first: int) -> int:
        rows = range(first, min(first + step, len(pages)))
        for row in rows:
            pages[row] = scaled[fan_in[row % moe.matrices]][starts[row] : starts[row] + pages.shape[1]]
        return len(rows) * 2 * pages.shape[1]

    in_threads(fill, range(0, len(pages), step), report, threads=os.cpu_count())
    return LoadedModel(config=config, raw_config={}, params=parameter_tree(config, leaves), host_pages=pages)


def _parameter(
    name: str,
    source: TensorSource,
    config: ModelConfig,
    rng: np.random.Generator,
    values: np.ndarray,
    dtype: np.dtype,
) -> np.ndarray:
    shape = source.shape
    special: Mapping[str, Callable[[], np.ndarray]] = {
        # As recurrent models are initialised: decays of 1 to 16 per unit of a step size from 1e-3 to 1e-1.
        "A_log": lambda: np.log(rng.uniform(1, 16, shape)),
        "dt_bias": lambda: np.log(np.expm1(np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape)))),
        "D": lambda: np.ones(shape),
    }
    if name in special:
        return special[name]().astype(dtype)
    if name.endswith("norm"):
        zero_centred = config.norm == "zero_centred" and name != "mixer_norm"
        return np.full(shape, 0.0 if zero_centred else 1.0, dtype)
    if len(shape) == 1:  # biases, sinks
        return np.zeros(shape, dtype)
    scale = 1.0 if name == "embedding" else shape[-1] ** -0.5
    turned = np.roll(values, rng.integers(_NUM_VALUES))
    return np.resize((turned * np.float32(scale)).astype(dtype), shape)
