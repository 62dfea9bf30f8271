"""How many experts of a layer should be away? Every fixed limit, from as many resident as fit to as few as can be,
against the policies that move residency.

    python -m rimuru_jax.experiments.eol_sweep Qwen3-30B-A3B --output DIR

Three loads, simulated: one stream, eight, and 300 conversations of ShareGPT that come at once. A fixed limit that is
right for one of them is wrong for another. Writes tables, JSON and a picture.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rimuru_jax.experiments import study
from rimuru_jax.experiments.pictures import Panel, curves
from rimuru_jax.experiments.results import Arrival
from rimuru_jax.experiments.study import Case, Outcome

STREAM = Arrival(0.0, 512, 128)
STEPS = (0, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8, 1)
"""Limits that are tried, between the least and the largest."""

ELASTIC = {
    "elastic, watermark": {"adjuster_policy": "watermark"},
    "elastic, throughput": {"adjuster_policy": "throughput"},
}


def limits(case: Case) -> list[int]:
    """Of experts away from each layer: from the least with which the longest request fits to all but one token's.

    Raises ValueError when even the largest does not fit.
    """
    moe = case.model.moe
    most = moe.num_experts - moe.num_experts_per_tok
    least = case.simulation(memory_policy="fixed").plan.expert_offload_limit
    return sorted({round(min(least, most) + step * max(0, most - least)) for step in STEPS})


def elastic(case: Case, limit: int, arrivals: Sequence[Arrival]) -> dict[str, Outcome]:
    """The policies that may give up experts up to the same limit."""
    return {
        name: case.run(arrivals, memory_policy="elastic", expert_offload_limit=limit, **arguments)
        for name, arguments in ELASTIC.items()
    }


def loads(case: Case) -> dict[str, Sequence[Arrival]]:
    return {"1 stream": [STREAM], "8 streams": [STREAM] * 8, f"{len(case.arrivals)} at once": case.arrivals}


def sweep(args: argparse.Namespace) -> None:
    case = study.case_of(args, study.conversations(args.requests), max_model_len=8192)
    tried = limits(case)
    content: dict[str, Any] = {"limits": tried, "loads": {}}
    panels = []
    for load, arrivals in loads(case).items():
        fixed = {
            f"fixed: {limit} away": case.run(arrivals, memory_policy="fixed", expert_offload_limit=limit)
            for limit in tried
        }
        moving = elastic(case, tried[-1], arrivals)
        print(f"\n{load}\n\n{study.table(fixed | moving)}")
        found = {name: study.figures(run) for name, run in study.results_only(fixed | moving).items()}
        content["loads"][load] = found
        panels += _panels(load, tried, list(fixed), found)
    if args.output is None:
        return
    title = study.title(args, case, "Experts away from each layer: fixed, and moved with the load")
    curves(panels, args.output / "eol_sweep.png", title, across="expert_offload_limit")
    study.save(args, case, "eol_sweep", content)


def _panels(
    load: str, tried: Sequence[int], names: Sequence[str], found: Mapping[str, Mapping[str, float]]
) -> list[Panel]:
    def panel(what: str, key: str) -> Panel:
        pairs = [(limit, found[n][key]) for limit, n in zip(tried, names, strict=True) if n in found]
        x, y = np.array(pairs, float).reshape(-1, 2).T
        levels = {name: figures[key] for name, figures in found.items() if name in ELASTIC}
        return Panel(label=f"{load}: {what}", lines={"fixed": (x.tolist(), y.tolist())}, levels=levels)

    return [
        panel("output tok/s", "output_throughput"),
        panel("mean ms per token", "mean_tpot_ms"),
        panel("p99 TTFT, s", "p99_ttft_s"),
    ]


def main() -> None:
    study.command(study.arguments(__doc__, model="Qwen3-30B-A3B", requests=300), sweep)


if __name__ == "__main__":
    main()
