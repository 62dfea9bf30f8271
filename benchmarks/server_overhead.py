"""What HTTP costs: the same requests to an engine and to a server around one, many streams at once.

    python benchmarks/server_overhead.py [--streams 64] [--prompt 32] [--tokens 16] [--repeats 3] [--step-ms 17]

The embedded default model on a CPU, or with `--step-ms` a tiny model whose tokens wait until a device that takes so long for
each step would have them. All requests come at once, greedy, token ids as prompts. Engine and server are two
processes that work in turns, each warmed up with the same requests; the client of the server shares the cores with it.

Requests reach a server one after another, so that its first steps are smaller than the engine's. The last two columns leave
that out: mean time to the first token, and of whole requests, as the client sees them less as the engine inside the server
sees them.
"""

import argparse
import asyncio
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import jax

from benchmarks import reliability
from rimuru_jax import Engine, SamplingParams
from rimuru_jax.bench import client
from rimuru_jax.bench.workload import BenchRequest
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.serve import listen, serve


def engine(streams: int, step_ms: float) -> Engine:
    limits: dict[str, Any] = {
        "max_num_seqs": streams, "max_model_len": 256, "max_num_batched_tokens": 1024, "compile_ahead": True,
    }  # fmt: skip
    if not step_ms:
        return Engine(page_pool_bytes=384 << 20, **limits)
    with tempfile.TemporaryDirectory() as folder:
        one = reliability.build_engine(Path(folder), page_pool_bytes=32 << 20, **limits)
    pace(one, step_ms / 1e3)
    return one


def pace(one: Engine, seconds: float) -> None:
    """Let tokens wait until a device would have them that takes so long for each step, one after another."""
    run, deliver, free, ends = one.loop.run, one._deliver, [0.0], deque[float]()

    def timed_run(*args: Any, **rest: Any) -> Any:
        free[0] = max(free[0], time.perf_counter()) + seconds
        ends.append(free[0])
        return run(*args, **rest)

    def timed_deliver(*args: Any) -> None:
        time.sleep(max(0.0, ends.popleft() - time.perf_counter()))
        deliver(*args)

    one.loop.run, one._deliver = timed_run, timed_deliver  # type: ignore[method-assign]


def run_server(streams: int, step_ms: float) -> None:
    server_socket = listen("127.0.0.1", 0)
    host, port = server_socket.getsockname()
    config = ServerConfig(served_model_name="model")
    serve(
        engine(streams, step_ms), config, server_socket, shutdown_timeout=1.0,
        ready=lambda: print(f"http://{host}:{port}", flush=True),
    )  # fmt: skip


def through_engine(one: Engine, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Median time to the first token in s, and tokens per second."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        one.add_request(str(number), prompt, params)
    first: dict[str, float] = {}
    while one.has_unfinished_requests():
        for output in one.step():
            first.setdefault(output.request_id, time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    return statistics.median(first.values()), len(prompts) * tokens / seconds


def engine_sums(url: str) -> tuple[float, float]:
    """Seconds to first tokens, and of whole requests, summed over all requests so far, as the engine measured them."""
    text = httpx.get(f"{url}/metrics").text
    found = (
        re.search(rf"^vllm:{name}_seconds_sum\S* (\S+)$", text, re.MULTILINE)
        for name in ("time_to_first_token", "e2e_request_latency")
    )
    first, whole = (float(match[1]) if match else 0.0 for match in found)
    return first, whole


def through_server(url: str, prompts: list[list[int]], tokens: int) -> tuple[float, float, float, float]:
    """As `through_engine`, then what HTTP added to the first token and to the whole, in s."""
    before = engine_sums(url)
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    target = client.Target(
        base_url=url, endpoint="/v1/completions", backend="openai", model="model", body=body
    )
    requests = [BenchRequest(prompt, len(prompt), tokens) for prompt in prompts]
    results, seconds = asyncio.run(client.run(target, requests, [0.0] * len(requests)))
    assert not any(result.error for result in results)
    assert all(result.output_tokens == tokens for result in results)
    after = engine_sums(url)
    first = statistics.mean(result.ttft for result in results) - (after[0] - before[0]) / len(results)
    whole = statistics.mean(result.latency for result in results) - (after[1] - before[1]) / len(results)
    return statistics.median(result.ttft for result in results), len(prompts) * tokens / seconds, first, whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step on a device to imitate")
    parser.add_argument("--serve", action="store_true", help="be the server")
    args = parser.parse_args()
    if args.serve:
        run_server(args.streams, args.step_ms)
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, Python "
          f"{sys.version.split()[0]}, {args.streams} streams of {args.prompt} + {args.tokens} tokens")  # fmt: skip
    prompts = [
        [1 + (7 * stream + place) % 250 for place in range(args.prompt)] for stream in range(args.streams)
    ]
    one = engine(args.streams, args.step_ms)
    command = [sys.executable, __file__, "--serve", "--streams", str(args.streams), "--step-ms", str(args.step_ms)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            print(
                f"{'':8} {'engine: TTFT s':>15} {'tok/s':>8} {'server: TTFT s':>15} {'tok/s':>8} {'HTTP: TTFT s':>13} {'whole s':>8}"
            )
            for repeat in range(args.repeats + 1):
                direct = through_engine(one, prompts, args.tokens)
                served = through_server(url, prompts, args.tokens)
                name = f"run {repeat}" if repeat else "warm-up"
                print(
                    f"{name:8} {direct[0]:15.2f} {direct[1]:8.1f} {served[0]:15.2f} {served[1]:8.1f} "
                    f"{served[2]:13.3f} {served[3]:8.3f}",
                    flush=True,
                )
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
