"""How large the page pool of a GPU may be: what a card has, less everything that is no page."""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from rimuru_jax.cuda_driver import cuda_driver
from rimuru_jax.host.page_layout import PageLayout, format_bytes
from rimuru_jax.models.config import ModelConfig
from rimuru_jax.models.context import ModelSpec
from rimuru_jax.models.registry import host_embedding_bytes, resident_bytes
from rimuru_jax.serving_loop import table_shapes, workspace_bytes

logger = logging.getLogger(__name__)

GRANULE = 64 << 20
"""Pools are multiples of this many bytes, so that programs compiled for one start are found again at the next."""

SPARE = 512 << 20
"""For what JAX's allocator loses between its pieces, and for small programs."""

ALLOCATOR_LIMIT = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variable: the share of a card that JAX takes for itself when it first uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of a device by what they are for."""

    total: int
    usable: int
    clamp: str
    """What bounds `usable`, and the knob that moves it."""
    classes: Mapping[str, int]
    """What is taken from it before the pool."""

    @property
    def pool_bytes(self) -> int:
        return max(0, (self.usable - sum(self.classes.values())) // GRANULE * GRANULE)

    def describe(self) -> str:
        """A line for each class of bytes, the pool last."""
        rows = {"device": self.total, "usable": self.usable, **self.classes, "page pool": self.pool_bytes}
        lines = [f"{name:<22}{format_bytes(size):>12}" for name, size in rows.items()]
        lines[1] += f"  bounded by {self.clamp}"
        return "\n".join(lines)


def reserve_memory(gpu_memory_utilization: float) -> None:
    """Let JAX take this share of a card, unless it has been told another or runs already."""
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization is {gpu_memory_utilization}, it must be above 0 and at most 1"
        )
    os.environ.setdefault(ALLOCATOR_LIMIT, str(gpu_memory_utilization))


def describe_peak() -> str:
    """How much of the default device's memory JAX has had in use at most, of what it may have; for the logs of experiments."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats is None:
        return f"{device.device_kind} does not say how much memory was in use"
    most, limit = (format_bytes(stats[name]) for name in ("peak_bytes_in_use", "bytes_limit"))
    return f"device memory in use at most {most} of {limit}"


def measure(
    model: ModelConfig,
    spec: ModelSpec,
    layout: PageLayout,
    *,
    gpu_memory_utilization: float,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> MemoryBudget:
    """The budget of the default device, a GPU, before the model's weights are on it."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    total = cuda_driver(device.local_hardware_id).total_memory()
    bounds = {
        f"gpu_memory_utilization ({gpu_memory_utilization})": int(total * gpu_memory_utilization),
        f"JAX's allocator (set {ALLOCATOR_LIMIT} before JAX starts)": stats["bytes_limit"],
    }
    clamp = min(bounds, key=lambda name: bounds[name])
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    tables = sum(math.prod(shape) * 4 for shape in table_shapes(layout, **limits).values())
    weights = resident_bytes(model, spec.dtype.itemsize) - host_embedding_bytes(model, spec.dtype.itemsize)
    workspace = workspace_bytes(spec, layout, max_num_batched_tokens=max_num_batched_tokens, **limits)
    return MemoryBudget(
        total=total,
        usable=bounds[clamp],
        clamp=clamp,
        classes={
            "in use already": stats["bytes_in_use"],
            "resident weights": weights,
            "page tables": 2 * tables,  # an update may hold both
            "step workspace": workspace,
            "spare": SPARE,
        },
    )
