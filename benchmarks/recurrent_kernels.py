"""Device time of the recurrent operators: the Mosaic GPU kernels beside the reference in XLA, on one GPU.

    python -m benchmarks.recurrent_kernels [--rounds 10] [--launches 10]

Random data at the shapes of Qwen3-Next (gated delta rule, convolution) and Nemotron-3-Nano (selective scan); float32
states in random pages. A program runs several calls, each over pages of its own, so that no state is left in the cache
from the call before, and each feeding its outputs to the next (added to its input, but those of a convolution as they
are: such an addition would take longer than it). The sides take turns: a round is `launches` programs
of one, then of the other, timed from the first dispatch to the last result, so that what the host does hides behind the
device; the median round counts. A time is that of one call: a share of what it takes to start a program is in it, so that
programs of decodes have as many calls as a model has layers. The reference is slow, and runs a few programs only.

Decode counts the bytes of states, read once and written once (a convolution also its inputs and outputs, and so in a
prefill); the first line says at which rate the card copies a large array. Other prefills count tokens. The gated delta rule also runs in
flash-linear-attention, if that is there (see `recurrent_fla`); "apart" is how far the outputs of its
last call are from ours.
"""

import argparse
import operator
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import recurrent_fla
from rimuru_jax.pallas.causal_conv1d import causal_conv1d
from rimuru_jax.pallas.gated_delta_rule import gated_delta_rule
from rimuru_jax.pallas.implementation import Implementation
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.selective_scan import selective_scan

LAYERS = 4
DECODE_LAYERS = 24
"""Calls of a program of the kernels that decodes; of any other, LAYERS."""
REFERENCE_ROUNDS = 2
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
    def layers(self) -> int:
        """Calls of a program of kernels."""
        return DECODE_LAYERS if self.length == 1 else LAYERS

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
    """The first of them changes from call to call."""
    call: Operator
    activation_bytes: int = 0
    """Bytes of inputs and outputs of a token that count."""
    next_input: Callable[[Array, Array], Array] = operator.add
    """The next call's first input, of a call's first input and its output."""

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
        max_query_len=case.length, activation="silu", implementation=implementation,
    )  # fmt: skip


