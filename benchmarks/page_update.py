"""Device time of page writes: the Mosaic GPU kernels beside the XLA formulation (the reference), on one GPU.

    python -m benchmarks.page_update [--rounds 10] [--only write_kv]

Expert pages of Qwen3-30B-A3B (2048 x 768, 3 MiB), keys and values of 4 heads of 128 in pages of 16 tokens, random places in
a pool of 16 GB. A program runs CALLS or WRITES calls over places of their own; the two sides take turns, and the median round
counts. A time is that of one call. Loads come from page-locked host memory (needs torch and cupy).
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
WRITES, SETS = 64, 4
"""Calls of `write_kv` in a program, which are short, and different inputs that they have in turn."""
PROGRAMS = 5
WORDS = 2048 * 768
PAGES = 5200
HOST_PAGES = 1024
EXPERT = MemoryView(kind="expert", page_shape=(768, 2048), dtype=jnp.dtype(jnp.bfloat16), stride=WORDS)
KV = MemoryView(kind="kv", page_shape=(2, 4, 16, 128), dtype=jnp.dtype(jnp.bfloat16), stride=2 * 4 * 16 * 128)

type Update = Callable[..., Array]


class Program:
    """`count` calls of one kind in one program; the pool is passed on from side to side."""

    def __init__(self, update: Update, inputs: tuple[Array, ...], shared: tuple[Array, ...], count: int):
        one = jax.jit(update)  # lowered once for all calls

        def calls(pool: Array, inputs: list[tuple[Array, ...]], shared: tuple[Array, ...]) -> Array:
            for index in range(count):
                pool = one(pool, *shared, *inputs[index % len(inputs)])
            return pool

        self.count, self.shared = count, shared
        # Apart from each other, so that nothing is copied out of one array.
        self.inputs = [tuple(x[i] for x in inputs) for i in range(inputs[0].shape[0])]
        self.calls = jax.jit(calls, donate_argnums=0)

    def seconds(self, pool: Array) -> tuple[Array, float]:
        start = time.perf_counter()
        for _ in range(PROGRAMS):
            pool = self.calls(pool, self.inputs, self.shared)
        pool.block_until_ready()
        return pool, (time.perf_counter() - start) / PROGRAMS / self.count


def random_places(most: int, count: int, seed: int, calls: int = CALLS) -> Array:
    """`count` different places for each call."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.stack([rng.choice(most, count, replace=False) for _ in range(calls)]), jnp.int32)


def kv_case(tokens: int) -> tuple[tuple[Array, ...], list[Update], float]:
    """Inputs, the kernel and the reference, and the bytes read and written."""
    # A step of decodes has one token a page, a prefill fills pages.
    per_page = 1 if tokens <= 256 else 16
    pages = jnp.repeat(random_places(490_000, tokens // per_page, 0, SETS) + 1, per_page, axis=1)
    offsets = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) % 16, pages.shape)
    keys, values = (
        jax.random.normal(jax.random.key(i), (SETS, tokens, 4, 128)).astype(jnp.bfloat16) for i in (0, 1)
    )

    def kernel(pool, *rest):
        return mosaic_gpu.write_kv(pool, KV, *rest, scatter_tokens=0)

    def scatter(pool, *rest):
        return reference.write_kv(pool, KV, *rest)

    updates: list[Update] = [kernel, scatter]
    return (keys, values, pages, offsets), updates, 2.0 * tokens * 2 * 4 * 128 * 2


def copy_case(name: str, count: int) -> tuple[tuple[Array, ...], list[Update], float]:
    """As `kv_case`, for loads (bytes read) and moves (bytes read and written) of `count` pages."""
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
        *((f"write_kv, {n} tokens", (), *kv_case(n)) for n in (1, 64, 256, 512, 1024, 2048, 8192)),
        *((f"load_pages, {n} pages", (host,), *copy_case("load_pages", n)) for n in (1, 3, 24, 96)),
        *((f"move_pages, {n} pages", (), *copy_case("move_pages", n)) for n in (1, 3, 24, 96)),
    ]
    for name, shared, inputs, updates, moved in (case for case in cases if args.only in case[0]):
        count = WRITES if name.startswith("write") else CALLS
        sides = [Program(update, inputs, shared, count) for update in updates]
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
