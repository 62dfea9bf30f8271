"""What comes of a run, simulated or measured: requests, and the pool over time."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rimuru_jax.bench.report import BenchResult
from rimuru_jax.host.allocator import PageAllocator
from rimuru_jax.host.page_layout import EXPERT
from rimuru_jax.host.pool_plan import PoolPlan


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Timeline:
    """One entry per step."""

    seconds: list[float] = field(default_factory=list)
    """When the step ended."""
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    resident_experts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    host_bytes: list[float] = field(default_factory=list)
    """Fetched from host memory in the step."""
    pool_bytes: dict[str, list[int]] = field(default_factory=dict)
    """In use by each kind of page, "free" for the rest."""

    def thinned(self, entries: int) -> dict[str, Any]:
        """As lists, with at most so many entries."""
        steps = np.unique(np.linspace(0, len(self.seconds) - 1, entries).astype(int)).tolist()

        def chosen(values: Any) -> Any:
            if isinstance(values, dict):
                return {name: chosen(column) for name, column in values.items()}
            return [values[step] for step in steps]

        return {name: chosen(column) for name, column in dataclasses.asdict(self).items()}


@dataclass(slots=True)
class RunResult:
    """Of requests that an engine served, or a simulation."""

    requests: list[BenchResult]
    timeline: Timeline
    counters: dict[str, int | float]
    experts: int
    """Of all layers."""

    @property
    def seconds(self) -> float:
        return self.timeline.seconds[-1] if self.timeline.seconds else 0.0

    @property
    def steps(self) -> int:
        return len(self.timeline.seconds)

    @property
    def peak_running(self) -> int:
        return max(self.timeline.running, default=0)

    def to_json(self, listed_steps: int | None = None) -> dict[str, Any]:
        """Of the timeline at most `listed_steps` entries, evenly chosen."""
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "peak_running": self.peak_running,
            "counters": self.counters,
            "timeline": self.timeline.thinned(listed_steps or self.steps),
        }


def used_bytes(plan: PoolPlan, allocator: PageAllocator) -> dict[str, int]:
    """Bytes of the pool in use by each kind of page, "free" for the rest."""
    ledger = allocator.ledger()
    used = {}
    for placed in plan.layout.kinds:
        counts, unit = ledger.kinds[placed.kind.name], placed.stride_bytes * placed.kind.run
        used[placed.kind.name] = counts.used * unit
        if placed.kind.name == EXPERT:
            used["loading buffers"] = counts.pinned * unit
    used["free"] = (plan.num_huge_pages - 1) * plan.layout.huge_page_bytes - sum(used.values())
    return used
