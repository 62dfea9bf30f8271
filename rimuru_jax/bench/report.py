"""Figures of a benchmark, under vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class BenchResult:
    """Of one request. Times are in seconds."""

    start: float
    """On the clock of whoever measures."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    """Time to the first token."""
    itl: list[float] = field(default_factory=list)
    """Times between tokens that came one after another."""
    latency: float = 0.0
    """Time to the last token."""
    error: str = ""
    """Why it failed; empty if it did not."""

    @property
    def tpot(self) -> float:
        """Mean time of each token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (after the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def milliseconds(results: Sequence[BenchResult]) -> dict[str, np.ndarray]:
    """Samples of every metric, of the requests that succeeded."""
    good = [result for result in results if not result.error]
    samples = {
        "ttft": [result.ttft for result in good],
        "tpot": [result.tpot for result in good if result.output_tokens > 1],
        "itl": [interval for result in good for interval in result.itl],
        "e2el": [result.latency for result in good],
    }
    return {name: 1000 * np.asarray(values, np.float64) for name, values in samples.items()}


def summary(
    results: Sequence[BenchResult],
    seconds: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Counts, rates per second, and mean, median, deviation and percentiles of each metric in ms.

    `goodput` gives limits in ms by metric (ttft, tpot, e2el): good requests keep all of them.
    """
    good = [result for result in results if not result.error]
    inputs = sum(result.prompt_tokens for result in good)
    outputs = sum(result.output_tokens for result in good)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_concurrent_requests": _most_at_once(good),
    }
    if goodput:
        kept = sum(_keeps(result, goodput) for result in good)
        figures["request_goodput"] = kept / seconds
    samples = milliseconds(results)
    for name in metrics:
        values = samples[name]
        if not len(values):
            continue
        figures[f"mean_{name}_ms"] = float(values.mean())
        figures[f"median_{name}_ms"] = float(np.median(values))
        figures[f"std_{name}_ms"] = float(values.std())
        for percentile in percentiles:
            figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return figures


def _keeps(result: BenchResult, limits: Mapping[str, float]) -> bool:
    values = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}
    return all(1000 * values[name] <= limit for name, limit in limits.items())


def _most_at_once(results: Sequence[BenchResult]) -> int:
    events = sorted(
        event for result in results for event in ((result.start, 1), (result.start + result.latency, -1))
    )
    return int(np.cumsum([change for _, change in events]).max()) if events else 0


def text(figures: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """For people."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests", figures["completed"]),
        ("Failed requests", figures["failed"]),
        ("Most requests at once", figures["max_concurrent_requests"]),
        ("Duration (s)", figures["duration"]),
        ("Input tokens", figures["total_input_tokens"]),
        ("Generated tokens", figures["total_output_tokens"]),
        ("Requests/s", figures["request_throughput"]),
        ("Generated tokens/s", figures["output_throughput"]),
        ("All tokens/s", figures["total_token_throughput"]),
    ]
    if "request_goodput" in figures:
        rows.append(("Good requests/s", figures["request_goodput"]))
    lines = [f"{name:<40}{_number(value):>12}" for name, value in rows]
    for name in metrics:
        if f"mean_{name}_ms" not in figures:
            continue
        lines.append(f"--- {METRICS[name]} ".ljust(52, "-"))
        kinds = [("mean", "Mean"), ("median", "Median"), *((f"p{p:g}", f"P{p:g}") for p in percentiles)]
        for kind, title in kinds:
            label = f"{title} {name.upper()} (ms)"
            lines.append(f"{label:<40}{_number(figures[f'{kind}_{name}_ms']):>12}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"
