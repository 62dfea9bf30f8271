"""Device time of the GPU kernels, each beside a baseline in turn.

`paged_moe`: from hidden states and routing to the combined output, over shuffled pages (A), by the same kernel built
without a table on contiguous weights (B), and by torch: gather, `_grouped_mm`, SiLU, `_grouped_mm`, weighted sum on
contiguous weights (T). Every launch adds its input (the residual) and feeds the next one, over several layers' weights,
so that no weights are left in the cache from the launch before. A round runs A, B and T once each; the table has
medians over the rounds, and of the ratios within a round. Run on an idle card: `python benchmarks/kernels.py`.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rimuru_jax.host.expert_cache import HOST
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import Routing, group_tokens
from rimuru_jax.pallas.paged_moe import mosaic_gpu

LAYERS = 4
PROGRAMS = 4
"""Programs queued behind each other in one measurement, so that the device never waits for the host between them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Routed experts of a model."""

    experts: int
    top_k: int
    d: int
    f: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "qwen1.5-moe": Shape(60, 4, 2048, 1408),
    "qwen3.5-35b": Shape(256, 8, 2048, 512),
    "qwen3.5-122b": Shape(256, 8, 3072, 1024),
}


class Weights:
    """LAYERS layers of random experts, shuffled over a pool and in order."""

    def __init__(self, shape: Shape):
        pages = LAYERS * shape.experts * 3
        order = np.random.default_rng(0).permutation(pages)
        self.tables = jnp.asarray(order.reshape(LAYERS, shape.experts, 3), jnp.int32)
        words = shape.f * shape.d
        self.view = MemoryView(
            kind="expert", page_shape=(shape.f, shape.d), dtype=jnp.dtype(jnp.bfloat16), stride=words
        )

        @jax.jit
        def build(key):
            weights = jax.random.normal(key, (pages, words), jnp.bfloat16) * jnp.bfloat16(0.02)
            return lax.bitcast_convert_type(weights, jnp.uint16)

        self.contiguous = build(jax.random.key(0))
        self.pool = jax.jit(lambda x: x[np.argsort(order)])(self.contiguous)


@dataclass
class Case:
    """A step's worth of tokens with one routing per layer."""

    shape: Shape
    tokens: int
    x: jax.Array
    mix: jax.Array
    chosen: list[np.ndarray]
    routings: list[Routing]
    launches: int
    """Launches of one program: many if they are short, so that starting a program costs little."""

    @classmethod
    def random(cls, shape: Shape, tokens: int, skew: float) -> "Case":
        rng = np.random.default_rng(tokens)
        popularity = -skew * np.log(np.arange(1, shape.experts + 1))
        chosen = []
        for _ in range(LAYERS):
            scores = rng.permutation(popularity) + rng.gumbel(size=(tokens, shape.experts))
            chosen.append(np.argsort(-scores, axis=1)[:, : shape.top_k].astype(np.int32))
        tile = mosaic_gpu.token_tile(tokens * shape.top_k, shape.experts)
        group = jax.jit(functools.partial(group_tokens, num_experts=shape.experts, tile=tile))
        keys = jax.random.split(jax.random.key(1))
        return cls(
            shape,
            tokens,
            jax.random.normal(keys[0], (tokens, shape.d), jnp.bfloat16),
            jax.nn.softmax(jax.random.normal(keys[1], (tokens, shape.top_k))),
            chosen,
            [group(jnp.asarray(c), jnp.ones(tokens, bool)) for c in chosen],
            launches=32 if tokens <= 64 else 8,
        )

    def touched(self) -> float:
        """Mean number of experts that at least one token chose."""
        return statistics.mean(len(np.unique(c)) for c in self.chosen)

    def compile(self, weights: Weights, tables: jax.Array, host: jax.Array, contiguous: bool, launches: int):
        """A program of `launches` launches, ready to run."""

        @jax.jit
        def launch(x, mix, routing, pool, host, table, first):
            out = mosaic_gpu.paged_moe(
                x, mix, routing, pool, weights.view, host, table, first, contiguous=contiguous
            )
            return x + out

        def program(x, mix, routings, pool, host, tables):
            for i in range(launches):
                layer = i % LAYERS
                first = jnp.int32(layer * self.shape.experts * 3)
                x = launch(x, mix, routings[layer], pool, host, tables[layer], first)
            return x

        args = (self.x, self.mix, self.routings, weights.pool, host, tables)
        compiled = jax.jit(program).lower(*args).compile()

        return lambda: jax.block_until_ready([compiled(*args) for _ in range(PROGRAMS)])


