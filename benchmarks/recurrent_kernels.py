"""The operators with a state per sequence: their Mosaic GPU kernels against the reference operators in XLA, on one GPU.

    python benchmarks/recurrent_kernels.py [--rounds 10] [--launches 10]

Random data at the shapes of Qwen3-Next (gated delta rule, convolution) and Nemotron-3-Nano (selective scan); float32
states in random pages. A program runs LAYERS calls, each over pages of its own, so that no state is left in the cache
from the call before, and each feeding its outputs to the next. The two sides take turns: a round is `launches` programs
of one, then of the other, timed from the first dispatch to the last result, so that what the host does hides behind the
device; the median round counts. A time is that of one call.

Decode counts the bytes of states, read once and written once (a convolution also its inputs and outputs); the first
line says at which rate the card copies a large array. Prefill counts tokens.
"""

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rimuru_jax.pallas.causal_conv1d import causal_conv1d
from rimuru_jax.pallas.gated_delta_rule import gated_delta_rule
from rimuru_jax.pallas.implementation import Implementation
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.selective_scan import selective_scan

LAYERS = 4
COPY_BYTES = 4 << 30

type Operator = Callable[[Implementation, "Case", tuple[Array, ...], Array, Array], tuple[Array, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    rows: int
    length: int
    """Tokens of each row."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def metadata(self) -> tuple[Array, Array]:
        """query_start and has_state."""
        start = jnp.arange(self.rows + 1, dtype=jnp.int32) * self.length
        return start, jnp.full(self.rows, self.length == 1)

    def __str__(self) -> str:
        return f"decode, {self.rows} rows" if self.length == 1 else f"prefill, {self.rows} x {self.length}"


def normal(seed: int, *shape: int, dtype=jnp.bfloat16) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One operator at the shape of a model."""

    name: str
    view: MemoryView
    run: int
    """Consecutive pages of a state."""
    inputs: Callable[[Case], tuple[Array, ...]]
    """The first of them gets each call's output added to it."""
    call: Operator
    activation_bytes: int = 0
    """Bytes of inputs and outputs of a token that count."""

    def bytes(self, case: Case) -> int:
        return case.rows * self.run * self.view.words * 2 * 2 + case.tokens * self.activation_bytes


DELTA_VIEW = MemoryView(
    kind="ssm", page_shape=(32, 128, 128), dtype=jnp.dtype(jnp.float32), stride=2 * 32 * 128 * 128
)
SCAN_VIEW = MemoryView(
    kind="ssm", page_shape=(64, 64, 128), dtype=jnp.dtype(jnp.float32), stride=2 * 64 * 64 * 128
)
CONV_VIEW = MemoryView(kind="conv", page_shape=(1, 8192), dtype=jnp.dtype(jnp.bfloat16), stride=8192)


def delta_inputs(case: Case) -> tuple[Array, ...]:
    q, k = (normal(seed, case.tokens, 16, 128) for seed in (1, 2))
    gates = jax.nn.sigmoid(normal(3, case.tokens, 32, dtype=jnp.float32))
    return normal(4, case.tokens, 32, 128), q, k, -gates, gates


def delta(implementation, case, inputs, pool, pages):
    v, q, k, log_decay, beta = inputs
    start, has_state = case.metadata
    return gated_delta_rule(
        q, k, v, log_decay, beta, pool, DELTA_VIEW, pages, start, has_state,
        max_query_len=case.length, implementation=implementation,
    )  # fmt: skip


def scan_inputs(case: Case) -> tuple[Array, ...]:
    B, C = (normal(seed, case.tokens, 8, 128) for seed in (1, 2))
    dt = jax.nn.softplus(normal(3, case.tokens, 64, dtype=jnp.float32))
    return normal(4, case.tokens, 64, 64), dt, -jnp.linspace(0.1, 8.0, 64), B, C, jnp.ones(64, jnp.bfloat16)


def scan(implementation, case, inputs, pool, pages):
    x, dt, A, B, C, D = inputs
    start, has_state = case.metadata
    return selective_scan(
        x, dt, A, B, C, D, pool, SCAN_VIEW, pages, start, has_state,
        max_query_len=case.length, implementation=implementation,
    )  # fmt: skip


def conv_inputs(case: Case) -> tuple[Array, ...]:
    return normal(1, case.tokens, 8192), normal(2, 8192, 4)


def conv(implementation, case, inputs, pool, pages):
    x, weight = inputs
    start, has_state = case.metadata
    return causal_conv1d(
        x, weight, None, pool, CONV_VIEW, pages, start, has_state,
        activation="silu", implementation=implementation,
    )  # fmt: skip


OPERATORS = (
    Layer(name="gated_delta_rule, 16/32 heads of 128 x 128", view=DELTA_VIEW, run=1, inputs=delta_inputs, call=delta),
    Layer(name="selective_scan, 64 heads of 64 x 128, 8 groups", view=SCAN_VIEW, run=1, inputs=scan_inputs, call=scan),
    Layer(
        name="causal_conv1d, 8192 channels, kernel of 4",
        view=CONV_VIEW,
        run=3,
        inputs=conv_inputs,
        call=conv,
        activation_bytes=2 * 2 * 8192,
    ),
)  # fmt: skip
CASES = (
    *(Case(rows=rows, length=1) for rows in (1, 8, 64, 256)),
    *(Case(rows=rows, length=8192 // rows) for rows in (1, 4, 16)),
)


class Program:
    """LAYERS calls in one program, with a pool of its own."""

    def __init__(self, layer: Layer, case: Case, implementation: Implementation):
        states = LAYERS * case.rows + 1
        order = np.random.default_rng(0).permutation(states - 1)[: LAYERS * case.rows] + 1
        self.pages = jnp.asarray(order.reshape(LAYERS, case.rows) * layer.run, jnp.int32)
        # An even number of huge pages, as the pool of an engine has.
        self.pool = jnp.zeros((states + states % 2, layer.run * layer.view.stride), jnp.uint16)
        self.inputs = layer.inputs(case)

        def calls(pool: Array, pages: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
            first, *rest = inputs
            for index in range(LAYERS):
                out, pool = layer.call(implementation, case, (first, *rest), pool, pages[index])
                first += out
            return first, pool

        self.calls = jax.jit(calls, donate_argnums=0)

    def seconds(self, launches: int) -> float:
        """Of one call among `launches` programs in a row."""
        start = time.perf_counter()
        for _ in range(launches):
            _, self.pool = self.calls(self.pool, self.pages, self.inputs)
        self.pool.block_until_ready()
        return (time.perf_counter() - start) / launches / LAYERS


def copy_rate(launches: int) -> float:
    """Bytes read and written per second by a copy of a large array."""
    copy = jax.jit(lambda x: x + 1)
    x = jnp.zeros(COPY_BYTES // 4, jnp.int32)
    copy(x).block_until_ready()
    start = time.perf_counter()
    for _ in range(launches - 1):
        copy(x)
    copy(x).block_until_ready()
    return 2 * COPY_BYTES * launches / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--launches", type=int, default=10)
    args = parser.parse_args()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    print(f"{jax.devices()[0].device_kind}, driver {driver}, jax {jax.__version__}, Python {platform.python_version()}, "
          f"{args.rounds} rounds of {args.launches} programs of {LAYERS} calls")  # fmt: skip
    copied = copy_rate(args.launches)
    print(f"copy: {copied / 1e12:.2f} TB/s")
    for layer in OPERATORS:
        print(f"\n{layer.name}\n")
        print("| case | kernels | rate | reference | reference / kernels | spread of kernels |")
        print("| --- | --- | --- | --- | --- | --- |")
        for case in CASES:
            sides = [Program(layer, case, name) for name in ("mosaic_gpu", "reference")]
            for side in sides:
                side.seconds(2)
            times: list[list[float]] = [[], []]
            for _ in range(args.rounds):
                for measured, side in zip(times, sides, strict=True):
                    measured.append(side.seconds(args.launches))
            ours, theirs = (statistics.median(measured) for measured in times)
            if case.length == 1:
                moved = layer.bytes(case) / ours
                rate = f"{moved / 1e12:.2f} TB/s, {moved / copied:.0%} of the copy"
            else:
                rate = f"{case.tokens / ours / 1e6:.2f} M tokens/s"
            print(
                f"| {case} | {ours * 1e6:.0f} us | {rate} | {theirs * 1e6:.0f} us | {theirs / ours:.1f}x | "
                f"{min(times[0]) * 1e6:.0f}-{max(times[0]) * 1e6:.0f} us |",
                flush=True,
            )


if __name__ == "__main__":
    main()
