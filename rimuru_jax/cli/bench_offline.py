"""`rimuru bench latency` and `throughput`: how fast an engine of this process is, in vLLM's arguments and results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from rimuru_jax.bench.in_process import random_requests, run_requests
from rimuru_jax.cli.console import note, progress
from rimuru_jax.cli.options import Model, engine_options, with_options
from rimuru_jax.cli.prompts import load_engine

if TYPE_CHECKING:
    from rimuru_jax.engine import Engine

PERCENTILES = (10, 25, 50, 75, 90, 99)
MANY_STEPS = 1000
"""Of how many steps at most the median is taken."""

OutputJson = Annotated[
    Path | None, typer.Option(help="File to write the result to; it is printed in any case.")
]


@with_options(engine=engine_options)
def latency(
    model: Model = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Prompts that are completed together.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(help="Batches before the measured ones.")] = 2,
    num_iters: Annotated[int, typer.Option(help="Batches that are measured.")] = 5,
    output_json: OutputJson = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Time of completing one batch of random prompts, and of its decode steps."""
    _check_positive(input_len=input_len, output_len=output_len, batch_size=batch_size, num_iters=num_iters)
    if num_iters_warmup < 0:
        raise ValueError(f"num_iters_warmup is {num_iters_warmup}, it must not be negative")
    engine = {**engine, "max_num_seqs": max(engine["max_num_seqs"], batch_size)}
    loaded, _ = load_engine(model, engine)
    lengths = [(input_len, output_len)] * batch_size
    _check_fit(loaded, lengths)
    requests = random_requests(loaded, lengths)
    latencies: list[float] = []
    steps: list[float] = []
    with progress(f"{num_iters_warmup + num_iters} batches of {batch_size}") as report:
        for index in range(num_iters_warmup + num_iters):
            seconds, of_steps = run_requests(loaded, requests)
            if index >= num_iters_warmup:
                latencies.append(seconds)
                # Tokens that every row decodes in one step: not those of the prompts' chunks before and the ends behind.
                steps += of_steps[-output_len + 2 : -2]
            report((index + 1) / (num_iters_warmup + num_iters), "measuring")
    _write(
        {
            "avg_latency": float(np.mean(latencies)),
            "latencies": latencies,
            "percentiles": _percentiles(latencies),
            "decode_step_ms": {str(p): 1e3 * s for p, s in _percentiles(steps[-MANY_STEPS:]).items()},
            "input_len": input_len,
            "output_len": output_len,
            "batch_size": batch_size,
        },
        loaded,
        output_json,
    )


@with_options(engine=engine_options)
def throughput(
    model: Model = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    output_len: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 128,
    num_prompts: Annotated[int, typer.Option(help="Requests, all there from the start.")] = 100,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            help="Lengths of a trace (CSV with input_tokens and output_tokens, or JSON lines) in place of fixed ones."
        ),
    ] = None,
    output_json: OutputJson = None,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Tokens per second of many random prompts that all wait at once."""
    _check_positive(input_len=input_len, output_len=output_len, num_prompts=num_prompts)
    lengths = [(input_len, output_len)] * num_prompts
    if dataset_path is not None:
        lengths = read_lengths(dataset_path, num_prompts)
    loaded, _ = load_engine(model, engine)
    _check_fit(loaded, lengths)
    requests = random_requests(loaded, lengths)
    with progress(f"{len(requests)} requests"):
        run_requests(loaded, requests[:1])
        seconds, steps = run_requests(loaded, requests)
    prompt_tokens, output_tokens = (sum(column) for column in zip(*lengths, strict=True))
    _write(
        {
            "elapsed_time": seconds,
            "num_requests": len(requests),
            "total_num_tokens": prompt_tokens + output_tokens,
            "requests_per_second": len(requests) / seconds,
            "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
            "output_tokens_per_second": output_tokens / seconds,
            "num_steps": len(steps),
        },
        loaded,
        output_json,
    )


def read_lengths(path: Path, count: int) -> list[tuple[int, int]]:
    """The first `count` (prompt, output) lengths of a trace. Raises ValueError, in one sentence, if there are fewer."""
    from rimuru_jax.bench.workload import trace_lengths

    requests = trace_lengths(path, count)
    if len(requests) < count:
        raise ValueError(f"{path} has {len(requests)} requests, but num_prompts is {count}")
    return [(request.prompt_tokens, request.output_tokens) for request in requests]


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, it must be at least 1")


def _check_fit(engine: "Engine", lengths: Sequence[tuple[int, int]]) -> None:
    limit = engine.plan.max_model_len
    if long := [pair for pair in lengths if sum(pair) > limit]:
        raise ValueError(
            f"{len(long)} of {len(lengths)} requests are longer than max_model_len ({limit} tokens), the first with "
            f"{long[0][0]} + {long[0][1]}: raise max_model_len or shorten them"
        )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {str(p): float(np.percentile(values, p)) for p in PERCENTILES} if values else {}


def _write(result: dict[str, Any], engine: "Engine", path: Path | None) -> None:
    """The result with the conditions it was measured under."""
    import jax

    device, plan = jax.devices()[0], engine.plan
    counters = engine.get_metrics()
    result |= {
        "model_type": engine.model_config.model_type,
        "num_layers": len(engine.model_config.layers),
        "dtype": engine.config.dtype,
        "load_format": engine.config.load_format,
        "memory_policy": plan.memory_policy,
        "page_pool_bytes": plan.pool_bytes,
        "resident_experts": int(engine.experts.resident.sum()),
        "experts": engine.experts.resident.size,
        "num_preemptions": counters["num_preemptions"],
        "late_compilations": engine.loop.late_compilations,
        "device": device.device_kind,
        "jax": jax.__version__,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n")
        note(f"written to {path}")
