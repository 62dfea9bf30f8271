"""The same requests under every memory policy: how many run at once, in how many steps, and what that is worth in time.

    python -m rimuru_jax.experiments.case_study path/to/Qwen1.5-MoE-A2.7B/config.json --card rtx-5090

300 conversations of ShareGPT that come at once, simulated. Writes a table, JSON and pictures.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rimuru_jax.bench.report import summary
from rimuru_jax.bench.workload import trace_lengths
from rimuru_jax.config import EngineConfig
from rimuru_jax.experiments.cards import CARDS, Card
from rimuru_jax.experiments.pictures import pool_over_time
from rimuru_jax.experiments.simulator import (
    ROUTING,
    Arrival,
    Simulation,
    SimulationResult,
    matched_profile,
    pool_for,
    popularity,
)
from rimuru_jax.models.config import ModelConfig
from rimuru_jax.models.registry import parse_config, read_config

TRACE = Path(__file__).parent / "data" / "sharegpt_qwen3_lengths.csv"


def policies(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """Engine arguments of each way to share the pool."""
    experts = model.moe.num_experts
    fixed = {
        f"fixed: {away} of {experts} experts of a layer away": {
            "memory_policy": "fixed",
            "expert_offload_limit": away,
        }
        for away in (experts // 2, experts * 3 // 4)
    }
    elastic = {"memory_policy": "elastic", "expert_offload_limit": experts * 3 // 4}
    return {
        "static: all experts resident": {"memory_policy": "static"},
        **fixed,
        "elastic, watermark: as published": elastic | {"adjuster_policy": "watermark"},
        "elastic, throughput: as far as it pays": {
            "memory_policy": "elastic",
            "adjuster_policy": "throughput",
        },
    }


def run(
    model: ModelConfig, card: Card, device_bytes: int, routing: str, arrivals: Sequence[Arrival]
) -> dict[str, SimulationResult | str]:
    """The result of each policy, or why it cannot run."""
    shares = popularity(model, ROUTING[routing])
    results: dict[str, SimulationResult | str] = {}
    for name, arguments in policies(model).items():
        config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, **arguments)
        try:
            pool = pool_for(model, config, device_bytes)
            config = dataclasses.replace(config, page_pool_bytes=pool)
            results[name] = Simulation(model, config, card, shares, matched_profile(model, shares)).run(
                arrivals
            )
        except ValueError as error:
            results[name] = str(error)
    return results


def table(results: dict[str, SimulationResult | str]) -> str:
    rows = [
        "| policy | most at once | steps | seconds | output tok/s | mean TPOT ms | p99 TTFT s | preemptions |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        if isinstance(result, str):
            rows.append(f"| {name} | does not fit | | | | | | |")
            continue
        figures = summary(
            result.requests, result.seconds, metrics=["ttft", "tpot"], percentiles=[99], goodput={}
        )
        rows.append(
            f"| {name} | {result.peak_running} | {result.steps} | {result.seconds:.0f} | "
            f"{figures['output_throughput']:.0f} | {figures['mean_tpot_ms']:.1f} | "
            f"{figures['p99_ttft_ms'] / 1000:.0f} | {result.counters['num_preemptions']} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="model folder, or a config.json")
    parser.add_argument("--card", choices=CARDS, default="rtx-5090")
    parser.add_argument("--device-gib", type=float, help="of the card's memory; default: all of it")
    parser.add_argument("--routing", choices=ROUTING, default="uniform")
    parser.add_argument("--output", type=Path, help="folder for JSON and pictures")
    args = parser.parse_args()
    try:
        study(args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.error(str(error))


def study(args: argparse.Namespace) -> None:
    model, card = parse_config(read_config(args.model)), CARDS[args.card]
    requests = trace_lengths(TRACE, 300)
    arrivals = [Arrival(0.0, request.prompt_tokens, request.output_tokens) for request in requests]
    memory = int(args.device_gib * 2**30) if args.device_gib else card.memory_bytes
    results = run(model, card, memory, args.routing, arrivals)
    print(table(results))
    if args.output is None or all(isinstance(result, str) for result in results.values()):
        return
    args.output.mkdir(parents=True, exist_ok=True)
    runs = {name: result for name, result in results.items() if isinstance(result, SimulationResult)}
    title = (
        f"{model.model_type}, simulated on {card.name} with {memory / 2**30:.1f} GiB: 300 requests at once"
    )
    pool_over_time(
        {name: result.timeline for name, result in runs.items()}, args.output / "case_study.png", title
    )
    content = {"card": dataclasses.asdict(card), "device_memory": memory, "routing": args.routing}
    content["runs"] = {name: result.to_json() for name, result in runs.items()}
    (args.output / "case_study.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