def torch_program(case: Case, weights) -> Callable[[], None]:
    """The same work by torch on contiguous weights `(w13 [L, E, 2f, d], w2 [L, E, d, f])`, as one CUDA graph."""
    import torch  # pyright: ignore[reportMissingImports]  # no dependency: on the measuring machine only
    from torch.nn.functional import silu  # pyright: ignore[reportMissingImports]

    shape, w13, w2 = case.shape, *weights
    x0 = torch.randn(case.tokens, shape.d, device="cuda", dtype=torch.bfloat16)
    mix = torch.from_numpy(np.array(case.mix)).cuda().to(x0.dtype)  # torch's sum in bfloat16 is its fastest
    layers = []
    for chosen in case.chosen:
        flat = chosen.reshape(-1)
        order = np.argsort(flat, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(flat.size)
        ends = np.cumsum(np.bincount(flat, minlength=shape.experts)).astype(np.int32)
        layers.append(
            [torch.from_numpy(a).cuda() for a in (order // shape.top_k, rank.reshape(chosen.shape), ends)]
        )

    def launch(x, layer):
        source, rows, ends = layers[layer]
        gate_up = torch._grouped_mm(x[source], w13[layer].transpose(1, 2), offs=ends)
        h = silu(gate_up[:, : shape.f]) * gate_up[:, shape.f :]
        y = torch._grouped_mm(h, w2[layer].transpose(1, 2), offs=ends)
        return x + torch.bmm(mix[:, None], y[rows])[:, 0]

    def program():
        x = x0
        for i in range(case.launches):
            x = launch(x, i % LAYERS)
        return x

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        program()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program()

    def run():
        for _ in range(PROGRAMS):
            graph.replay()
        torch.cuda.synchronize()

    return run


def microseconds(run: Callable[[], object], launches: int) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / (PROGRAMS * launches) * 1e6


def measure(runs: list[Callable[[], object]], launches: int, wanted: int) -> list[list[float]]:
    """Microseconds per launch of each program in each round; programs run in turn, `wanted` launches each."""
    for run in runs * 2:
        run()
    rounds = max(8, -(-wanted // (PROGRAMS * launches)))
    return [[microseconds(run, launches) for run in runs] for _ in range(rounds)]


def host_view(pages: jax.Array) -> jax.Array:
    """A copy of `pages` in page-locked host memory, as a device array that is read over PCIe."""
    import cupy  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]  # no dependency: on the measuring machine only

    owner = torch.empty(pages.shape, dtype=torch.uint16, pin_memory=True)
    owner.numpy()[...] = np.asarray(pages)
    memory = cupy.cuda.UnownedMemory(owner.data_ptr(), pages.nbytes, owner, device_id=0)
    view = cupy.ndarray(pages.shape, cupy.uint16, cupy.cuda.MemoryPointer(memory, 0))
    return jax.dlpack.from_dlpack(view)


def bench_resident(shape: Shape, token_counts: list[int], skew: float, launches: int, with_torch: bool):
    weights = Weights(shape)
    cases = [Case.random(shape, tokens, skew) for tokens in token_counts]
    with ThreadPoolExecutor() as threads:  # compilation runs outside the interpreter lock
        compiled = list(
            threads.map(
                lambda job: job[0].compile(
                    weights, weights.tables, weights.contiguous, job[1], job[0].launches
                ),
                [(case, contiguous) for case in cases for contiguous in (False, True)],
            )
        )
    torch_weights = None
    if with_torch:
        import torch  # pyright: ignore[reportMissingImports]

        sizes = ((2 * shape.f, shape.d), (shape.d, shape.f))
        torch_weights = [
            torch.randn(LAYERS, shape.experts, *size, device="cuda", dtype=torch.bfloat16) * 0.02
            for size in sizes
        ]
    print("| tokens | pages us | no table us | overhead % | torch us | torch / pages | TB/s | TFLOP/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for i, case in enumerate(cases):
        runs = compiled[2 * i : 2 * i + 2]
        if torch_weights is not None:
            runs = [*runs, torch_program(case, torch_weights)]
        rounds = measure(runs, case.launches, launches)
        times = [statistics.median(column) for column in zip(*rounds, strict=True)]
        overhead = statistics.median(a / b - 1 for a, b, *_ in rounds) * 100
        expert = 3 * shape.d * shape.f
        torch_columns = "- | -"
        if torch_weights is not None:
            torch_columns = f"{times[2]:.1f} | {statistics.median(r[2] / r[0] for r in rounds):.2f}"
        print(
            f"| {case.tokens} | {times[0]:.1f} | {times[1]:.1f} | {overhead:.2f} | {torch_columns} | "
            f"{case.touched() * expert * 2 / times[0] / 1e6:.2f} | "
            f"{case.tokens * shape.top_k * expert * 2 / times[0] / 1e6:.0f} |",
            flush=True,
        )


def bench_host(shape: Shape, token_counts: list[int], launches: int):
    """Every expert read in place from host memory."""
    weights = Weights(shape)
    host = host_view(weights.contiguous)
    tables = jnp.full_like(weights.tables, HOST)
    print("| tokens | all experts on the host us | GB/s |\n| --- | --- | --- |")
    for tokens in token_counts:
        case = Case.random(shape, tokens, 0.0)
        run = case.compile(weights, tables, host, False, LAYERS)
        rounds = measure([run], LAYERS, launches)
        time_us = statistics.median(r[0] for r in rounds)
        print(
            f"| {tokens} | {time_us:.0f} | {case.touched() * 6 * shape.d * shape.f / time_us / 1e3:.1f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 64, 256, 1024, 4096, 8192])
    parser.add_argument("--skew", type=float, default=0.0, help="experts are chosen like 1 / rank^skew")
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--host", action="store_true", help="experts in host memory, up to 64 tokens")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    device = jax.devices()[0]
    print(f"paged_moe, {args.shape}, skew {args.skew}: {device.device_kind}, jax {jax.__version__}\n")
    if args.host:
        bench_host(shape, [t for t in args.tokens if t <= 64], args.launches)
    else:
        bench_resident(shape, args.tokens, args.skew, args.launches, not args.no_torch)


if __name__ == "__main__":
    main()
