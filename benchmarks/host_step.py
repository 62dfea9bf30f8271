"""Time of one scheduling pass on the host: no device, no model.

A page layout like Qwen3-30B-A3B's (48 layers, 128 experts of three matrices, 3 MiB expert pages, KV pages of 16 tokens), a pool
in which KV and experts share what is left, and a closed loop of requests with random lengths that keeps the batch full.
A pass is `schedule` (growth, admission, adjuster), `take_updates`, `step_tables` where residency has changed, and the
delivery of the step's tokens. Run: `python benchmarks/host_step.py`.
"""

import argparse
import gc
import os
import platform
import time
from dataclasses import dataclass

import numpy as np

from rimuru_jax.host.allocator import PageAllocator
from rimuru_jax.host.expert_cache import ExpertCache
from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint
from rimuru_jax.host.metrics import Metrics
from rimuru_jax.host.page_layout import PageKind, PageLayout
from rimuru_jax.host.page_tables import PageTables
from rimuru_jax.host.request import Request
from rimuru_jax.host.residency import residency_policy
from rimuru_jax.host.scheduler import Scheduler, SchedulerConfig

LAYERS, EXPERTS, MATRICES = 48, 128, 3
PAGE_TOKENS = 16
MAX_MODEL_LEN = 2048


def build(
    num_seqs: int, pool_gib: float, cache_policy: str
) -> tuple[Scheduler, PageTables, ExpertCache, Metrics]:
    """A scheduler over an elastic pool of `pool_gib` GiB."""
    expert = PageKind(name="expert", level=2, page_bytes=3 * 2**20, row_bytes=4096, layers=LAYERS)
    kv = PageKind(
        name="kv",
        level=3,
        page_bytes=2**15,
        row_bytes=256,
        layers=LAYERS,
        page_tokens=PAGE_TOKENS,
        groupable=True,
    )
    layout = PageLayout.plan([expert, kv])
    allocator = PageAllocator(layout, layout.num_huge_pages(int(pool_gib * 2**30)))
    model = ModelFingerprint(
        model_type="qwen3_moe", num_layers=LAYERS, num_experts=EXPERTS, experts_per_token=8
    )
    counts = np.random.default_rng(0).zipf(1.6, (LAYERS, EXPERTS))
    cache = ExpertCache(
        num_layers=LAYERS,
        num_experts=EXPERTS,
        matrices=MATRICES,
        allocator=allocator,
        policy=residency_policy(cache_policy, HotsetProfile.uniform(model).record(counts, 1000)),
        expert_offload_limit=96,
        buffer_experts=32,
    )
    cache.fill(keep_free_pages=12)
    tables = PageTables(layout, num_seqs, MAX_MODEL_LEN)
    metrics = Metrics()
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=8192, max_model_len=MAX_MODEL_LEN)
    return Scheduler(config, allocator, tables, cache, metrics), tables, cache, metrics


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: its time in seconds, and what happened in it."""

    wall: float
    cpu: float  # of this thread: what other processes do counts less
    running: int  # requests
    growing: int  # requests that started a page
    admissions: int
    completions: int
    moves: bool  # whether experts were given up or taken back

    @property
    def only_decodes(self) -> bool:
        return not (self.admissions or self.completions or self.moves)


def measure(
    passes: int, warmup: int, num_seqs: int, pool_gib: float, cache_policy: str
) -> tuple[list[Pass], dict[str, int | float]]:
    """The passes after `warmup`, and what every counter grew by in them."""
    scheduler, tables, cache, metrics = build(num_seqs, pool_gib, cache_policy)
    rng = np.random.default_rng(1)
    arrivals, version = 0, -1
    rows: list[Pass] = []
    before = dict(metrics.counters)
    gc.freeze()
    for number in range(-warmup, passes):
        if number == 0:
            before = dict(metrics.counters)
        while len(scheduler.waiting) < 4:  # the closed loop's queue is never empty
            arrivals += 1
            prompt, output = int(rng.integers(16, 1024)), int(rng.integers(64, 1024))
            scheduler.add(Request(str(arrivals), [1] * prompt, output, arrival=arrivals))
        router_counts = rng.integers(0, 2, (LAYERS, EXPERTS))
        moved, finished = _moves(metrics), metrics.counters["request_success"]
        wall, cpu = time.perf_counter(), time.thread_time()
        plan = scheduler.schedule()
        tables.take_updates()
        if cache.version != version:
            version = cache.version
            cache.step_tables()
        if plan.chunks:
            cache.observe(router_counts, plan.num_tokens, len(plan.chunks))
        for number in scheduler.update(plan, [1] * len(plan.chunks)):
            request = plan.chunks[number].request
            if len(request.output_token_ids) == request.max_tokens:
                scheduler.finish(request, "length")
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        if number >= 0:
            starts = [chunk.start for chunk in plan.chunks]
            rows.append(
                Pass(
                    wall,
                    cpu,
                    len(scheduler.running),
                    sum(start > 0 and start % PAGE_TOKENS == 0 for start in starts),
                    starts.count(0),
                    int(metrics.counters["request_success"] - finished),
                    _moves(metrics) > moved,
                )
            )
    return rows, {name: count - before[name] for name, count in metrics.counters.items()}


def _moves(metrics: Metrics) -> int | float:
    return metrics.counters["expert_shrinks"] + metrics.counters["expert_expansions"]


def describe(name: str, rows: list[Pass]) -> str:
    """Times of some passes, in milliseconds."""
    if not rows:
        return f"{name:26} none"
    cells = [f"{name:26} {len(rows):6}"]
    for times in ([row.wall for row in rows], [row.cpu for row in rows]):
        values = (np.mean(times), *np.percentile(times, [50, 99]))
        cells.append(" / ".join(f"{value * 1e3:.2f}" for value in values))
    return "   ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=4000)
    parser.add_argument("--warmup", type=int, default=1000, help="passes before the clock starts")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--pool-gib", type=float, default=48.0)
    parser.add_argument("--expert-cache-policy", choices=["online", "hotset", "lru"], default="hotset")
    args = parser.parse_args()
    rows, counters = measure(args.passes, args.warmup, args.num_seqs, args.pool_gib, args.expert_cache_policy)

    def mean(name: str) -> str:
        return f"{np.mean([getattr(row, name) for row in rows]):.2f}"

    print(
        f"pool {args.pool_gib} GiB, {args.expert_cache_policy}, Python {platform.python_version()}, numpy {np.__version__} "
        f"on {platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}\n"
        f"per pass: {mean('running')} running, {mean('growing')} start a page, {mean('admissions')} admitted, "
        f"{mean('completions')} completed, experts move in {mean('moves')}\n"
        f"{'ms: mean / median / p99':26} {'passes':>6}   {'wall':18}   CPU"
    )
    print(describe("all passes", rows))
    print(describe("decodes and growth alone", [row for row in rows if row.only_decodes]))
    print(describe("with completion, admission", [row for row in rows if row.admissions or row.completions]))
    print(
        f"shrinks {counters['expert_shrinks']}, expansions {counters['expert_expansions']}, "
        f"reversals {counters['expert_reversals']}, preemptions {counters['num_preemptions']}, "
        f"passes that waited for reclaim {counters['awaiting_reclaim']}"
    )


if __name__ == "__main__":
    main()
