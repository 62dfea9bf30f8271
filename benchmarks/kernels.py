"""Device time of the GPU kernels, each beside a baseline in turn.

`paged_moe`: from hidden states and router logits to the combined output, over shuffled pages (A), by the same kernel
built without a table on contiguous weights (B), and by torch: top-k, sort, gather, `_grouped_mm`, SiLU, `_grouped_mm`,
weighted sum on contiguous weights (T). Every launch adds its input (the residual) and feeds the next one, over several layers' weights,
so that no weights are left in the cache from the launch before. A round runs A, B and T once each; the table has
medians over the rounds, and of the ratios within a round. Run on an idle card: `python benchmarks/kernels.py`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rimuru_jax.host.expert_cache import HOST
from rimuru_jax.host_memory import device_view, empty_pages
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import Scoring, route_and_group
from rimuru_jax.pallas.page_loads import PageLoads
from rimuru_jax.pallas.paged_moe import mosaic_gpu, token_tile
from rimuru_jax.pallas.paged_moe.activations import activation_named

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
    """LAYERS layers of random experts, shuffled over a pool and in order; the pool has room for two layers more."""

    def __init__(self, shape: Shape):
        self.shape, pages = shape, LAYERS * shape.experts * 3
        order = np.random.default_rng(0).permutation(pages + 2 * shape.experts * 3)
        self.tables = jnp.asarray(order[:pages].reshape(LAYERS, shape.experts, 3), jnp.int32)
        self.buffers = order[pages:].reshape(2, shape.experts, 3).astype(np.int32)
        """Pages of two sets of loading buffers."""
        words = shape.f * shape.d
        self.view = MemoryView(
            kind="expert", page_shape=(shape.f, shape.d), dtype=jnp.dtype(jnp.bfloat16), stride=words
        )

        @jax.jit
        def build(key):
            weights = jax.random.normal(key, (pages, words), jnp.bfloat16) * jnp.bfloat16(0.02)
            return lax.bitcast_convert_type(weights, jnp.uint16)

        self.contiguous = build(jax.random.key(0))
        spread = np.concatenate([np.arange(pages), np.arange(len(order) - pages)])
        self.pool = jax.jit(lambda x: x[spread[np.argsort(order)]])(self.contiguous)


@dataclass
class Case:
    """A step's worth of tokens with the router logits of each layer."""

    shape: Shape
    tokens: int
    x: jax.Array
    logits: np.ndarray  # [LAYERS, tokens, experts]
    launches: int
    """Launches of one program: many if they are short, so that starting a program costs little."""
    compiled: dict[tuple, Callable] = field(default_factory=dict)

    @classmethod
    def random(cls, shape: Shape, tokens: int, skew: float) -> "Case":
        rng = np.random.default_rng(tokens)
        popularity = -skew * np.log(np.arange(1, shape.experts + 1))
        logits = [
            rng.permutation(popularity) + rng.gumbel(size=(tokens, shape.experts)) for _ in range(LAYERS)
        ]
        x = jax.random.normal(jax.random.key(1), (tokens, shape.d), jnp.bfloat16)
        return cls(shape, tokens, x, np.asarray(logits, np.float32), launches=32 if tokens <= 64 else 8)

    def chosen(self, layer: int) -> np.ndarray:
        return np.argsort(-self.logits[layer], axis=1)[:, : self.shape.top_k]

    def touched(self) -> float:
        """Mean number of experts that at least one token chose."""
        return statistics.mean(len(np.unique(self.chosen(layer))) for layer in range(LAYERS))

    def compile(
        self,
        weights: Weights,
        tables: jax.Array,
        host: jax.Array,
        *,
        routed: bool = False,
        contiguous: bool = False,
        loads: PageLoads | None = None,
        valid: bool = True,
        launches: int | None = None,
        tile: int | None = None,
        config: mosaic_gpu.Config | None = None,
    ) -> Callable[[], object]:
        """PROGRAMS programs of `launches` launches each, ready to run.

        `routed`: tokens are grouped before, so that routing is not in the time; `valid`: whether these are any tokens
        but padding. With `loads` the pool of `weights` is donated and replaced.
        """
        shape, launches = self.shape, launches or self.launches
        if tile is None:
            tile = token_tile(self.tokens * shape.top_k, shape.experts, weights.view, 3)
        silu = activation_named("silu")

        def routing(logits):
            counted = jnp.full(self.tokens, valid)
            _, mix, groups = route_and_group(logits, counted, shape.top_k, Scoring(normalize=True), tile=tile)
            return mix, groups

        @jax.jit
        def launch(x, given, pool, host, tables, loads, layer):
            mix, groups = given if routed else routing(given)
            out, pool = mosaic_gpu.paged_moe(
                x,
                mix,
                groups,
                pool,
                weights.view,
                host,
                tables,
                layer,
                loads,
                activation=silu,
                config=config,
                contiguous=contiguous,
            )
            return x + out, pool

        def program(x, given, pool, host, tables, loads):
            for i in range(launches):
                x, pool = launch(x, given[i % LAYERS], pool, host, tables, loads, jnp.int32(i % LAYERS))
            return x, pool if loads is not None else None

        given = list(jnp.asarray(self.logits))
        if routed:
            given = [jax.jit(routing)(logits) for logits in given]
        args = [self.x, given, weights.pool, host, tables, loads]
        donated = (2,) if loads is not None else ()
        key = (routed, contiguous, loads is None, launches, tile, config)
        if key not in self.compiled:
            self.compiled[key] = jax.jit(program, donate_argnums=donated).lower(*args).compile()
        compiled = self.compiled[key]

        def run():
            results = []
            for _ in range(PROGRAMS):
                args[2] = weights.pool
                x, pool = compiled(*args)
                results.append(x)
                if loads is not None:
                    weights.pool = pool
            jax.block_until_ready(results)

        return run


