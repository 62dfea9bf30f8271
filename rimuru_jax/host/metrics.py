"""Counters, gauges and a bounded log of what happened, all by name. One instance per engine; nothing is
global.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COUNTERS = (
    "prompt_tokens",  # tokens of prompts computed, recomputation after preemption included
    "generation_tokens",  # tokens sampled and accepted
    "recomputed_tokens",  # tokens whose results were thrown away by preemption
    "num_preemptions",
    "request_success",  # finished by stop or length
    "requests_aborted",
    "requests_rejected",
    "scheduler_passes",
    "empty_passes",  # passes that planned no tokens although requests were unfinished
    "awaiting_reclaim",  # times a running request skipped a pass because its pages were still returning
    "expert_shrinks",  # experts given up
    "expert_expansions",  # experts taken back
    "expert_swaps",  # experts that took the place of others of their layer
    "expert_hits",  # experts that tokens chose in a layer of a step, resident in the pool
    "expert_buffer_hits",  # the same, copied into a loading buffer by the step itself
    "expert_host_reads",  # the same, read from host memory in place
    "expert_pages_loaded",  # pages copied from host memory into the pool, loading buffers included
    "expert_pages_moved",  # pages of resident experts copied elsewhere in the pool, to make whole huge pages free
    "expert_reversals",  # passes whose residency change had the opposite sign of the change before
)
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "resident_experts",
    "free_expert_pages",
    "returning_expert_pages",
    "adjuster_r_b",  # shortage of the last balance, expert-sized pages
    "adjuster_f_b",  # surplus of the last balance, expert-sized pages
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in one scheduling pass: `fields` are numbers and short strings."""

    step: int
    name: str
    fields: Mapping[str, int | float | str]


class Metrics:
    """Totals since the start (`counters`), latest values (`gauges`), and the last `max_events` events.

    Unknown names raise KeyError: a misspelt metric must not become a new one.
    """

    def __init__(self, max_events: int = 4096):
        self.counters: dict[str, int | float] = dict.fromkeys(COUNTERS, 0)
        self.gauges: dict[str, int | float] = dict.fromkeys(GAUGES, 0)
        self._events: deque[Event] = deque(maxlen=max_events)

    def add(self, name: str, value: int | float = 1) -> None:
        """Add `value` to a counter."""
        self.counters[name] += value

    def set(self, name: str, value: int | float) -> None:
        """Set a gauge."""
        if name not in self.gauges:
            raise KeyError(name)
        self.gauges[name] = value

    def event(self, step: int, name: str, **fields: int | float | str) -> None:
        """Append to the log; the oldest event makes room when it is full."""
        self._events.append(Event(step, name, fields))

    def events(self, *names: str) -> Iterator[Event]:
        """Events still in the log, oldest first; only those called one of `names` when any are given."""
        return (event for event in list(self._events) if not names or event.name in names)

    def snapshot(self) -> dict[str, int | float]:
        """All counters and gauges by name, a copy."""
        return {**self.counters, **self.gauges}
