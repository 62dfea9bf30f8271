"""What each part is worth: the whole engine, and the engine with one part switched off.

    python -m rimuru_jax.experiments.ablation Qwen3.5-35B-A3B --output DIR

The load is that of `trace_replay`, and one stream alone. Off means:

- allocator: every kind of page has a region of its own, cut once (experts; keys and values; recurrent states; conv
  states), as if each were an array. Requests get the same share of each as in the cut for as many of them, of the
  trace's mean length, as fit. Nothing can move between regions, so the adjuster is off as well.
- adjuster: residency of experts stays; what they leave is one pool for everything that requests hold. The cut is the
  best for the trace's mean (see `trace_replay`); the allocator's is the same.
- kernel: no operator finds weights where they lie. The weights that a layer needs are first copied side by side, from
  the pool and from the host, and then multiplied; nothing overlaps. The memory for that copy is not counted.
- prefetch: nothing is copied ahead of its layer; absent experts are read from the host in place when they are needed
  (`expert_prefetch="none"`).
"""

import argparse
from typing import Any

import numpy as np

from rimuru_jax.experiments import study, trace_replay
from rimuru_jax.experiments.eol_sweep import STREAM, limits
from rimuru_jax.experiments.pictures import bars, latencies
from rimuru_jax.experiments.split_pool import SplitAllocator, even_split
from rimuru_jax.experiments.study import Case

ELASTIC = {"memory_policy": "elastic", "adjuster_policy": "throughput"}


def variants(case: Case) -> dict[str, dict[str, Any]]:
    """Arguments of `Case.run`."""
    even = trace_replay.cuts(case, trace_replay.steady(case.arrivals), limits(case))
    fixed = {"memory_policy": "fixed", "expert_offload_limit": trace_replay.best(even, "mean_e2el_s")}
    tokens = round(np.mean([a.prompt_tokens + a.output_tokens for a in case.arrivals]))
    return {
        "everything": ELASTIC,
        "without allocator": fixed
        | {"allocator": lambda plan: SplitAllocator(plan, even_split(plan, tokens))},
        "without adjuster": fixed,
        "without kernel": ELASTIC | {"fused": False},
        "without prefetch": ELASTIC | {"expert_prefetch": "none"},
    }


def ablate(args: argparse.Namespace) -> None:
    if not args.time_scale > 0:
        raise ValueError(f"--time-scale is {args.time_scale:g}, it must be above 0")
    case = study.case_of(args, study.bursts(args.requests, args.time_scale), trace_replay.MAX_MODEL_LEN)
    chosen = variants(case)
    busy = {name: case.run(**arguments) for name, arguments in chosen.items()}
    alone = {name: case.run([STREAM], **arguments) for name, arguments in chosen.items()}
    print(f"The trace\n\n{study.table(busy)}\n\nOne stream\n\n{study.table(alone)}")
    if args.output is None:
        return
    results, lone = study.results_only(busy), study.results_only(alone)
    both = [name for name in results if name in lone]
    title = study.title(
        args,
        case,
        f"Parts switched off: Azure's code trace, {args.time_scale:g} times slower, and one stream",
    )
    panels = {
        label: {name: study.figures(runs[name])[key] for name in both}
        for label, key, runs in (
            ("p99 TTFT, s", "p99_ttft_s", results),
            ("p50 TTFT, s", "p50_ttft_s", results),
            ("mean TPOT, ms", "mean_tpot_ms", results),
            ("output tok/s", "output_throughput", results),
            ("one stream: ms per token", "mean_tpot_ms", lone),
        )
    }
    bars(panels, args.output / "ablation.png", title)
    latencies(results, args.output / "ablation_latency.png", title)
    content = {
        "time_scale": args.time_scale,
        "runs": study.runs_to_json(busy),
        "one_stream": study.runs_to_json(alone),
    }
    study.save(args, case, "ablation", content)


def main() -> None:
    parser = study.arguments(__doc__, model="Qwen3.5-35B-A3B", requests=3000)
    parser.add_argument(
        "--time-scale",
        type=float,
        default=trace_replay.TIME_SCALE,
        help="how many times slower requests come",
    )
    study.command(parser, ablate)


if __name__ == "__main__":
    main()
