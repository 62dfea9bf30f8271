"""The studies' requests on an engine that exists: the same table, JSON and pictures, measured.

    python -m rimuru_jax.experiments.measured case_study Qwen1.5-MoE-A2.7B --device-gib 32 --output DIR
    python -m rimuru_jax.experiments.measured trace_replay Qwen3.5-35B-A3B --device-gib 32 --requests 300 --output DIR

    python -m rimuru_jax.experiments.measured draw DIR/measured_case_study.json --output DIR

All policies in one process: the same weights, the same compiled steps. Models known by name have random weights, so that
their routing is close to even; a folder has its own. The cut of `trace_replay` is found by simulation as that study does.
What was measured is written before pictures are made, which can be done anywhere, later (`draw`).
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rimuru_jax.bench.in_process import random_requests
from rimuru_jax.bench.report import BenchResult
from rimuru_jax.cuda_driver import cuda_driver
from rimuru_jax.engine import Engine
from rimuru_jax.experiments import case_study, eol_sweep, study, trace_replay
from rimuru_jax.experiments.pictures import latencies, pool_over_time
from rimuru_jax.experiments.results import Arrival, RunResult, Timeline, used_bytes
from rimuru_jax.host.page_layout import EXPERT
from rimuru_jax.memory_budget import describe_peak

NOT_DONE = "not done in time"
IDLE_SECONDS = 0.001
"""Between looks at the clock while no request is there."""


def serve(engine: Engine, arrivals: Sequence[Arrival], *, until: float = float("inf")) -> RunResult:
    """Serve random prompts of these lengths as they arrive, to the end or for `until` seconds.

    Requests that could never be served have an error, and so have those that are not done by `until`, which are ended.
    The engine must have none of its own. Raises ValueError when none can be served.
    """
    prompts = random_requests(engine, [(a.prompt_tokens, a.output_tokens) for a in arrivals])
    results = [BenchResult(start=a.seconds, prompt_tokens=a.prompt_tokens) for a in arrivals]
    last: dict[int, float] = {}
    timeline, next_arrival, before = Timeline(), 0, engine.get_metrics()
    begin = time.perf_counter()
    while next_arrival < len(arrivals) or engine.has_unfinished_requests():
        now = time.perf_counter() - begin
        if now >= until:
            break
        while next_arrival < len(arrivals) and arrivals[next_arrival].seconds <= now:
            try:
                engine.add_request(str(next_arrival), *prompts[next_arrival])
            except ValueError as error:
                results[next_arrival].error = str(error)
            next_arrival += 1
        if not engine.has_unfinished_requests():
            time.sleep(IDLE_SECONDS)
            continue
        outputs, now = engine.step(), time.perf_counter() - begin
        tokens = 0
        for output in outputs:
            number, (completion,) = int(output.request_id), output.outputs
            result = results[number]
            if len(completion.token_ids) > result.output_tokens:
                tokens += 1
                result.output_tokens += 1
                if result.output_tokens == 1:
                    result.ttft = now - result.start
                else:
                    result.itl.append(now - last[number])
                last[number] = now
            if completion.finish_reason == "length":
                result.latency = now - result.start
            elif output.finished:
                result.error = str(completion.finish_reason)
        after = engine.get_metrics()
        _record(timeline, engine, now, tokens, before, after)
        before = after
    if not timeline.seconds:
        raise ValueError(f"no request could be served: {next(r.error for r in results)}")
    counters = dict(engine.get_metrics())
    for number, result in enumerate(results):
        if not result.latency and not result.error:
            engine.abort(str(number))
            result.error = NOT_DONE
    while engine.has_unfinished_requests():
        engine.step()
    return RunResult(results, timeline, counters, engine.experts.num_experts)


def _record(
    timeline: Timeline,
    engine: Engine,
    now: float,
    tokens: int,
    before: Mapping[str, int | float],
    after: Mapping[str, int | float],
) -> None:
    timeline.seconds.append(now)
    timeline.tokens.append(tokens)
    timeline.running.append(int(after["num_requests_running"]))
    timeline.waiting.append(int(after["num_requests_waiting"]))
    timeline.resident_experts.append(engine.experts.resident_experts)
    more = {name: after[name] - before[name] for name in ("expert_host_reads", "expert_pages_loaded")}
    pages = more["expert_host_reads"] * engine.experts.matrices + more["expert_pages_loaded"]
    timeline.host_bytes.append(pages * engine.plan.layout[EXPERT].stride_bytes)
    for kind, used in used_bytes(engine.plan, engine.allocator).items():
        timeline.pool_bytes.setdefault(kind, []).append(used)


def load(args: argparse.Namespace, max_model_len: int) -> Engine:
    """The engine that a command asks for, under the default policy."""
    model = study.config_path(args.model)
    memory: dict[str, Any] = {"page_pool_bytes": args.page_pool_bytes}
    if args.page_pool_bytes is None:
        device = jax.devices()[0]
        if device.platform != "gpu":
            raise ValueError(f"there is no GPU but {device.device_kind}: give --page-pool-bytes")
        total = cuda_driver(device.local_hardware_id).total_memory()
        memory = {"gpu_memory_utilization": min(1.0, args.device_gib * 2**30 / total)}
    limits = study.LIMITS | {"max_num_batched_tokens": args.max_num_batched_tokens}
    return Engine(
        model,
        load_format="dummy" if model.is_file() else "auto",
        max_model_len=max_model_len,
        **limits,
        **memory,
    )


def measure(
    engine: Engine, arrivals: Sequence[Arrival], policies: Mapping[str, Mapping[str, Any]], seconds: float
) -> dict[str, study.Outcome]:
    """What each policy makes of the same requests, or why it cannot."""
    outcomes: dict[str, study.Outcome] = {}
    for name, arguments in policies.items():
        try:
            engine.reconfigure(**{"expert_offload_limit": "auto", **arguments})
            result = serve(engine, arrivals, until=seconds)
        except ValueError as error:
            outcomes[name] = str(error)
        else:
            if left := sum(request.error == NOT_DONE for request in result.requests):
                # Its figures are of those that were done, so that nobody must take them for the others'.
                tokens = sum(result.timeline.tokens) / result.seconds
                name = f"{name} (ended after {seconds:g} s at {tokens:.0f} tok/s with {left} requests left)"
            outcomes[name] = result
        print(study.table({name: outcomes[name]}).splitlines()[-1], flush=True)
    return outcomes


class Load(NamedTuple):
    """What a study serves, and how."""

    arrivals: list[Arrival]
    policies: dict[str, dict[str, Any]]
    """Fields of `EngineConfig` by name."""
    max_model_len: int
    what: str
    """For titles."""


def conversations(args: argparse.Namespace) -> Load:
    """Of `case_study`."""
    arrivals = study.conversations(args.requests)
    policies = case_study.policies(study.find_model(args.model))
    return Load(arrivals, policies, 8192, f"{len(arrivals)} requests at once")


def bursts(args: argparse.Namespace) -> Load:
    """Of `trace_replay`."""
    arrivals = study.bursts(args.requests, args.time_scale)
    cut = args.cut
    if cut is None:
        simulated = argparse.Namespace(
            model=args.model, card="h200", device_gib=args.device_gib, routing="uniform"
        )
        case = study.case_of(simulated, arrivals, trace_replay.MAX_MODEL_LEN)
        even = trace_replay.cuts(case, trace_replay.steady(arrivals), eol_sweep.limits(case))
        cut = trace_replay.best(even, "mean_e2el_s")
    policies = {
        f"split, best for the mean: {cut} away": {"memory_policy": "fixed", "expert_offload_limit": cut},
        "elastic, throughput": {"memory_policy": "elastic", "adjuster_policy": "throughput"},
        "elastic, watermark": {"memory_policy": "elastic", "adjuster_policy": "watermark"},
    }
    what = f"{len(arrivals):,} requests of Azure's code trace, {args.time_scale:g} times slower"
    return Load(arrivals, policies, trace_replay.MAX_MODEL_LEN, what)


STUDIES: dict[str, Callable[[argparse.Namespace], Load]] = {
    "case_study": conversations,
    "trace_replay": bursts,
}


def run(args: argparse.Namespace) -> None:
    """Measure, save, draw."""
    if not args.seconds > 0:
        raise ValueError(f"--seconds is {args.seconds:g}, it must be above 0")
    arrivals, policies, longest, what = STUDIES[args.study](args)
    if unknown := set(args.policies or ()) - set(policies):
        raise ValueError(
            f"--policies has {', '.join(sorted(unknown))}, {args.study} has {'; '.join(policies)}"
        )
    policies = {name: policies[name] for name in args.policies or policies}
    engine = load(args, min(longest, study.find_model(args.model).max_position_embeddings))
    device, weights = jax.devices()[0], engine.config.load_format
    gib = engine.plan.pool_bytes / 2**30
    print(f"{device.device_kind}, jax {jax.__version__}, pool of {gib:.2f} GiB; {what}", flush=True)
    outcomes = measure(engine, arrivals, policies, args.seconds)
    print(describe_peak())
    print(study.table(outcomes))
    if args.output is None:
        return
    content = {
        "simulated": False,
        "study": args.study,
        "model": study.short_name(args.model),
        "weights": weights,
        "device": device.device_kind,
        "jax": jax.__version__,
        "pool_bytes": engine.plan.pool_bytes,
        "title": f"{what}\n{study.short_name(args.model)}, measured: {device.device_kind}, {gib:.1f} GiB of pages, "
        f"{weights} weights",
        "runs": {
            name: outcome if isinstance(outcome, str) else dataclasses.asdict(outcome)
            for name, outcome in outcomes.items()
        },
    }
    path = args.output / f"measured_{args.study}.json"
    path.write_text(json.dumps(content) + "\n")
    _draw(content, args.output)


def draw(args: argparse.Namespace) -> None:
    """Table and pictures of what an earlier run wrote."""
    content = json.loads(args.file.read_text())
    try:
        outcomes = _outcomes(content)
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{args.file} is not what `measured` writes of a run") from None
    print(study.table(outcomes))
    if args.output is not None:
        _draw(content, args.output)


def _outcomes(content: Mapping[str, Any]) -> dict[str, study.Outcome]:
    def outcome(run: Any) -> study.Outcome:
        if isinstance(run, str):
            return run
        requests, timeline = (
            [BenchResult(**request) for request in run["requests"]],
            Timeline(**run["timeline"]),
        )
        return RunResult(requests, timeline, run["counters"], run["experts"])

    return {name: outcome(run) for name, run in content["runs"].items()}


def _draw(content: Mapping[str, Any], folder: Path) -> None:
    """Pictures, and the figures in a file of reasonable size."""
    outcomes, name = _outcomes(content), f"measured_{content['study']}"
    figures = dict(content) | {"runs": study.runs_to_json(outcomes)}
    (folder / f"{name}_figures.json").write_text(json.dumps(figures) + "\n")
    if results := study.results_only(outcomes):
        pool_over_time(results, folder / f"{name}.png", content["title"])
        latencies(results, folder / f"{name}_latency.png", content["title"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="study", required=True)
    for name in STUDIES:
        command = commands.add_parser(name)
        command.add_argument("model", help="as the study takes it")
        command.add_argument("--device-gib", type=float, default=32.0, help="of the card's memory")
        command.add_argument("--page-pool-bytes", type=int, help="in place of --device-gib")
        command.add_argument(
            "--max-num-batched-tokens", type=int, default=study.LIMITS["max_num_batched_tokens"]
        )
        command.add_argument("--requests", type=int, default=300, help="the first so many of the trace")
        command.add_argument("--policies", nargs="+", help="by the names in the table; default: all")
        command.add_argument("--seconds", type=float, default=float("inf"), help="of each policy, at most")
        command.add_argument("--output", type=Path, help="folder for JSON and pictures")
        command.set_defaults(run=run)
        if name == "trace_replay":
            command.add_argument(
                "--time-scale", type=float, default=trace_replay.TIME_SCALE, help="times slower"
            )
            command.add_argument(
                "--cut",
                type=int,
                help="experts away from each layer, in place of a simulation that finds the best",
            )
    drawing = commands.add_parser("draw")
    drawing.add_argument("file", type=Path, help="measured_*.json of an earlier run")
    drawing.add_argument("--output", type=Path, help="folder for pictures")
    drawing.set_defaults(run=draw, requests=1)
    study.command(parser, lambda args: args.run(args))


if __name__ == "__main__":
    main()
