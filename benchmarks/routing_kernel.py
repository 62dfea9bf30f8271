"""Routing, from logits to the metadata of tiles: the Mosaic GPU kernels against the reference in XLA, on one GPU.

    python benchmarks/routing_kernel.py [--rounds 10]

A program makes CALLS calls in a loop. Between two calls a kernel of one block takes all results of the first and the
logits of the second, which it may have changed as far as XLA knows: no call can be left out, cut down or moved out of
the loop. The first column is the time of that kernel and the loop alone; it is subtracted from the others. The sides take
turns, and each round times 5 programs from the first dispatch to the last result; the median round counts. Times are
microseconds of one call. All programs are compiled first, several at a time.
"""

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.implementation import Implementation
from rimuru_jax.pallas.moe_routing import Scoring, route_and_group
from rimuru_jax.pallas.paged_moe.mosaic_gpu import token_tile

CALLS = 64
UNROLLED = {"reference": 4, "mosaic_gpu": 16, None: 16}
ROUTERS = ((128, 8), (60, 4), (256, 8), (512, 10))
TOKENS = (1, 8, 64, 256, 1024, 8192)

type Side = Implementation | None
"""None makes no call: what the chain costs."""


def program(side: Side, experts: int, top_k: int, tokens: int) -> Callable[[], Array]:
    """A compiled chain of calls, with its arguments."""
    logits = jax.random.normal(jax.random.key(tokens), (tokens, experts), jnp.float32)
    tile = token_tile(tokens * top_k, experts)

    @jax.jit
    def call(valid: Array, logits: Array):
        if side is None:
            return (valid,)
        return route_and_group(logits, valid, top_k, Scoring(normalize=True), tile=tile, implementation=side)

    def chain(valid: Array, logits: Array):
        ref = jax.new_ref(logits.reshape(-1))

        def some(_, carry):
            for _ in range(UNROLLED[side]):
                results = call(valid, ref[...].reshape(tokens, experts))
                touch(jax.tree.leaves(results), ref)
            return carry

        lax.fori_loop(0, CALLS // UNROLLED[side], some, ())
        return jax.freeze(ref)

    arguments = jnp.ones(tokens, jnp.bool_), logits
    compiled = jax.jit(chain).lower(*arguments).compile()
    return lambda: compiled(*arguments)


def touch(results: list[Array], logits: Any) -> None:
    """A kernel that has all of these as operands and rewrites the first of the logits."""

    def body(*refs):
        *_, logits = refs
        logits[0] = logits[0]

    plgpu.kernel(body)(*results, logits)


def time_of(run, programs: int = 5) -> float:
    """Seconds of one program."""
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(programs)])
    return (time.perf_counter() - start) / programs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    sides: tuple[Side, ...] = (None, "reference", "mosaic_gpu")
    cells = list(product(ROUTERS, TOKENS))

    def programs(cell: tuple[tuple[int, int], int]) -> list[Callable[[], Array]]:
        (experts, top_k), tokens = cell
        return [program(side, experts, top_k, tokens) for side in sides]

    with ThreadPoolExecutor(12) as pool:
        compiled = list(pool.map(programs, cells))
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    print(
        f"{time.strftime('%Y-%m-%d')} {jax.devices()[0].device_kind}, driver {driver}, "
        f"jax {jax.__version__}, Python {platform.python_version()}, {rounds} rounds of 5 x {CALLS} calls"
    )
    print("| experts, chosen | tokens | chain alone | reference | Mosaic | reference / Mosaic |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ((experts, top_k), tokens), runs in zip(cells, compiled, strict=True):
        for run in runs:
            jax.block_until_ready(run())
        times = [[time_of(run) for run in runs] for _ in range(rounds)]
        chain, *ours = (statistics.median(side) / CALLS * 1e6 for side in zip(*times, strict=True))
        reference, mosaic = (time - chain for time in ours)
        print(
            f"| {experts}, {top_k} | {tokens} | {chain:.1f} | {reference:.1f} | {mosaic:.1f} | {reference / mosaic:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