def torch_program(case: Case, weights, routed: bool) -> Callable[[], None]:
    """The same work by torch on contiguous weights `(w13 [L, E, 2f, d], w2 [L, E, d, f])`, as one CUDA graph."""
    import torch  # pyright: ignore[reportMissingImports]  # no dependency: on the measuring machine only
    from torch.nn.functional import silu  # pyright: ignore[reportMissingImports]

    shape, w13, w2 = case.shape, *weights
    x0 = torch.randn(case.tokens, shape.d, device="cuda", dtype=torch.bfloat16)
    experts = torch.arange(shape.experts, device="cuda")

    def routing(logits):
        best, chosen = torch.topk(logits, shape.top_k, sorted=False)
        mix = torch.softmax(best, 1).to(x0.dtype)  # torch's sum in bfloat16 is its fastest
        by_expert, order = torch.sort(chosen.reshape(-1), stable=True)
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device="cuda")
        return mix, order // shape.top_k, rows.reshape(chosen.shape), ends

    given = list(torch.from_numpy(case.logits).cuda())
    if routed:
        given = [routing(logits) for logits in given]

    def launch(x, layer):
        mix, source, rows, ends = given[layer] if routed else routing(given[layer])
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
    copy = empty_pages(*pages.shape)
    copy[...] = np.asarray(pages)
    return device_view(copy)


