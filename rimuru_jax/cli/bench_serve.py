"""`rimuru bench serve`: load for a server that runs already, and what it makes of it. Arguments are vLLM's."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rimuru_jax.cli.console import note, progress
from rimuru_jax.tokenizer import load_tokenizer


def serve(
    backend: Annotated[
        Literal["openai", "openai-chat"], typer.Option(help="Completions, or chats of one message.")
    ] = "openai",
    base_url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[str | None, typer.Option(help="Path. Default: the backend's.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Name in requests. Default: the first one served.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with tokenizer.json, for prompts of exact lengths. Default: words."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Of the server.", show_default=False)
    ] = None,
    dataset_name: Annotated[
        Literal["random", "sharegpt", "custom", "trace"], typer.Option(help="Where requests come from.")
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        typer.Option(help="File of sharegpt (JSON), custom (JSON lines) or trace (CSV, JSON lines)."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests to send.")] = 1000,
    random_input_len: Annotated[int, typer.Option(help="Tokens of a random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens to generate for it.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="How far lengths vary, from 0 to 1.")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all random prompts share.")] = 0,
    custom_output_len: Annotated[int, typer.Option(help="Tokens to generate for a custom prompt.")] = 256,
    sharegpt_output_len: Annotated[
        int | None, typer.Option(help="Tokens to generate. Default: as many as the answer has.")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second; inf sends all at once. Traces bring their own times.")
    ] = float("inf"),
    burstiness: Annotated[
        float, typer.Option(help="1: a Poisson process; less: bursts; more: even intervals.")
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests under way, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate as many tokens as asked for.")
    ] = False,
    percentile_metrics: Annotated[
        str, typer.Option(help="Of ttft, tpot, itl and e2el, by commas.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, by commas.")] = "50,90,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limit in ms such as ttft:500, tpot:50 or e2el:9000; repeatable."),
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests sent before, which do not count.")] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and times.")] = 0,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the figures as JSON.")] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With those of each request.")
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("."),
    result_filename: Annotated[
        str | None, typer.Option(help="Default: of backend, rate, model and date.")
    ] = None,
) -> None:
    """Send requests to an OpenAI-compatible server and report latencies and throughput."""
    try:
        from rimuru_jax.bench import client, report, workload
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"rimuru bench serve needs the package {error.name}: install rimuru-jax[bench]"
        ) from error
    metrics = _names(percentile_metrics, report.METRICS)
    percentiles, limits = _percentiles(metric_percentiles), _limits(goodput or [])
    if num_prompts < 1 or (max_concurrency is not None and max_concurrency < 1) or num_warmups < 0:
        raise ValueError("--num-prompts and --max-concurrency must be positive, --num-warmups not negative")
    if (dataset_name == "random") != (dataset_path is None):
        wanted = "takes no" if dataset_name == "random" else "needs a"
        raise ValueError(f"--dataset-name {dataset_name} {wanted} --dataset-path")

    known = load_tokenizer(tokenizer) if tokenizer else None
    if tokenizer and known is None:
        raise ValueError(f"{tokenizer} has no tokenizer.json")
    maker = workload.PromptMaker(known, as_text=backend == "openai-chat", seed=seed)
    requests: list[workload.BenchRequest]
    if dataset_name == "random":
        requests = workload.random_requests(
            maker, num_prompts, input_len=random_input_len, output_len=random_output_len,
            range_ratio=random_range_ratio, prefix_len=random_prefix_len, seed=seed,
        )  # fmt: skip
    else:
        assert dataset_path is not None
        common: dict[str, Any] = {"tokenizer": known, "seed": seed}
        if dataset_name == "trace":
            requests = workload.trace_requests(maker, dataset_path, num_prompts)
        elif dataset_name == "custom":
            requests = workload.custom_requests(
                dataset_path, num_prompts, output_len=custom_output_len, **common
            )
        else:
            requests = workload.sharegpt_requests(
                dataset_path, num_prompts, output_len=sharegpt_output_len, **common
            )
    times = workload.arrivals(requests, request_rate, burstiness, seed)

    base_url = base_url.rstrip("/")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    model = model or client.served_model(base_url, headers)
    body: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    if ignore_eos:
        body["ignore_eos"] = True
    target = client.Target(
        base_url=base_url,
        endpoint=endpoint or client.ENDPOINTS[backend],
        backend=backend,
        model=model,
        body=body,
    )
    if num_warmups:
        note(f"{num_warmups} requests first that do not count")
        warm = [requests[number % len(requests)] for number in range(num_warmups)]
        asyncio.run(client.run(target, warm, [0.0] * num_warmups, headers=headers))
    with progress(f"{len(requests)} requests to {model} at {base_url}") as show:
        finished = 0

        def done() -> None:
            nonlocal finished
            finished += 1
            show(finished / len(requests), f"{finished} of {len(requests)} requests")

        results, seconds = asyncio.run(
            client.run(target, requests, times, max_concurrency=max_concurrency, headers=headers, done=done)
        )
    figures = report.summary(results, seconds, metrics=metrics, percentiles=percentiles, goodput=limits)
    print(report.text(figures, metrics, percentiles))
    if errors := sorted({result.error for result in results if result.error}):
        note(
            f"failed requests: {errors[0]}" + (f" (and {len(errors) - 1} other errors)" if errors[1:] else "")
        )
    if save_result or save_detailed:
        date = time.strftime("%Y%m%d-%H%M%S")
        conditions = {
            "date": date, "backend": backend, "model_id": model, "dataset_name": dataset_name,
            "num_prompts": len(requests), "max_concurrency": max_concurrency, "burstiness": burstiness,
            "request_rate": "inf" if request_rate == float("inf") else request_rate,
        }  # fmt: skip
        if save_detailed:
            conditions |= {
                "input_lens": [result.prompt_tokens for result in results],
                "output_lens": [result.output_tokens for result in results],
                "ttfts": [result.ttft for result in results],
                "itls": [result.itl for result in results],
                "errors": [result.error for result in results],
            }
        name = f"{backend}-{conditions['request_rate']}qps-{model.replace('/', '_')}-{date}.json"
        result_dir.mkdir(parents=True, exist_ok=True)
        path = result_dir / (result_filename or name)
        path.write_text(json.dumps(conditions | figures, indent=2) + "\n")
        note(f"wrote {path}")
    if not figures["completed"]:
        raise ValueError("no request succeeded")


def _names(text: str, known: Any) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--percentile-metrics has {unknown[0]!r}; there are {', '.join(known)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles is {text!r}, it must be numbers from 0 to 100, by commas")
    return values


def _limits(goodput: Sequence[str]) -> dict[str, float]:
    limits = {}
    for entry in goodput:
        name, _, value = entry.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(
                f"--goodput is {entry!r}, it must be ttft, tpot or e2el, a colon, and milliseconds"
            )
    return limits
