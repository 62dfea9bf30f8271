"""`rimuru simulate`: what a model would do on a card, without either."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rimuru_jax.cli.console import note, progress
from rimuru_jax.cli.options import engine_options, parse_bytes, with_options


@with_options(engine=engine_options)
def simulate(
    model: Annotated[Path, typer.Argument(help="Model folder, or a config.json of any size.")],
    engine: Mapping[str, Any],
    card: Annotated[str, typer.Option(help="GPU: h200, h100, a100-80g, rtx-5090, ...")] = "h200",
    device_memory: Annotated[
        Any,
        typer.Option(
            metavar="BYTES", parser=parse_bytes, help="Of the card that may be used. Default: all of it."
        ),
    ] = None,
    dataset_name: Annotated[
        Literal["random", "trace"], typer.Option(help="Where requests come from.")
    ] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="File of a trace (CSV, JSON lines).")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 300,
    random_input_len: Annotated[int, typer.Option(help="Tokens of a random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens to generate for it.")] = 128,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Requests per second; inf: all at once. Default: a trace's own times, else inf."),
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Factor of a trace's own times.")] = 1.0,
    routing: Annotated[
        Literal["uniform", "early_layer", "typical", "steep"],
        typer.Option(help="How unequally often experts are chosen."),
    ] = "typical",
    hotset: Annotated[
        Literal["matched", "none"],
        typer.Option(
            help="Whether residency follows the simulated routing. --expert-hotset-path names a profile."
        ),
    ] = "matched",
    save_result: Annotated[
        Path | None, typer.Option(help="Write figures and the timeline of the pool as JSON.")
    ] = None,
) -> None:
    """Run the scheduler, the allocator and the adjuster against a model of a card. Reads config.json only."""
    from rimuru_jax.bench import report, workload
    from rimuru_jax.config import EngineConfig
    from rimuru_jax.experiments import results, simulator
    from rimuru_jax.experiments.cards import CARDS
    from rimuru_jax.models.registry import parse_config, read_config

    if card not in CARDS:
        raise ValueError(f"--card is {card!r}, it must be one of {', '.join(CARDS)}")
    if num_prompts < 1 or not time_scale > 0:
        raise ValueError("--num-prompts and --time-scale must be positive")
    if (dataset_name == "random") != (dataset_path is None):
        wanted = "takes no" if dataset_name == "random" else "needs a"
        raise ValueError(f"--dataset-name {dataset_name} {wanted} --dataset-path")
    chosen = CARDS[card]
    described = parse_config(read_config(model))
    config = EngineConfig(**engine)
    if config.page_pool_bytes is None:
        memory = device_memory or chosen.memory_bytes
        pool = simulator.pool_for(described, config, memory)
        config = dataclasses.replace(config, page_pool_bytes=pool)
    if dataset_path is None:
        rate = float("inf") if request_rate is None else request_rate
        requests = [workload.BenchRequest([], random_input_len, random_output_len)] * num_prompts
        times = workload.arrivals(requests, rate, 1.0, config.seed)
    else:
        requests = workload.trace_lengths(dataset_path, num_prompts)
        times = [time_scale * (r.arrival or 0.0) for r in requests]
        if request_rate is not None:
            bare = [dataclasses.replace(r, arrival=None) for r in requests]
            times = workload.arrivals(bare, request_rate, 1.0, config.seed)
    arrivals = [
        results.Arrival(time, request.prompt_tokens, request.output_tokens)
        for time, request in zip(times, requests, strict=True)
    ]
    shares = simulator.popularity(described, simulator.ROUTING[routing], config.seed)
    profile = None
    if hotset == "matched" and config.expert_hotset_path is None:
        profile = simulator.matched_profile(described, shares)
    simulation = simulator.Simulation(described, config, chosen, shares, profile)
    with progress(f"{len(arrivals)} requests on a simulated {card}") as show:
        result = simulation.run(
            arrivals, progress=lambda done: show(done / len(arrivals), f"{done} of {len(arrivals)} requests")
        )
    errors = sorted({request.error for request in result.requests if request.error})
    if not result.counters["request_success"]:
        raise ValueError(f"no request could be served: {errors[0]}")
    metrics, percentiles = ["ttft", "tpot", "itl", "e2el"], [50, 90, 99]
    figures = report.summary(
        result.requests, result.seconds, metrics=metrics, percentiles=percentiles, goodput={}
    )
    figures |= {"steps": result.steps, "peak_running": result.peak_running, "counters": result.counters}
    print(report.text(figures, metrics, percentiles))
    print(f"{'Steps':<40}{result.steps:>12}\n{'Most requests running':<40}{result.peak_running:>12}")
    for name in ("num_preemptions", "expert_shrinks", "expert_expansions"):
        print(f"{name.replace('_', ' ').capitalize():<40}{result.counters[name]:>12}")
    if errors:
        note(f"refused requests: {errors[0]}" + (f" (and {len(errors) - 1} more)" if errors[1:] else ""))
    if save_result is not None:
        conditions = {
            "model": described.model_type, "card": dataclasses.asdict(chosen), "engine": dataclasses.asdict(config),
            "routing": routing, "hotset": hotset,
        }  # fmt: skip
        save_result.write_text(json.dumps(conditions | figures | result.to_json(), indent=1) + "\n")
        note(f"wrote {save_result}")
