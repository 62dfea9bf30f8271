"""An engine whose experts do not all fit, under several policies in one process: one store of weights, one set of programs.

    python benchmarks/offload.py --model tests/data/configs/Qwen3-30B-A3B.json --device-gib 32

For each policy: milliseconds per decode step of some numbers of streams (the decodes of one batch, prompts of 128 tokens),
and the steady state: requests of a trace, of which some always wait, from when as many run as will until `--window`
seconds later. A policy is a name of `POLICIES`, or `fixed:N` with N experts of each layer away. With `--matched-hotset` each
starts with the experts resident that a batch of streams has chosen most before.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from rimuru_jax import Engine, SamplingParams
from rimuru_jax.bench.in_process import random_requests, run_requests
from rimuru_jax.bench.workload import trace_lengths
from rimuru_jax.controller import fingerprint
from rimuru_jax.cuda_driver import cuda_driver
from rimuru_jax.host.hotset import HotsetProfile
from rimuru_jax.memory_budget import describe_peak

POLICIES: dict[str, dict[str, Any]] = {
    "throughput": {"memory_policy": "elastic", "adjuster_policy": "throughput"},
    "watermark": {"memory_policy": "elastic", "adjuster_policy": "watermark"},
    "fixed": {"memory_policy": "fixed"},
}
TRACE = Path(__file__).parents[1] / "rimuru_jax/experiments/data/sharegpt_qwen3_lengths.csv"
PROMPT, CONTEXT_STEPS = 128, 32
PROFILED = 64
"""Streams whose choices make a hotset."""
WAITING = 4
"""Requests that wait at any time in the steady state."""
MOST_REQUESTS = 1000
"""Of a trace."""
SETTLED = 40
"""Steps in which no more requests came to run than before: as many run as will."""


@dataclass(frozen=True)
class SteadyState:
    """Means over a window."""

    output_tokens_per_second: float
    prompt_tokens_per_second: float
    step_ms: float
    running: float
    resident_experts: float
    preemptions: int
    settling_seconds: float


def settings_of(policy: str) -> dict[str, Any]:
    """What `Engine.reconfigure` takes for a policy. Raises ValueError for a name that is none."""
    name, _, limit = policy.partition(":")
    if name not in POLICIES or (limit and not limit.isdigit()):
        raise ValueError(f"policy is {policy!r}, it must be one of {', '.join(POLICIES)}, or fixed:N")
    return {**POLICIES[name], "expert_offload_limit": int(limit) if limit else "auto"}


def decode_ms(engine: Engine, streams: int) -> float:
    """Median of the steps in which all streams decode."""
    requests = random_requests(engine, [(PROMPT, CONTEXT_STEPS)] * streams)
    _, steps = run_requests(engine, requests)
    return 1e3 * statistics.median(steps[-CONTEXT_STEPS + 2 : -2])


def record_hotset(engine: Engine, path: Path) -> None:
    """What PROFILED streams choose, for `expert_hotset_path`."""
    run_requests(engine, random_requests(engine, [(PROMPT, CONTEXT_STEPS)] * PROFILED, seed=1))
    counts, tokens = engine.router_counts, engine.num_routed_tokens
    HotsetProfile(
        model=fingerprint(engine.model_config), counts=counts, tokens=tokens, data="random prompts"
    ).save(path)


def steady_state(engine: Engine, lengths: list[tuple[int, int]], window: float, most: float) -> SteadyState:
    """Serve the trace over and over; wait until concurrency settles, `most` seconds at the longest, then measure."""
    source = endless(engine, lengths)
    begin = time.perf_counter()
    best, since = 0, 0
    while since < SETTLED and time.perf_counter() - begin < most:
        running = step(engine, source)
        best, since = (running, 0) if running > best else (best, since + 1)
    settled, before = time.perf_counter(), dict(engine.get_metrics())
    runs, residents = [], []
    while (now := time.perf_counter()) - settled < window:
        runs.append(step(engine, source))
        residents.append(int(engine.experts.resident.sum()))
    after, seconds = engine.get_metrics(), now - settled
    drain(engine)
    return SteadyState(
        output_tokens_per_second=(after["generation_tokens"] - before["generation_tokens"]) / seconds,
        prompt_tokens_per_second=(after["prompt_tokens"] - before["prompt_tokens"]) / seconds,
        step_ms=1e3 * seconds / len(runs),
        running=statistics.mean(runs),
        resident_experts=statistics.mean(residents),
        preemptions=int(after["num_preemptions"] - before["num_preemptions"]),
        settling_seconds=settled - begin,
    )


def step(engine: Engine, source: Iterator[tuple[str, list[int], SamplingParams]]) -> int:
    """One step, with enough requests waiting; the number that runs."""
    while len(engine.scheduler.waiting) < WAITING:
        engine.add_request(*next(source))
    engine.step()
    return int(engine.get_metrics()["num_requests_running"])


def endless(
    engine: Engine, lengths: list[tuple[int, int]]
) -> Iterator[tuple[str, list[int], SamplingParams]]:
    requests = random_requests(engine, lengths)
    for number, (prompt, params) in enumerate(itertools.cycle(requests)):
        yield f"steady-{number}", prompt, params


def drain(engine: Engine) -> None:
    for request_id in [*engine._states]:
        engine.abort(request_id)
    while engine.has_unfinished_requests():
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model folder, or a config.json for dummy weights")
    parser.add_argument("--device-gib", type=float, help="memory that may be used; needs a GPU")
    parser.add_argument("--page-pool-bytes", type=int, help="in place of --device-gib")
    parser.add_argument("--policies", nargs="+", default=["throughput", "watermark", "fixed"])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--window", type=float, default=200, help="seconds; 0 leaves the steady state out")
    parser.add_argument("--settle", type=float, default=200, help="seconds to wait for it at most")
    parser.add_argument("--skew", type=float, default=0.0, help="dummy_router_skew")
    parser.add_argument("--matched-hotset", action="store_true", help="record a hotset first")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    policies = {policy: settings_of(policy) for policy in args.policies}
    share: dict[str, Any] = {"page_pool_bytes": args.page_pool_bytes}
    if args.device_gib:
        total = cuda_driver(jax.devices()[0].local_hardware_id).total_memory()
        share = {"gpu_memory_utilization": args.device_gib * 2**30 / total}
    dummy = Path(args.model).is_file()
    engine = Engine(
        args.model,
        load_format="dummy" if dummy else "auto",
        dummy_router_skew=args.skew,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        **share,
    )
    lengths = [(r.prompt_tokens, r.output_tokens) for r in trace_lengths(args.trace, MOST_REQUESTS)]
    lengths = [pair for pair in lengths if sum(pair) <= engine.plan.max_model_len]
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, pool {engine.plan.pool_bytes / 2**30:.2f} GiB"
    )
    print("| policy | limit | " + " | ".join(f"ms, {n} streams" for n in args.streams), end=" | ")
    print("output tokens/s | prompt tokens/s | ms | running | resident | preempted | settled after, s |")
    print("| --- " * (9 + len(args.streams)) + "|", flush=True)
    results = {}
    if args.matched_hotset:
        path = Path(tempfile.mkdtemp()) / "hotset.json"
        record_hotset(engine, path)
        policies = {name: settings | {"expert_hotset_path": str(path)} for name, settings in policies.items()}
    for policy, settings in policies.items():
        engine.reconfigure(**settings)
        limit = engine.plan.expert_offload_limit
        times = [decode_ms(engine, streams) for streams in args.streams]
        steady = steady_state(engine, lengths, args.window, args.settle) if args.window else None
        results[policy] = {
            "limit": limit,
            "decode_ms": dict(zip(args.streams, times, strict=True)),
            "steady": steady and asdict(steady),
            "step_costs": engine.scheduler.step_costs and asdict(engine.scheduler.step_costs),
        }
        cells = [policy, str(limit), *(f"{ms:.1f}" for ms in times)]
        cells += [f"{value:.1f}" for value in asdict(steady).values()] if steady else []
        print(f"| {' | '.join(cells)} |", flush=True)
    print(describe_peak())
    if args.output:
        args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
