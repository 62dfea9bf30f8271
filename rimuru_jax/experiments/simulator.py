"""The real scheduler, allocator and adjuster over a pool that exists only in numbers.

Steps take the time that the cost model gives them, and requests end after as many tokens as the trace says, so that a
run shows what would be admitted, preempted and moved on any card, without one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rimuru_jax.bench.report import BenchResult
from rimuru_jax.config import EngineConfig
from rimuru_jax.controller import (
    HostController,
    element_bytes,
    expert_bytes,
    fingerprint,
    hotset_profile,
    layout_for,
    plan_for,
)
from rimuru_jax.experiments.cards import Card
from rimuru_jax.experiments.cost import CostModel, Work
from rimuru_jax.experiments.results import Arrival, RunResult, Timeline, used_bytes
from rimuru_jax.host.allocator import PageAllocator
from rimuru_jax.host.hotset import HotsetProfile
from rimuru_jax.host.page_layout import EXPERT, format_bytes
from rimuru_jax.host.pool_plan import PoolPlan
from rimuru_jax.host.prefetch import absent_and_loaded, loads_ahead
from rimuru_jax.host.request import Request
from rimuru_jax.host.throughput import StepCosts, powers
from rimuru_jax.models.config import ModelConfig
from rimuru_jax.models.registry import host_embedding_bytes, resident_bytes

ROUTING = {"uniform": 0.0, "early_layer": 0.5, "typical": 0.8, "steep": 1.2}
"""Exponents s of an expert's popularity, 1 / rank^s: from none to what single-domain code shows."""


WARM_UP_CONTEXT = 512
"""Tokens of the contexts that steps are measured with."""


def popularity(model: ModelConfig, exponent: float, seed: int = 0) -> np.ndarray:
    """float64[L, E], each layer's experts in an order of its own; rows sum to 1."""
    rng = np.random.default_rng(seed)
    experts = model.moe.num_experts
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    rows = np.stack([rng.permutation(weights) for _ in model.moe_layers])
    return rows / rows.sum(axis=1, keepdims=True)


def matched_profile(model: ModelConfig, shares: np.ndarray) -> HotsetProfile:
    """The profile that a recording of this routing would give."""
    tokens = 1_000_000
    counts = np.rint(shares * tokens).astype(np.int64)
    return HotsetProfile(model=fingerprint(model), counts=counts, tokens=tokens, data="the simulated routing")


