"""The same requests under every memory policy: how many run at once, in how many steps, and what that is worth in time.

    python -m rimuru_jax.experiments.case_study Qwen1.5-MoE-A2.7B --card rtx-5090 --output DIR

300 conversations of ShareGPT that come at once, simulated. Writes a table, JSON and pictures.
"""

import argparse
from typing import Any

from rimuru_jax.experiments import study
from rimuru_jax.experiments.pictures import latencies, pool_over_time
from rimuru_jax.models.config import ModelConfig


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


def compare(args: argparse.Namespace) -> None:
    case = study.case_of(args, study.conversations(args.requests), max_model_len=8192)
    outcomes = {name: case.run(**arguments) for name, arguments in policies(case.model).items()}
    print(study.table(outcomes))
    results = study.results_only(outcomes)
    if args.output is None or not results:
        return
    title = study.title(args, case, f"{len(case.arrivals)} requests at once")
    pool_over_time(results, args.output / "case_study.png", title)
    latencies(results, args.output / "case_study_latency.png", title)
    study.save(args, case, "case_study", {"runs": study.runs_to_json(outcomes)})


def main() -> None:
    defaults = {"model": "Qwen1.5-MoE-A2.7B", "card": "rtx-5090", "device_gib": 0, "routing": "uniform"}
    study.command(study.arguments(__doc__, requests=300, **defaults), compare)


if __name__ == "__main__":
    main()