def bench_resident(
    shape: Shape, token_counts: list[int], skew: float, launches: int, with_torch: bool, routed: bool
):
    weights = Weights(shape)
    cases = [Case.random(shape, tokens, skew) for tokens in token_counts]
    with ThreadPoolExecutor() as threads:  # compilation runs outside the interpreter lock
        compiled = list(
            threads.map(
                lambda job: job[0].compile(
                    weights, weights.tables, weights.contiguous, routed=routed, contiguous=job[1]
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
    overheads = []
    for i, case in enumerate(cases):
        runs = compiled[2 * i : 2 * i + 2]
        if torch_weights is not None:
            runs = [*runs, torch_program(case, torch_weights, routed)]
        rounds = measure(runs, case.launches, launches)
        times = [statistics.median(column) for column in zip(*rounds, strict=True)]
        overheads.append(statistics.median(a / b - 1 for a, b, *_ in rounds) * 100)
        expert = 3 * shape.d * shape.f
        torch_columns = "- | -"
        if torch_weights is not None:
            torch_columns = f"{times[2]:.1f} | {statistics.median(r[2] / r[0] for r in rounds):.2f}"
        print(
            f"| {case.tokens} | {times[0]:.1f} | {times[1]:.1f} | {overheads[-1]:.2f} | {torch_columns} | "
            f"{case.touched() * expert * 2 / times[0] / 1e6:.2f} | "
            f"{case.tokens * shape.top_k * expert * 2 / times[0] / 1e6:.0f} |",
            flush=True,
        )
    print(f"\nmean overhead {statistics.mean(overheads):.2f} %")


def bench_host(shape: Shape, token_counts: list[int], launches: int):
    """Every expert read in place from host memory, with the usual tile and with that for experts on the host."""
    weights = Weights(shape)
    host = host_view(weights.contiguous)
    tables = jnp.full_like(weights.tables, HOST)
    print(
        "| tokens | tile | all experts on the host us | GB/s, each expert once |\n| --- | --- | --- | --- |"
    )
    for tokens in token_counts:
        case = Case.random(shape, tokens, 0.0)
        pairs = tokens * shape.top_k
        usual, large = (
            token_tile(pairs, shape.experts, weights.view, 3, from_host=on_host) for on_host in (False, True)
        )
        tiles = list(dict.fromkeys((usual, large)))
        runs = [
            case.compile(weights, tables, host, routed=True, launches=LAYERS, tile=tile) for tile in tiles
        ]
        rounds = measure(runs, LAYERS, launches)
        for tile, times in zip(tiles, zip(*rounds, strict=True), strict=True):
            time_us = statistics.median(times)
            rate = case.touched() * 6 * shape.d * shape.f / time_us / 1e3
            print(f"| {tokens} | {tile} | {time_us:.0f} | {rate:.1f} |", flush=True)


def bench_loads(shape: Shape, token_counts: list[int], launches: int):
    """Pages copied from host memory by blocks of the kernel, beside its computing and alone."""
    weights = Weights(shape)
    host = host_view(weights.contiguous)
    page_us = 2 * shape.d * shape.f / 50e9 * 1e6
    rng = np.random.default_rng(5)
    print("| tokens | blocks | pages | compute us | load us | both us | both / longer |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for tokens in token_counts:
        case = Case.random(shape, tokens, 0.0)

        def prepared(pages: int, valid: bool, blocks: int, case: Case = case) -> Callable[[], object]:
            sources = rng.integers(0, len(weights.contiguous), (LAYERS + 1, shape.experts * 3))
            # Layer l fills the set that layer l + 1 would compute from.
            targets = weights.buffers.reshape(2, -1)[np.arange(LAYERS + 1) % 2]
            loads = PageLoads(
                sources=jnp.asarray(sources, jnp.int32),
                targets=jnp.asarray(targets),
                counts=jnp.full(LAYERS + 1, pages, jnp.int32),
                blocks=jnp.int32(blocks),
            )
            return case.compile(weights, weights.tables, host, routed=True, loads=loads, valid=valid)

        compute = prepared(0, True, 8)
        compute_us = statistics.median(r[0] for r in measure([compute], case.launches, launches))
        for share in (0.2, 0.5, 1, 2, 5):
            pages = max(1, round(share * compute_us / page_us))
            for blocks in (4, 8, 16) if share == 1 else (8,):
                runs = [compute, prepared(pages, False, blocks), prepared(pages, True, blocks)]
                rounds = measure(runs, case.launches, launches)
                alone, load, both = (statistics.median(column) for column in zip(*rounds, strict=True))
                ratio = statistics.median(c / max(a, b) for a, b, c in rounds)
                print(
                    f"| {tokens} | {blocks} | {pages} | {alone:.0f} | {load:.0f} | {both:.0f} | {ratio:.3f} |",
                    flush=True,
                )


def bench_residency(shape: Shape, token_counts: list[int], launches: int):
    """A share of each layer's experts on pages of their own, the rest on the pages of its set of loading buffers."""
    weights = Weights(shape)
    rng = np.random.default_rng(6)
    shares = (1.0, 0.9, 0.75, 0.5)
    columns = ["all resident us", *(f"{share:.0%} %" for share in shares[1:])]
    print(f"| tokens | {' | '.join(columns)} |")
    print("| --- " * (len(shares) + 1) + "|")
    for tokens in token_counts:
        case = Case.random(shape, tokens, 0.0)
        runs = []
        for share in shares:
            table = np.array(weights.tables)
            for layer in range(LAYERS):
                away = rng.permutation(shape.experts)[round(share * shape.experts) :]
                table[layer, away] = weights.buffers[layer % 2, : len(away)]
            runs.append(case.compile(weights, jnp.asarray(table), weights.contiguous, routed=True))
        rounds = measure(runs, case.launches, launches)
        all_us = statistics.median(r[0] for r in rounds)
        more = [statistics.median(r[i] / r[0] - 1 for r in rounds) * 100 for i in range(1, len(shares))]
        print(f"| {tokens} | {all_us:.1f} | {' | '.join(f'{m:+.2f}' for m in more)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 64, 256, 1024, 4096, 8192])
    parser.add_argument("--skew", type=float, default=0.0, help="experts are chosen like 1 / rank^skew")
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--routed", action="store_true", help="start from grouped tokens, not from logits")
    parser.add_argument(
        "--what",
        choices=["resident", "host", "loads", "residency"],
        default="resident",
        help="host: experts read in place; loads: copies beside computing; residency: pages of loading buffers",
    )
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    device = jax.devices()[0]
    print(
        f"paged_moe, {args.what}, {args.shape}, skew {args.skew}: {device.device_kind}, jax {jax.__version__}\n"
    )
    if args.what == "resident":
        bench_resident(shape, args.tokens, args.skew, args.launches, not args.no_torch, args.routed)
    else:
        bench = {"host": bench_host, "loads": bench_loads, "residency": bench_residency}[args.what]
        bench(shape, args.tokens, args.launches)


if __name__ == "__main__":
    main()
