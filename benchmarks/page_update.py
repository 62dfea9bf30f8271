"""Device time of page loads and moves: the Mosaic GPU kernels beside the XLA formulation (the reference), on one GPU.

    python -m benchmarks.page_update [--rounds 10] [--only load_pages]

Expert pages of Qwen3-30B-A3B (2048 x 768, 3 MiB), random places in a pool of 16 GB. A program runs CALLS calls over places of
their own; the two sides take turns, and the median round counts. A time is that of one call. Loads come from page-locked host
memory (needs torch and cupy).
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.kernels import host_view
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.page_update import mosaic_gpu, reference

CALLS = 8
PROGRAMS = 5
WORDS = 2048 * 768
PAGES = 5200
HOST_PAGES = 1024
EXPERT = MemoryView(kind="expert", page_shape=(768, 2048), dtype=jnp.dtype(jnp.bfloat16), stride=WORDS)

type Update = Callable[..., Array]


class Program:
    """CALLS calls of one kind in one program; the pool is passed on from side to side."""

    def __init__(self, update: Update, inputs: tuple[Array, ...], shared: tuple[Array, ...]):
        one = jax.jit(update)  # lowered once for all calls

        def calls(pool: Array, inputs: list[tuple[Array, ...]], shared: tuple[Array, ...]) -> Array:
            for places in inputs:
                pool = one(pool, *shared, *places)
            return pool

        self.shared = shared
        # Apart from each other, so that nothing is copied out of one array.
        self.inputs = [tuple(x[i] for x in inputs) for i in range(inputs[0].shape[0])]
        self.calls = jax.jit(calls, donate_argnums=0)

    def seconds(self, pool: Array) -> tuple[Array, float]:
        start = time.perf_counter()
        for _ in range(PROGRAMS):
            pool = self.calls(pool, self.inputs, self.shared)
        pool.block_until_ready()
        return pool, (time.perf_counter() - start) / PROGRAMS / CALLS


def random_places(most: int, count: int, seed: int) -> Array:
    """`count` different places for each call."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.stack([rng.choice(most, count, replace=False) for _ in range(CALLS)]), jnp.int32)


def copy_case(name: str, count: int) -> tuple[tuple[Array, ...], list[Update], float]:
    """Inputs, the kernel and the reference, and the bytes read (loads), or read and written (moves), of `count` pages."""
    loads = name == "load_pages"
    targets = random_places(PAGES // 2, count, 1)
    sources = random_places(HOST_PAGES if loads else PAGES // 2, count, 2) + (0 if loads else PAGES // 2)
    counts = jnp.full(CALLS, count, jnp.int32)
    if loads:
        updates = [side.load_pages for side in (mosaic_gpu, reference)]
    else:
        updates = [
            lambda pool, *rest, side=side: side.move_pages(pool, EXPERT, *rest)
            for side in (mosaic_gpu, reference)
        ]
    return (sources, targets, counts), updates, (1.0 if loads else 2.0) * count * WORDS * 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="calls whose names have this in them")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, Python {platform.python_version()}, "
          f"{args.rounds} rounds of {PROGRAMS} programs of {CALLS} calls\n")  # fmt: skip
    print("| call | kernel | rate | XLA | XLA / kernel | spread of kernel |")
    print("| --- | --- | --- | --- | --- | --- |")
    pool = jnp.zeros((PAGES, WORDS), jnp.uint16)
    host = host_view(lax.broadcasted_iota(jnp.int32, (HOST_PAGES, WORDS), 1).astype(jnp.uint16))
    cases = [
        *((f"load_pages, {n} pages", (host,), *copy_case("load_pages", n)) for n in (1, 3, 24, 96)),
        *((f"move_pages, {n} pages", (), *copy_case("move_pages", n)) for n in (1, 3, 24, 96)),
    ]
    for name, shared, inputs, updates, moved in (case for case in cases if args.only in case[0]):
        sides = [Program(update, inputs, shared) for update in updates]
        times: list[list[float]] = [[], []]
        for round_ in range(args.rounds + 2):
            for measured, side in zip(times, sides, strict=True):
                pool, seconds = side.seconds(pool)
                if round_ >= 2:
                    measured.append(seconds)
        ours, theirs = (statistics.median(measured) for measured in times)
        print(
            f"| {name} | {ours * 1e6:.1f} us | {moved / ours / 1e9:.0f} GB/s | {theirs * 1e6:.1f} us | {theirs / ours:.2f}x | "
            f"{min(times[0]) * 1e6:.1f}-{max(times[0]) * 1e6:.1f} us |",
            flush=True,
        )


if __name__ == "__main__":
    main()
