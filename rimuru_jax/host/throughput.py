"""What a page is worth as an expert's and as a request's: how many experts should be absent for the most tokens per second.

With A of E experts absent, requests of s pages each and P pages in the pool,

    requests at once    n(A) = min(wanted, (P - (E - A) m - buffers) / s)
    seconds per step    T(n, A / layers), measured

and n / T is what counts. As long as fetching hides behind computing, each expert given up is room for nothing. Past that
point steps grow with A, requests with A plus what the pool has beyond the experts: where all experts would fit, the
best A is what hides; where they would not, more requests win as long as there are any.

Prompts are left out: a step that is full of them waits longer for absent experts, but few requests at once do not fill
steps. Weighed as if they did, loads of long prompts became slower.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of decode steps, between whose sizes they are linear."""

    requests: tuple[int, ...]
    """Sizes of the steps, rising."""
    absent: tuple[int, ...]
    """Experts that every layer lacks, rising from 0."""
    seconds: tuple[tuple[float, ...], ...]
    """For each number of requests, by experts that every layer lacks."""

    def of(self, requests: np.ndarray, absent: np.ndarray) -> np.ndarray:
        """Seconds of steps of `requests[i]` with `absent[i]` experts lacking from a layer, on average."""
        by_absent = np.stack([np.interp(absent, self.absent, row) for row in self.seconds])
        if len(self.requests) == 1:
            return by_absent[0]
        sizes = np.asarray(self.requests)
        after = np.clip(np.searchsorted(sizes, requests), 1, len(sizes) - 1)
        before, columns = after - 1, np.arange(len(requests))
        share = np.clip((requests - sizes[before]) / (sizes[after] - sizes[before]), 0, 1)
        return (1 - share) * by_absent[before, columns] + share * by_absent[after, columns]


def powers(base: int, limit: int) -> list[int]:
    """1, base, base^2, ... below `limit`, and `limit` itself."""
    sizes, size = [], 1
    while size < limit:
        sizes.append(size)
        size *= base
    return [*sizes, limit]


def most_absent(
    costs: StepCosts,
    *,
    capacity: int,
    layers: int,
    experts: int,
    matrices: int,
    buffer_experts: int,
    limit: int,
    pages_per_request: float,
    requests: int,
) -> int:
    """Experts, of all layers, whose absence gives the most tokens per second; the fewest of equals.

    Args:
        capacity: pages for experts, their loading buffers and requests together.
        layers: that have experts.
        experts: of all layers.
        matrices: pages of an expert.
        buffer_experts: experts of a loading buffer when it is largest.
        limit: experts that may be absent at most.
        pages_per_request: expert-sized pages that a request holds, on average.
        requests: that would run if there were room.
    """
    absent = np.arange(limit + 1)
    buffers = 2 * np.minimum(-(-absent // layers), buffer_experts)
    room = np.maximum(capacity - (experts - absent + buffers) * matrices, 0)
    at_once = np.minimum(np.floor(room / pages_per_request), requests)
    # Between two of these nothing but A changes, and the time is linear in it: one of the ends is best.
    bends = np.multiply(costs.absent, layers)
    steps = np.flatnonzero(np.diff(at_once))
    ends = np.unique(np.concatenate([[0, limit], steps, steps + 1, bends[bends < limit]]))
    return int(ends[np.argmax(at_once[ends] / costs.of(at_once[ends], ends / layers))])
