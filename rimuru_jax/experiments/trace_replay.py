"""A bursty service on a card that is too small: a pool cut once between experts and requests, against one that moves.

    python -m rimuru_jax.experiments.trace_replay Qwen3.5-35B-A3B --output DIR

Thirteen minutes of a production trace (code completion, bursts between quiet minutes), slowed down until its bursts exceed
what the card can do and its mean does not. The cut is the best one for the trace's mean: of all fixed limits, the one
with the lowest mean latency when the same requests come evenly at random. Beside it stands the cut that someone would
have chosen who knew the trace: the one with the lowest p99 TTFT on the trace itself.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rimuru_jax.experiments import study
from rimuru_jax.experiments.eol_sweep import elastic, limits
from rimuru_jax.experiments.pictures import Panel, curves, latencies, pool_over_time
from rimuru_jax.experiments.results import Arrival, RunResult
from rimuru_jax.experiments.study import Case

MAX_MODEL_LEN = 16384
TIME_SCALE = 3.0


def steady(arrivals: Sequence[Arrival], seed: int = 0) -> list[Arrival]:
    """The same requests within the same time, each at any moment with the same chance."""
    last = max(arrival.seconds for arrival in arrivals)
    times = np.sort(np.random.default_rng(seed).uniform(0, last, len(arrivals)))
    return [
        Arrival(float(time), arrival.prompt_tokens, arrival.output_tokens)
        for time, arrival in zip(times, arrivals, strict=True)
    ]


def cuts(case: Case, arrivals: Sequence[Arrival], tried: Sequence[int]) -> dict[int, RunResult]:
    """What each fixed limit makes of these requests, as far as it serves all of them."""
    runs = {limit: case.run(arrivals, memory_policy="fixed", expert_offload_limit=limit) for limit in tried}
    return {
        limit: run
        for limit, run in runs.items()
        if isinstance(run, RunResult) and not any(request.error for request in run.requests)
    }


def best(runs: Mapping[int, RunResult], figure: str) -> int:
    """The limit with the lowest figure. Raises ValueError when there are none."""
    if not runs:
        raise ValueError("no fixed limit serves all requests: give it more memory or a smaller max_model_len")
    return min(runs, key=lambda limit: study.figures(runs[limit])[figure])


def replay(args: argparse.Namespace) -> None:
    case = study.case_of(args, study.bursts(args.requests, args.time_scale), MAX_MODEL_LEN)
    tried = limits(case)
    even, bursty = (cuts(case, arrivals, tried) for arrivals in (steady(case.arrivals), case.arrivals))
    for_mean, for_trace = best(even, "mean_e2el_s"), best(bursty, "p99_ttft_s")
    # A cut that serves the mean may fail the trace, which is for the table to say.
    outcomes = {
        f"split, best for the mean: {for_mean} away": case.run(
            memory_policy="fixed", expert_offload_limit=for_mean
        ),
        f"split, best in hindsight: {for_trace} away": bursty[for_trace],
    }
    moving = elastic(case, tried[-1], case.arrivals)
    outcomes |= moving
    print(study.table(outcomes))
    results = study.results_only(outcomes)
    if args.output is None:
        return
    title = study.title(
        args, case, f"{len(case.arrivals):,} requests of Azure's code trace, {args.time_scale:g} times slower"
    )
    drawn = [name for name in results if "hindsight" not in name]
    pool_over_time({name: results[name] for name in drawn}, args.output / "trace_replay.png", title)
    latencies(results, args.output / "trace_replay_latency.png", title)
    panels = _panels(even, bursty, study.results_only(moving))
    curves(panels, args.output / "trace_replay_cuts.png", title, across="experts away from each layer")
    content: dict[str, Any] = {
        "time_scale": args.time_scale,
        "runs": study.runs_to_json(outcomes),
        "even_arrivals": {limit: study.figures(run) for limit, run in even.items()},
        "cuts": {limit: study.figures(run) for limit, run in bursty.items()},
    }
    study.save(args, case, "trace_replay", content)


def _panels(
    even: Mapping[int, RunResult],
    bursty: Mapping[int, RunResult],
    moving: Mapping[str, RunResult],
) -> list[Panel]:
    panels = []
    for label, key, runs in (
        ("even arrivals: mean latency, s", "mean_e2el_s", even),
        ("the trace: p99 TTFT, s", "p99_ttft_s", bursty),
        ("the trace: mean TPOT, ms", "mean_tpot_ms", bursty),
    ):
        line = (list(runs), [study.figures(run)[key] for run in runs.values()])
        levels = {} if runs is even else {name: study.figures(run)[key] for name, run in moving.items()}
        panels.append(Panel(label=label, lines={"cut once": line}, levels=levels))
    return panels


def main() -> None:
    parser = study.arguments(__doc__, model="Qwen3.5-35B-A3B", requests=3000)
    parser.add_argument(
        "--time-scale", type=float, default=TIME_SCALE, help="how many times slower requests come"
    )
    study.command(parser, replay)


if __name__ == "__main__":
    main()
