"""What a pool may take of a device: workspace bounded before anything is there."""

import dataclasses

import pytest

from rimuru_jax.config import EngineConfig
from rimuru_jax.controller import layout_for
from rimuru_jax.memory_budget import GRANULE, MemoryBudget, reserve_memory
from rimuru_jax.models.context import ModelSpec
from rimuru_jax.serving_loop import buckets, workspace_bytes
from tests.test_compiled_step import MODELS

GiB = 1 << 30


def test_no_bucket_takes_more_than_the_workspace():
    """Law 16, of programs for a CPU: the largest bucket's workspace covers that of every other."""
    shapes = MODELS["mixed-float32"]
    layout = layout_for(shapes.config, EngineConfig(dtype="float32"))
    spec = ModelSpec.create(shapes.config, layout, shapes.dtype)
    limits = {"max_num_seqs": shapes.max_num_seqs, "max_model_len": shapes.max_model_len}
    bound = workspace_bytes(spec, layout, max_num_batched_tokens=shapes.max_num_batched_tokens, **limits)
    assert bound > 0
    for bucket in list(buckets(shapes.max_num_batched_tokens, shapes.max_num_seqs))[1::2]:
        compiled, _ = shapes.compile(bucket)
        memory = compiled.memory_analysis()
        assert memory is not None
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert memory.temp_size_in_bytes + results <= bound, bucket


def test_the_pool_gets_the_rest():
    budget = MemoryBudget(
        total=32 * GiB,
        usable=30 * GiB,
        clamp="gpu_memory_utilization (0.9375)",
        classes={"resident weights": 3 * GiB, "step workspace": GiB + 5},
    )
    assert budget.pool_bytes == 26 * GiB - GRANULE
    assert budget.pool_bytes + sum(budget.classes.values()) <= budget.usable
    assert budget.describe().splitlines() == [
        "device                      32 GiB",
        "usable                      30 GiB  bounded by gpu_memory_utilization (0.9375)",
        "resident weights             3 GiB",
        "step workspace               1 GiB",
        "page pool                25.94 GiB",
    ]
    small = dataclasses.replace(budget, usable=2 * GiB)
    assert small.pool_bytes == 0


@pytest.mark.parametrize("share", [0, -0.1, 1.01])
def test_a_share_is_a_share(share):
    with pytest.raises(ValueError, match="it must be above 0 and at most 1"):
        reserve_memory(share)
