"""Tokens per second of one stream of the embedded default model on a CPU, by memory policy.

    python benchmarks/cpu_stream.py [--tokens 64] [--repeats 3]

One request of a 40-token prompt, greedy, bfloat16; the first run of a policy compiles and is not counted. The rate
is of output tokens after the first, the best and the median of the repeats.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from typing import Any

import jax

from rimuru_jax import Engine, SamplingParams

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("static", {"memory_policy": "static", "page_pool_bytes": 256 << 20}),
    ("elastic", {"memory_policy": "elastic"}),
    ("fixed, half away", {"memory_policy": "fixed", "expert_offload_limit": 8}),
    (
        "fixed, half away, no buffers",
        {"memory_policy": "fixed", "expert_offload_limit": 8, "loading_buffer_experts": 0},
    ),
)


def rate(engine: Engine, tokens: int) -> float:
    """Output tokens per second after the first."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = 0.0
    for count, _ in enumerate(engine.stream(list(range(100, 140)), params)):
        if count == 0:
            start = time.perf_counter()
    return (tokens - 1) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, "
          f"Python {sys.version.split()[0]}, {args.tokens} tokens, {args.repeats} repeats")  # fmt: skip
    print(f"{'policy':30} {'resident':>10} {'best tok/s':>11} {'median':>8}")
    for name, config in POLICIES:
        engine = Engine(**config)
        rate(engine, args.tokens)
        rates = [rate(engine, args.tokens) for _ in range(args.repeats)]
        share = f"{engine.experts.resident.sum()}/{engine.experts.resident.size}"
        print(f"{name:30} {share:>10} {max(rates):11.1f} {statistics.median(rates):8.1f}", flush=True)


if __name__ == "__main__":
    main()
