"""Time of one scheduling pass on the host: no device, no model.

A page layout like Qwen3-30B-A3B's (48 layers, 128 experts of three matrices, 3 MiB expert pages, KV pages of 16 tokens), a pool
in which KV and experts share what is left, and a closed loop of requests with random lengths that keeps the batch full.
A pass is `schedule` (growth, admission, adjuster), `take_updates`, `step_tables` where residency has changed, and the
delivery of the step's tokens. Run: `python benchmarks/host_step.py`.
"""

import argparse
import gc
import platform
import time

import numpy as np

from rimuru_jax.host.allocator import PageAllocator
from rimuru_jax.host.expert_cache import ExpertCache, residency_policy
from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint
from rimuru_jax.host.metrics import Metrics
from rimuru_jax.host.page_layout import PageKind, PageLayout
from rimuru_jax.host.page_tables import PageTables
from rimuru_jax.host.request import Request
from rimuru_jax.host.scheduler import Scheduler, SchedulerConfig

LAYERS, EXPERTS, MATRICES = 48, 128, 3
MAX_MODEL_LEN = 2048


def build(
    num_seqs: int, pool_gib: float, cache_policy: str
) -> tuple[Scheduler, PageTables, ExpertCache, Metrics]:
    """A scheduler over an elastic pool of `pool_gib` GiB."""
    expert = PageKind(name="expert", level=2, page_bytes=3 * 2**20, row_bytes=4096, layers=LAYERS)
    kv = PageKind(
        name="kv", level=3, page_bytes=2**15, row_bytes=256, layers=LAYERS, page_tokens=16, groupable=True
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


def measure(
    passes: int, warmup: int, num_seqs: int, pool_gib: float, cache_policy: str
) -> tuple[np.ndarray, Metrics, list[int]]:
    """Seconds per pass, and how many requests ran in each."""
    scheduler, tables, cache, metrics = build(num_seqs, pool_gib, cache_policy)
    rng = np.random.default_rng(1)
    arrivals, version, seconds, running = 0, -1, np.zeros(passes), []
    gc.freeze()
    for number in range(-warmup, passes):
        while len(scheduler.waiting) < 4:  # the closed loop's queue is never empty
            arrivals += 1
            prompt, output = int(rng.integers(16, 1024)), int(rng.integers(64, 1024))
            scheduler.add(Request(str(arrivals), [1] * prompt, output, arrival=arrivals))
        router_counts = rng.integers(0, 2, (LAYERS, EXPERTS))
        start = time.perf_counter()
        plan = scheduler.schedule()
        tables.take_updates()
        if cache.version != version:
            version = cache.version
            cache.step_tables()
        cache.observe(router_counts)
        for request in scheduler.update(plan, [1] * len(plan.chunks)):
            if len(request.output_token_ids) == request.max_tokens:
                scheduler.finish(request, "length")
        if number >= 0:
            seconds[number] = time.perf_counter() - start
            running.append(len(scheduler.running))
    return seconds, metrics, running


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=4000)
    parser.add_argument("--warmup", type=int, default=1000, help="passes before the clock starts")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--pool-gib", type=float, default=48.0)
    parser.add_argument("--expert-cache-policy", choices=["hotset", "lru"], default="hotset")
    args = parser.parse_args()
    seconds, metrics, running = measure(
        args.passes, args.warmup, args.num_seqs, args.pool_gib, args.expert_cache_policy
    )
    mean, median, p99, worst = (
        f"{value * 1e3:.3f}" for value in (seconds.mean(), *np.percentile(seconds, [50, 99]), seconds.max())
    )
    counters = metrics.counters
    print(
        f"{args.passes} passes, {np.mean(running):.0f} running sequences on average, pool {args.pool_gib} GiB, "
        f"{args.expert_cache_policy}, Python {platform.python_version()} on {platform.processor() or platform.machine()}\n"
        f"ms per pass: mean {mean}, median {median}, p99 {p99}, max {worst}\n"
        f"shrinks {counters['expert_shrinks']}, expansions {counters['expert_expansions']}, "
        f"reversals {counters['expert_reversals']}, preemptions {counters['num_preemptions']}, "
        f"passes that waited for reclaim {counters['awaiting_reclaim']}"
    )


if __name__ == "__main__":
    main()