class Simulation:
    """One engine that does not exist.

    Args:
        config: as for an `Engine`; `page_pool_bytes` must be given.
        shares: float64[L, E], see `popularity`.
        profile: what residency follows; None: the one that `config` names, or the uniform one.
        fused: see `CostModel`.
        allocator: makes the allocator of a pool; None: the engine's.

    Raises ValueError in one sentence when the pool is too small.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        card: Card,
        shares: np.ndarray,
        profile: HotsetProfile | None = None,
        *,
        fused: bool = True,
        allocator: Callable[[PoolPlan], PageAllocator] | None = None,
    ) -> None:
        if config.page_pool_bytes is None:
            raise ValueError("a simulation needs page_pool_bytes: no device says how much memory there is")
        self.plan = plan_for(model, config)
        self._config, self._card = config, card
        on_host = expert_bytes(model, self.plan.layout) > config.page_pool_bytes
        self._cost = CostModel(
            model, element_bytes(config), card, shares, fused=fused, experts_on_host=on_host
        )
        self._rng = np.random.default_rng(0)
        profile = profile or hotset_profile(model, config.expert_hotset_path)
        host = HostController.build(
            model, config, self.plan, profile, allocator(self.plan) if allocator else None
        )
        self._allocator, self._tables, self._experts = host.allocator, host.page_tables, host.experts
        self._scheduler, self.metrics = host.scheduler, host.metrics
        self._experts.fill(self.plan.pages_kept_free)
        self._scheduler.step_costs = self._measure(config.max_num_seqs, profile.token_chances())
        self._chance = np.minimum(shares * model.moe.num_experts_per_tok, 1.0)  # of one token
        self._learns = config.expert_cache_policy != "hotset"
        self._shown = -1
        self._loaded = np.zeros(self._experts.resident.shape, bool)

    def run(
        self,
        arrivals: Sequence[Arrival],
        *,
        until: float = float("inf"),
        progress: Callable[[int], None] = lambda finished: None,
    ) -> RunResult:
        """Serve requests in the order of their arrival, to the end or for `until` seconds.

        Requests that could never be served have an error; those that are not done have latency 0.
        """
        results = [BenchResult(start=a.seconds, prompt_tokens=a.prompt_tokens) for a in arrivals]
        last_token: dict[int, float] = {}
        timeline, now, next_arrival, finished = Timeline(), 0.0, 0, 0
        while now < until and (next_arrival < len(arrivals) or self._scheduler.has_unfinished()):
            if not self._scheduler.has_unfinished():
                now = max(now, arrivals[next_arrival].seconds)
            while next_arrival < len(arrivals) and arrivals[next_arrival].seconds <= now:
                results[next_arrival].error = self._add(next_arrival, arrivals[next_arrival])
                next_arrival += 1
            if not self._scheduler.has_unfinished():
                continue
            plan = self._scheduler.schedule()
            self._tables.take_updates()
            seconds, fetched = self._step(plan)
            now += seconds
            for request in plan.rejected:
                results[request.arrival].error = "rejected"
            for number in self._scheduler.update(plan, [0] * len(plan.chunks)):
                request = plan.chunks[number].request
                result = results[request.arrival]
                if result.output_tokens == 0:
                    result.ttft = now - result.start
                else:
                    result.itl.append(now - last_token[request.arrival])
                last_token[request.arrival] = now
                result.output_tokens += 1
                if len(request.output_token_ids) == request.max_tokens or (
                    request.num_tokens >= self.plan.max_model_len
                ):
                    result.latency = now - result.start
                    self._scheduler.finish(request, "length")
                    finished += 1
            self._record(timeline, now, plan.num_tokens, fetched)
            progress(finished)
        return RunResult(results, timeline, dict(self.metrics.counters), self._experts.num_experts)

    def _measure(self, max_num_seqs: int, chances: np.ndarray) -> StepCosts:
        """What an engine measures when it warms up: decodes with the same number of experts away from every layer, those
        that the profile finds least likely.
        """
        shape, buffers = self._experts.resident.shape, self._experts.buffer_experts
        requests, absent = powers(2, max_num_seqs), [0, *powers(2, shape[1])]

        def seconds(rows: int, away: int) -> float:
            absent, buffered = absent_and_loaded(chances, away, buffers)
            resident, loaded = np.ones(shape, bool), np.zeros(shape, bool)
            np.put_along_axis(resident, absent, False, axis=1)
            ahead = loads_ahead(
                self._config.expert_prefetch, rows, np.take_along_axis(chances, buffered, axis=1)
            )
            np.put_along_axis(loaded, buffered, ahead, axis=1)
            return self._cost.step([Work(1, WARM_UP_CONTEXT)] * rows, resident, loaded).seconds

        return StepCosts(
            requests=tuple(requests),
            absent=tuple(absent),
            seconds=tuple(tuple(seconds(rows, away) for away in absent) for rows in requests),
        )

    def _add(self, number: int, arrival: Arrival) -> str:
        """Queue a request; why it cannot be served, if it cannot."""
        request = Request(str(number), [0] * arrival.prompt_tokens, arrival.output_tokens, arrival=number)
        try:
            self._scheduler.add(request)
        except ValueError as error:
            return str(error)
        return ""

    def _step(self, plan: Any) -> tuple[float, float]:
        """Seconds of a step, and the bytes it fetches from the host."""
        if self._shown != self._experts.version:
            self._shown = self._experts.version
            _, loads = self._experts.step_tables()
            self._loaded[:] = False
            layer, place = np.nonzero(loads >= 0)
            self._loaded[layer, loads[layer, place]] = True
        page_bytes = self.plan.layout[EXPERT].stride_bytes
        copied = len(plan.expert_swaps + plan.expert_copies) * self._experts.matrices * page_bytes
        seconds = copied / self._card.host_rate
        seconds += 2 * len(plan.page_moves) * page_bytes / self._card.memory_rate
        if not plan.chunks:
            return seconds + self._card.step_seconds, copied
        rows = [Work(chunk.num_tokens, chunk.start + chunk.num_tokens) for chunk in plan.chunks]
        tokens = sum(row.tokens for row in rows)
        loaded = self._loaded & loads_ahead(
            self._config.expert_prefetch, tokens, self._experts.load_chances()
        )
        time = self._cost.step(rows, self._experts.resident, loaded)
        if self._learns:
            self._experts.observe(self._rng.poisson(self._chance * tokens), tokens, len(rows))
        return seconds + time.seconds, copied + time.host_bytes

    def _record(self, timeline: Timeline, now: float, tokens: int, fetched: float) -> None:
        timeline.seconds.append(now)
        timeline.tokens.append(tokens)
        timeline.running.append(int(self.metrics.gauges["num_requests_running"]))
        timeline.waiting.append(int(self.metrics.gauges["num_requests_waiting"]))
        timeline.resident_experts.append(self._experts.resident_experts)
        timeline.host_bytes.append(fetched)
        for kind, used in used_bytes(self.plan, self._allocator).items():
            timeline.pool_bytes.setdefault(kind, []).append(used)


_WORKSPACE = 5 * 2**28
"""What the largest step and the spare bytes of an engine come to, with `max_num_batched_tokens` 8192."""


def pool_for(model: ModelConfig, config: EngineConfig, device_bytes: int) -> int:
    """Bytes of a pool beside the resident weights and a workspace, in whole pools.

    Raises ValueError when the weights alone do not fit.
    """
    layout = layout_for(model, config)
    step = layout.huge_page_multiple * layout.huge_page_bytes
    size = element_bytes(config).weight
    weights = resident_bytes(model, size) - host_embedding_bytes(model, size)
    room = device_bytes - weights - _WORKSPACE
    if room < 2 * step:
        raise ValueError(
            f"{device_bytes} bytes of device memory do not hold {weights} bytes of resident weights, "
            f"a workspace of {format_bytes(_WORKSPACE)} and a page pool: take a card with more memory"
        )
    return room // step * step
