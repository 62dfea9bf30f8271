"""Device time between projection and attention: the Mosaic GPU kernel beside XLA's fusions (the reference), on one GPU.

    python -m benchmarks.qk_norm_rope_cache [--rounds 10]

Qwen3-30B-A3B: 32 query and 4 key/value heads of 128, norms of heads, rotation, pages of 16 tokens in random places of a pool of
16 GB, float32 projections as cuBLAS writes them. A program is LAYERS layers, compiled as steps are; the two sides take turns,
and the median round counts. A time is that of one layer: at few tokens, what the host takes to start it may be longer than what
the device takes to run it.
"""

import argparse
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.qk_norm_rope_cache import HeadNorm, mosaic_gpu, reference
from rimuru_jax.serving_loop import GPU_COMPILER_OPTIONS

LAYERS = 16
PROGRAMS = 5
HEADS, KV_HEADS, H, PAGE_TOKENS = 32, 4, 128, 16
KV = MemoryView(
    kind="kv",
    page_shape=(2, KV_HEADS, PAGE_TOKENS, H),
    dtype=jnp.dtype(jnp.bfloat16),
    stride=2 * KV_HEADS * PAGE_TOKENS * H,
)
PAGES = 488_000


def inputs(tokens: int) -> dict[str, Any]:
    """Of a step: decodes of different rows, or from 1024 tokens on prefills of 2048."""
    per_row = 1 if tokens < 1024 else 2048
    rows, width = tokens // per_row, 256
    rng = np.random.default_rng(0)
    tables = [
        rng.choice(PAGES - 1, rows * width, replace=False).reshape(rows, width) + 1 for _ in range(LAYERS)
    ]
    position = np.arange(tokens) % per_row + (rng.integers(0, 4000, tokens) if per_row == 1 else 0)
    qkv = [jax.random.normal(jax.random.key(i), (tokens, (HEADS + 2 * KV_HEADS) * H)) for i in range(LAYERS)]
    angle = jnp.asarray(position)[:, None] * 1e6 ** (-jnp.arange(H // 2) / (H // 2))[None, :]
    return {
        "qkv": qkv,
        "tables": [jnp.asarray(table, jnp.int32) for table in tables],
        "weights": [jnp.ones(2 * H, jnp.bfloat16) for _ in range(LAYERS)],
        "rows": jnp.asarray(np.arange(tokens) // per_row, jnp.int32),
        "positions": jnp.asarray(position, jnp.int32),
        "query_start": jnp.arange(rows + 1, dtype=jnp.int32) * per_row,
        "rotation": (jnp.cos(angle), jnp.sin(angle)),
    }


def program(side: Any) -> Any:
    """All layers; the queries of each come back."""

    def layers(pool, qkv, tables, weights, **rest):
        queries = []
        for x, table, weight in zip(qkv, tables, weights, strict=True):
            q, pool = side.qk_norm_rope_cache(
                x,
                pool,
                KV,
                table,
                num_heads=HEADS,
                head_norm=HeadNorm(weight, 1e-6, "plain"),
                **rest,
            )
            queries.append(q)
        return pool, queries

    return jax.jit(layers, donate_argnums=0, compiler_options=GPU_COMPILER_OPTIONS)


def seconds(run: Any, pool: Array, given: dict[str, Any]) -> tuple[Array, float]:
    queries, start = [], time.perf_counter()
    for _ in range(PROGRAMS):
        pool, queries = run(pool, **given)
    jax.block_until_ready((pool, queries))
    return pool, (time.perf_counter() - start) / PROGRAMS / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, Python {platform.python_version()}, "
          f"{args.rounds} rounds of {PROGRAMS} programs of {LAYERS} layers\n")  # fmt: skip
    print("| tokens | kernel | rate | XLA | XLA / kernel | spread of kernel |")
    print("| --- | --- | --- | --- | --- | --- |")
    pool = jnp.zeros((PAGES // 100, 100 * KV.stride), jnp.uint16)
    for tokens in (8, 64, 256, 8192):
        given, sides = inputs(tokens), [program(side) for side in (mosaic_gpu, reference)]
        times: list[list[float]] = [[], []]
        for round_ in range(args.rounds + 2):
            for measured, side in zip(times, sides, strict=True):
                pool, taken = seconds(side, pool, given)
                if round_ >= 2:
                    measured.append(taken)
        ours, theirs = (statistics.median(measured) for measured in times)
        moved = tokens * H * (4 * (HEADS + 2 * KV_HEADS) + 2 * (HEADS + 2 * KV_HEADS))
        print(
            f"| {tokens} | {ours * 1e6:.1f} us | {moved / ours / 1e9:.0f} GB/s | {theirs * 1e6:.1f} us | "
            f"{theirs / ours:.2f}x | {min(times[0]) * 1e6:.1f}-{max(times[0]) * 1e6:.1f} us |",
            flush=True,
        )


if __name__ == "__main__":
    main()
