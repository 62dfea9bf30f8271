"""What decodes cost on this device with experts away: the table that the adjuster's policy "throughput" weighs.

Measured on the empty pool, before experts are placed: any page may stand for any expert, and nothing is lost.
"""

import time
from collections.abc import Iterator

import jax
import numpy as np

from rimuru_jax.config import EngineConfig
from rimuru_jax.host.expert_cache import HOST
from rimuru_jax.host.page_layout import EXPERT
from rimuru_jax.host.pool_plan import PoolPlan
from rimuru_jax.host.prefetch import absent_and_loaded, loads_ahead
from rimuru_jax.host.throughput import StepCosts, powers
from rimuru_jax.serving_loop import Chunk, ServingLoop, pack

CONTEXT = 512
"""Tokens before the one that is decoded."""

MOST_MEASURED = 16
"""Absent experts of a layer, beyond which steps are as much longer as each of the last was: the link is what counts."""

QUICK, QUEUED, WARM_UP = 0.03, 3, 0.3
"""Steps of less than QUICK seconds are timed QUEUED at a time, so that the device does not wait for the host. A device that
idled or waited for its link takes WARM_UP seconds to reach its clock rates."""


def measure_step_costs(
    loop: ServingLoop, config: EngineConfig, plan: PoolPlan, chances: np.ndarray
) -> StepCosts:
    """Run decodes of several sizes with several numbers of experts away from every layer, a few seconds in all.

    Args:
        loop: with its steps compiled and nothing in its pool.
        chances: float64[L, E], of one token choosing each expert: the least likely are away, as they would be in service.
    """
    layers, experts = chances.shape
    matrices, limit = plan.matrices, plan.expert_offload_limit
    first, last = (huge * plan.layout.pages_per_huge(EXPERT) for huge in (1, plan.num_huge_pages))
    pages = np.arange(first, last, dtype=np.int32)
    buffer_pages = np.resize(pages, (2, plan.buffer_experts, matrices))
    in_pool = np.resize(pages[buffer_pages.size :], (layers, experts, matrices)).astype(np.int32)
    vocabulary, rng = loop.spec.config.vocab_size, np.random.default_rng(0)
    start = min(CONTEXT, plan.max_model_len - 1)
    loop.update_tables(dict(_scattered_pages(plan, config.max_num_seqs, start + 1)))

    def seconds(rows: int, away: int) -> float:
        table, row = in_pool.copy(), np.arange(layers)[:, None]
        absent, buffered = absent_and_loaded(chances, away, plan.buffer_experts)
        table[row, absent] = HOST
        loads = np.full((layers, plan.buffer_experts), -1, np.int32)
        loads[:, : buffered.shape[1]] = buffered
        table[row, buffered] = buffer_pages[row[:, 0] % 2, : buffered.shape[1]]
        loop.set_experts(table, loads, buffer_pages)
        ahead = loads_ahead(config.expert_prefetch, rows, chances[row, buffered])
        tokens = rng.integers(0, vocabulary, rows).tolist()
        batch = pack([Chunk(slot, [token], start) for slot, token in enumerate(tokens)])

        def run(steps: int) -> float:
            begin = time.perf_counter()
            outputs = [loop.run(batch, loads_ahead=ahead).slots for _ in range(steps)]
            jax.block_until_ready(outputs)
            return (time.perf_counter() - begin) / steps

        once = run(1)
        warm = time.perf_counter() + (WARM_UP if away == 0 else 0)
        while time.perf_counter() < warm:
            once = run(1)
        return min(run(QUEUED) for _ in range(3)) if once < QUICK else once

    requests = powers(4, config.max_num_seqs)
    measured = [0, *powers(2, min(limit, MOST_MEASURED))] if limit else [0]
    rising = np.array([[seconds(rows, away) for away in measured] for rows in requests])
    # Absence never makes a step shorter: what looks like it is noise, which must not be a reason to give up experts.
    rising = np.maximum.accumulate(rising, axis=1)
    if limit > MOST_MEASURED:
        each = (rising[:, -1] - rising[:, -2]) / (measured[-1] - measured[-2])
        rising = np.column_stack([rising, rising[:, -1] + each * (limit - measured[-1])])
        measured = [*measured, limit]
    return StepCosts(
        requests=tuple(requests), absent=tuple(measured), seconds=tuple(map(tuple, rising.tolist()))
    )


def _scattered_pages(
    plan: PoolPlan, slots: int, tokens: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Pages all over the pool for so many tokens of every slot, as `ServingLoop.update_tables` takes them."""
    layout = plan.layout
    for placed in layout.sequence_kinds:
        units = placed.units_for(tokens) // placed.tables
        index = np.stack(np.meshgrid(*map(np.arange, (placed.tables, slots, units)), indexing="ij"), axis=-1)
        run, stride = placed.kind.run, placed.stride_bytes
        first, end = -(-layout.huge_page_bytes // stride), plan.pool_bytes // stride
        pages = np.resize(np.arange(first, end - run + 1, run, dtype=np.int32), index.shape[:-1])
        yield placed.kind.name, (index.reshape(-1, 3), pages.reshape(-1))