OPERATORS = {
    "gated_delta_rule": Layer(name="gated_delta_rule, 16/32 heads of 128 x 128", view=DELTA_VIEW, run=1, inputs=delta_inputs, call=delta),
    "selective_scan": Layer(name="selective_scan, 64 heads of 64 x 128, 8 groups", view=SCAN_VIEW, run=1, inputs=scan_inputs, call=scan),
    "causal_conv1d": Layer(
        name="causal_conv1d, 8192 channels, kernel of 4",
        view=CONV_VIEW,
        run=3,
        inputs=conv_inputs,
        call=conv,
        activation_bytes=2 * 2 * 8192,
        next_input=lambda first, out: out,
    ),
}  # fmt: skip
CASES = (
    *(Case(rows=rows, length=1) for rows in (1, 64, 256)),
    *(Case(rows=rows, length=8192 // rows) for rows in (1, 4, 16)),
)


class Program:
    """Calls in one compiled program, with a pool of its own."""

    def __init__(self, layer: Layer, case: Case, implementation: Implementation):
        self.layers = layers = case.layers if implementation == "mosaic_gpu" else LAYERS
        states = layers * case.rows + 1
        order = np.random.default_rng(0).permutation(states - 1) + 1
        # Arrays of their own: XLA makes a call that it must slice arguments for more expensive than it is.
        self.pages = [jnp.asarray(ids * layer.run, jnp.int32) for ids in order.reshape(layers, case.rows)]
        # An even number of huge pages, as the pool of an engine has.
        self.pool = jnp.zeros((states + states % 2, layer.run * layer.view.stride), jnp.uint16)
        self.inputs = layer.inputs(case)
        one = jax.jit(layer.call, static_argnums=(0, 1))  # lowered once for all calls

        def calls(pool: Array, pages: list[Array], inputs: tuple[Array, ...]) -> tuple[Array, Array]:
            first, *rest = inputs
            out = first
            for ids in pages:
                out, pool = one(implementation, case, (first, *rest), pool, ids)
                first = layer.next_input(first, out)
            return out, pool

        lowered = jax.jit(calls, donate_argnums=0).lower(self.pool, self.pages, self.inputs)
        self.calls = lowered.compile()
        # Over states that are zeros: they change from here on.
        self.first_result, self.pool = self.calls(self.pool, self.pages, self.inputs)

    def seconds(self, launches: int) -> float:
        """Of one call among `launches` programs in a row."""
        start = time.perf_counter()
        for _ in range(launches):
            _, self.pool = self.calls(self.pool, self.pages, self.inputs)
        self.pool.block_until_ready()
        return (time.perf_counter() - start) / launches / self.layers


@jax.jit
def apart(ours: Array, theirs: Array) -> Array:
    """Norm of the difference, relative."""
    ours, theirs = (x.astype(jnp.float32).ravel() for x in (ours, theirs))
    return jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(ours)


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
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=[*OPERATORS])
    args = parser.parse_args()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    print(f"{jax.devices()[0].device_kind}, driver {driver}, jax {jax.__version__}, Python {platform.python_version()}, "
          f"{args.rounds} rounds of {args.launches} programs of {DECODE_LAYERS} (decode) or {LAYERS} calls")  # fmt: skip
    copied = copy_rate(args.launches)
    print(f"copy: {copied / 1e12:.2f} TB/s")
    missing = recurrent_fla.missing()
    print(f"flash-linear-attention: {missing or version('fla-core')}")
    for layer in map(OPERATORS.__getitem__, args.operators):
        with_fla = layer.call is delta and not missing
        print(f"\n{layer.name}\n")
        print(f"| case | kernels | spread | rate | reference | reference / kernels |{' fla | fla / kernels | apart |' * with_fla}")  # fmt: skip
        print(f"| --- | --- | --- | --- | --- | --- |{' --- | --- | --- |' * with_fla}")
        with ThreadPoolExecutor() as threads:  # XLA compiles outside the interpreter lock
            names: tuple[Implementation, ...] = ("mosaic_gpu", "reference")
            building = [[threads.submit(Program, layer, case, name) for name in names] for case in CASES]
            programs = [[program.result() for program in pair] for pair in building]
        for case, (kernels, reference) in zip(CASES, programs, strict=True):
            theirs = recurrent_fla.GatedDelta(kernels.inputs, case.rows, case.layers) if with_fla else None
            times: list[float] = []
            fla_times: list[float] = []
            reference_times: list[float] = []
            for index in range(args.rounds + 1):
                times.append(kernels.seconds(args.launches))
                if theirs:
                    fla_times.append(theirs.seconds(args.launches))
                if index <= REFERENCE_ROUNDS:
                    reference_times.append(reference.seconds(1))
            ours, reference_time = (statistics.median(x[1:]) for x in (times, reference_times))
            if case.length == 1 or layer.activation_bytes:
                moved = layer.bytes(case) / ours
                rate = f"{moved / 1e12:.2f} TB/s, {moved / copied:.0%} of the copy"
            else:
                rate = f"{case.tokens / ours / 1e6:.2f} M tokens/s"
            line = (
                f"| {case} | {ours * 1e6:.1f} us | {min(times[1:]) * 1e6:.1f}-{max(times[1:]) * 1e6:.1f} us | {rate} | "
                f"{reference_time * 1e6:.0f} us | {reference_time / ours:.1f}x |"
            )
            if theirs:
                fla_time = statistics.median(fla_times[1:])
                difference = float(apart(kernels.first_result, theirs.result()))
                line += f" {fla_time * 1e6:.1f} us | {fla_time / ours:.2f}x | {difference:.1e} |"
            print(line, flush=True)


if __name__ == "__main__":
    main()
