"""Paged attention against cuDNN on contiguous keys and values, on one GPU.

    python benchmarks/attention_kernel.py [--rounds 10] [--launches 25]

Random data, pages of 16 tokens in random order. The two sides take turns: a round is `launches` launches of one, then
of the other, each timed from the first dispatch to the last result, so that what the host does hides behind the
device; the median round counts. The paged side includes planning its work from the lengths and joining split contexts;
cuDNN is `jax.nn.dot_product_attention`, whose layout is `[B, T, N, h]`. Decode counts the bytes of keys and values once,
prefill the multiplications below the diagonal.
"""

import argparse
import functools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.paged_attention import paged_attention

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    batch: int
    """Sequences, all of one length."""
    context: int
    """Tokens of each."""
    heads: int
    kv_heads: int
    head_dim: int
    prefill: bool
    """Whether all tokens of a sequence are queries, or its last alone."""

    @property
    def work(self) -> float:
        """Bytes of keys and values (decode) or floating-point operations (prefill)."""
        if self.prefill:
            return 2.0 * self.batch * self.heads * self.head_dim * self.context * (self.context + 1)
        return 4.0 * self.batch * self.context * self.kv_heads * self.head_dim

    def rate(self, seconds: float) -> str:
        rate = self.work / seconds / 1e12
        return f"{rate:.0f} TFLOP/s" if self.prefill else f"{rate:.2f} TB/s"


SHAPES = (
    Shape(name="decode 64 x 4k", batch=64, context=4096, heads=32, kv_heads=4, head_dim=128, prefill=False),
    Shape(name="decode 256 x 4k", batch=256, context=4096, heads=32, kv_heads=4, head_dim=128, prefill=False),
    Shape(name="decode 1 x 128k", batch=1, context=131072, heads=32, kv_heads=4, head_dim=128, prefill=False),
    Shape(name="decode 64 x 4k", batch=64, context=4096, heads=16, kv_heads=2, head_dim=256, prefill=False),
    Shape(name="prefill 8k", batch=1, context=8192, heads=32, kv_heads=4, head_dim=128, prefill=True),
    Shape(name="prefill 8k", batch=1, context=8192, heads=16, kv_heads=2, head_dim=256, prefill=True),
)


def random(key: int, *shape: int) -> jax.Array:
    return jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16))(jax.random.key(key))


def paged(shape: Shape) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """The operator and its operands."""
    view = MemoryView(
        kind="kv",
        page_shape=(2, shape.kv_heads, PAGE_TOKENS, shape.head_dim),
        dtype=jnp.dtype(jnp.bfloat16),
        stride=2 * shape.kv_heads * PAGE_TOKENS * shape.head_dim,
    )
    width = shape.context // PAGE_TOKENS
    pages = shape.batch * width
    order = np.random.default_rng(0).permutation(pages).reshape(shape.batch, width)
    queries_per_row = shape.context if shape.prefill else 1
    pool = jax.jit(functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16), donate_argnums=0)(
        random(0, pages, view.stride)
    )
    operands = (
        random(1, shape.batch * queries_per_row, shape.heads, shape.head_dim),
        pool,
        jnp.asarray(order, jnp.int32),
        jnp.arange(shape.batch + 1, dtype=jnp.int32) * queries_per_row,
        jnp.full((shape.batch,), shape.context, jnp.int32),
    )

    @jax.jit
    def run(queries, pool, page_table, query_start, context_len):
        return paged_attention(
            queries,
            pool,
            view,
            page_table,
            query_start,
            context_len,
            scale=shape.head_dim**-0.5,
            max_query_len=queries_per_row,
            implementation="mosaic_gpu",
        )

    return run, operands


def contiguous(shape: Shape) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """cuDNN and its operands."""
    queries = shape.context if shape.prefill else 1
    operands = (
        random(1, shape.batch, queries, shape.heads, shape.head_dim),
        random(2, shape.batch, shape.context, shape.kv_heads, shape.head_dim),
        random(3, shape.batch, shape.context, shape.kv_heads, shape.head_dim),
    )
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=shape.prefill, implementation="cudnn")
    return jax.jit(attend), operands


def seconds(run: Callable[..., jax.Array], operands: tuple[Any, ...], launches: int) -> float:
    """Of one launch among `launches` in a row."""
    start = time.perf_counter()
    for _ in range(launches - 1):
        run(*operands)
    run(*operands).block_until_ready()
    return (time.perf_counter() - start) / launches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--launches", type=int, default=25)
    args = parser.parse_args()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    print(f"{jax.devices()[0].device_kind}, driver {driver}, jax {jax.__version__}, Python {platform.python_version()}, "
          f"{args.rounds} rounds of {args.launches} launches")  # fmt: skip
    print("| shape | heads | paged | cuDNN, contiguous | paged / cuDNN | spread of paged |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        sides = [paged(shape), contiguous(shape)]
        for run, operands in sides:
            seconds(run, operands, 3)
        times: list[list[float]] = [[], []]
        for _ in range(args.rounds):
            for side, (run, operands) in zip(times, sides, strict=True):
                side.append(seconds(run, operands, args.launches))
        ours, theirs = (statistics.median(side) for side in times)
        heads = f"{shape.heads}/{shape.kv_heads} of {shape.head_dim}"
        print(
            f"| {shape.name} | {heads} | {ours * 1e6:.0f} us, {shape.rate(ours)} | {theirs * 1e6:.0f} us, "
            f"{shape.rate(theirs)} | {theirs / ours:.2f}x | {min(times[0]) * 1e6:.0f}-{max(times[0]) * 1e6:.0f} us |",
            flush=True,
        )


if __name__ == "__main__":
    main()
