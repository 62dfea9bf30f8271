"""What an engine does before there is one: its model's weights, and the memory that is left for the pool."""

import logging
import math
from collections.abc import Callable
from pathlib import Path

import jax

from rimuru_jax.config import EngineConfig
from rimuru_jax.controller import expert_bytes, layout_for
from rimuru_jax.cuda_driver import cuda_driver
from rimuru_jax.host.page_layout import PageLayout
from rimuru_jax.memory_budget import MemoryBudget, measure, reserve_memory
from rimuru_jax.models.checkpoint import LoadedModel, load_checkpoint
from rimuru_jax.models.config import ModelConfig
from rimuru_jax.models.context import ModelSpec
from rimuru_jax.models.default_model import cache_dir
from rimuru_jax.models.random_weights import random_model

logger = logging.getLogger(__name__)

type LoadProgress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and what is being done."""


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def use_compilation_cache() -> None:
    """Keep compiled steps between runs, unless the user has chosen a place already."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))


def load_model(folder: Path, model: ModelConfig, config: EngineConfig, report: LoadProgress) -> LoadedModel:
    """The weights in a folder, or random ones. Raises ValueError in one sentence."""
    if config.load_format == "dummy":
        skew = config.dummy_router_skew
        return random_model(model, config.dtype, config.seed, router_skew=skew, progress=report)
    if folder.is_file():
        raise ValueError(f'{folder} is a file without weights: give a model folder, or load_format="dummy"')
    return load_checkpoint(folder, config.dtype, report, config.verify_checkpoint)


def check_dtype(model: LoadedModel, dtype: str) -> None:
    """Raise ValueError, in one sentence, for a model in memory that cannot be taken."""
    if not all(model.params["layers"]):
        raise ValueError("this model in memory was given to an engine before; make it anew")
    if (given := model.params["embedding"].dtype) != dtype:
        raise ValueError(
            f"the model in memory has weights in {given}, but dtype is {dtype}; set it to {given}"
        )


def model_spec(model: ModelConfig, config: EngineConfig, layout: PageLayout) -> ModelSpec:
    on_host = expert_bytes(model, layout) > _device_bytes(config)
    recurrent = config.mamba_ssm_cache_dtype
    return ModelSpec.create(model, layout, config.dtype, recurrent, experts_on_host=on_host)


def _device_bytes(config: EngineConfig) -> float:
    """More than the pool will have."""
    if config.page_pool_bytes is not None:
        return config.page_pool_bytes
    if not on_gpu():
        return math.inf
    total = cuda_driver(jax.devices()[0].local_hardware_id).total_memory()
    return total * config.gpu_memory_utilization


def find_budget(model: ModelConfig, config: EngineConfig) -> MemoryBudget | None:
    """Reserve the device's memory, and find what the pool may have of it; None where that is given, and on a CPU."""
    reserve_memory(config.gpu_memory_utilization)
    if config.page_pool_bytes is not None or not on_gpu():
        return None
    layout = layout_for(model, config)
    budget = measure(
        model,
        model_spec(model, config, layout),
        layout,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    logger.info("memory of the device:\n%s", budget.describe())
    return budget
