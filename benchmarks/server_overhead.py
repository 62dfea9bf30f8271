"""What HTTP costs: the same requests to an engine and to a server around it, many streams at once.

    python benchmarks/server_overhead.py [--streams 64] [--prompt 32] [--tokens 16] [--repeats 3]
    python benchmarks/server_overhead.py --step-ms 17
    python benchmarks/server_overhead.py --step-ms 17 --rounds 8
    python benchmarks/server_overhead.py --model tests/data/configs/Qwen3-30B-A3B.json --load-format dummy --tokens 128

The embedded default model; with `--step-ms` a tiny one whose tokens wait until a device that takes so long for each step
would have them; with `--model` that one. All requests come at once, greedy, token ids as prompts; with `--rounds` each
stream sends one after another, of half to one and a half times the tokens, so that they end at different times. Three take
turns with one engine:

- `engine`: its own loop, which adds a request in the very moment between two steps in which another ended. No client that
  is not part of the loop can do that: its requests come while a step runs.
- `async`: callers of `AsyncEngine` in the same process, each of which sends its next request as soon as it has its last
  token: what the engine's thread costs, and requests that come at any time, without HTTP.
- `server`: the same through HTTP, from a client that is a process of its own.

Requests reach a server one after another, so that its first steps are smaller than the engine's. The columns `HTTP` leave
that out: mean time to the first token, and of whole requests, as the client sees them less as the engine inside the server
sees them.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jax

from benchmarks import reliability
from rimuru_jax import Engine, SamplingParams
from rimuru_jax.bench import client
from rimuru_jax.bench.workload import BenchRequest
from rimuru_jax.server.async_engine import AsyncEngine
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.serve import listen, serve_until


class Times(NamedTuple):
    """Of one run."""

    ttft: float
    """Median seconds to the first token."""
    tokens_per_second: float
    added_ttft: float = 0.0
    """Mean seconds to the first token that the engine did not see; likewise of whole requests."""
    added_latency: float = 0.0


def build_engine(args: argparse.Namespace) -> Engine:
    limits: dict[str, Any] = {
        "max_num_seqs": args.streams,
        "max_model_len": max(256, args.prompt + 2 * args.tokens),
        "max_num_batched_tokens": 2048,
    }
    if args.model:
        return Engine(args.model, load_format=args.load_format, dtype=args.dtype, **limits)
    limits |= {"compile_ahead": True, "max_num_batched_tokens": 1024}
    if not args.step_ms:
        return Engine(page_pool_bytes=384 << 20, **limits)
    with tempfile.TemporaryDirectory() as folder:
        one = reliability.build_engine(Path(folder), page_pool_bytes=32 << 20, **limits)
    pace(one, args.step_ms / 1e3)
    return one


def pace(one: Engine, seconds: float) -> None:
    """Let tokens wait until a device would have them that takes so long for each step, one after another."""
    run, deliver, free, ends = one.loop.run, one._deliver, [0.0], deque[float]()

    def timed_run(*args: Any, **rest: Any) -> Any:
        free[0] = max(free[0], time.perf_counter()) + seconds
        ends.append(free[0])
        return run(*args, **rest)

    def timed_deliver(*args: Any) -> None:
        waits = max(0.0, ends.popleft() - time.perf_counter())
        time.sleep(waits)
        deliver(*args)
        one.seconds_waited = waits

    one.loop.run, one._deliver = timed_run, timed_deliver  # type: ignore[method-assign]
    one.device_busy = lambda: time.perf_counter() < free[0]  # type: ignore[method-assign]


def requests_of(args: argparse.Namespace) -> list[BenchRequest]:
    requests = []
    for number in range(args.streams * args.rounds):
        prompt = [1 + (7 * number + place) % 250 for place in range(args.prompt)]
        spread = args.tokens * (number * 37 % 64 - 32) // 64 if args.rounds > 1 else 0
        requests.append(BenchRequest(prompt, len(prompt), max(1, args.tokens + spread)))
    return requests


def params_of(request: BenchRequest) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)


def through_engine(one: Engine, args: argparse.Namespace) -> Times:
    requests = requests_of(args)
    begin = time.perf_counter()
    added, first = list[float](), dict[str, float]()

    def add() -> None:
        number = len(added)
        if number < len(requests):
            added.append(time.perf_counter())
            one.add_request(str(number), requests[number].prompt, params_of(requests[number]))

    for _ in range(args.streams):
        add()
    while one.has_unfinished_requests():
        for output in one.step():
            first.setdefault(output.request_id, time.perf_counter() - added[int(output.request_id)])
            if output.finished:
                add()
    seconds = time.perf_counter() - begin
    tokens = sum(request.output_tokens for request in requests)
    return Times(statistics.median(first.values()), tokens / seconds)


def through_async(one: Engine, args: argparse.Namespace) -> Times:
    requests = requests_of(args)

    async def run() -> Times:
        served, coming, firsts = AsyncEngine(one), iter(enumerate(requests)), list[float]()
        served.start()
        begin = time.perf_counter()

        async def stream() -> None:
            for number, request in coming:
                sent, seen = time.perf_counter(), False
                async for _ in served.generate(str(number), request.prompt, params_of(request)):
                    if not seen:
                        firsts.append(time.perf_counter() - sent)
                    seen = True

        await asyncio.gather(*(stream() for _ in range(args.streams)))
        seconds = time.perf_counter() - begin
        await served.drain(1.0)
        return Times(statistics.median(firsts), sum(request.output_tokens for request in requests) / seconds)

    return asyncio.run(run())


def through_server(one: Engine, args: argparse.Namespace) -> Times:
    """A server around the engine for as long as a client in another process takes."""

    async def run() -> Times:
        server_socket = listen("127.0.0.1", 0)
        host, port = server_socket.getsockname()
        stop, ready = asyncio.Event(), asyncio.Event()
        config = ServerConfig(served_model_name="model")
        serving = asyncio.ensure_future(serve_until(stop, one, config, server_socket, 1.0, ready.set))
        starting = asyncio.ensure_future(ready.wait())
        await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # raises what kept it from starting
        sizes = [f"--{name}={getattr(args, name)}" for name in ("streams", "rounds", "prompt", "tokens")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", f"http://{host}:{port}", *sizes,
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        text, _ = await process.communicate()
        stop.set()
        await serving
        if process.returncode:
            sys.exit(f"the client ended with {process.returncode}")
        return Times(*json.loads(text))

    return asyncio.run(run())


def engine_sums(url: str) -> tuple[float, float]:
    """Seconds to first tokens, and of whole requests, summed over all requests so far, as the engine measured them."""
    text = httpx.get(f"{url}/metrics").text
    found = (
        re.search(rf"^vllm:{name}_seconds_sum\S* (\S+)$", text, re.MULTILINE)
        for name in ("time_to_first_token", "e2e_request_latency")
    )
    first, whole = (float(match[1]) if match else 0.0 for match in found)
    return first, whole


def run_client(url: str, args: argparse.Namespace) -> Times:
    before = engine_sums(url)
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    target = client.Target(
        base_url=url, endpoint="/v1/completions", backend="openai", model="model", body=body
    )
    requests = requests_of(args)
    results, seconds = asyncio.run(
        client.run(target, requests, [0.0] * len(requests), max_concurrency=args.streams)
    )
    for request, result in zip(requests, results, strict=True):
        if result.error or result.output_tokens != request.output_tokens:
            sys.exit(f"{result.output_tokens} of {request.output_tokens} tokens came: {result.error}")
    after = engine_sums(url)
    return Times(
        statistics.median(result.ttft for result in results),
        sum(request.output_tokens for request in requests) / seconds,
        statistics.mean(result.ttft for result in results) - (after[0] - before[0]) / len(results),
        statistics.mean(result.latency for result in results) - (after[1] - before[1]) / len(results),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="requests of each stream")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step on a device to imitate")
    parser.add_argument("--model", help="folder, or a config.json with --load-format dummy")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--client", metavar="URL", help="be the client of this server")
    args = parser.parse_args()
    if args.client:
        print(json.dumps(run_client(args.client, args)))
        return
    begin = time.perf_counter()
    one = build_engine(args)
    device = jax.devices()[0].device_kind
    print(f"{device}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, "
          f"Python {sys.version.split()[0]}, {args.model or ('tiny' if args.step_ms else 'embedded')} model, {args.streams} streams of {args.rounds} x {args.prompt} + "
          f"{args.tokens} tokens; started in {time.perf_counter() - begin:.1f} s")  # fmt: skip
    heads = (
        "engine: TTFT ms",
        "tok/s",
        "async: TTFT ms",
        "tok/s",
        "server: TTFT ms",
        "tok/s",
        "of engine's",
        "HTTP: TTFT ms",
        "whole ms",
    )
    print(" " * 8 + "".join(f"{head:>17}" for head in heads))
    shares, added = [], []
    for repeat in range(args.repeats + 1):
        direct, threaded, served = (
            through(one, args) for through in (through_engine, through_async, through_server)
        )
        share = served.tokens_per_second / direct.tokens_per_second
        name = f"run {repeat}" if repeat else "warm-up"
        print(
            f"{name:8}{1e3 * direct.ttft:17.1f}{direct.tokens_per_second:17.1f}"
            f"{1e3 * threaded.ttft:17.1f}{threaded.tokens_per_second:17.1f}{1e3 * served.ttft:17.1f}"
            f"{served.tokens_per_second:17.1f}{share:17.3f}{1e3 * served.added_ttft:17.1f}{1e3 * served.added_latency:17.1f}",
            flush=True,
        )
        if repeat:
            shares.append(share)
            added.append(1e3 * (served.ttft - direct.ttft))
    print(f"medians: tokens/s through HTTP {statistics.median(shares):.3f} of the engine's, "
          f"first tokens {statistics.median(added):.1f} ms later; late compilations {one.loop.late_compilations}")  # fmt: skip
    print(f"{time.perf_counter() - begin:.1f} s in all")


if __name__ == "__main__":
    main()
