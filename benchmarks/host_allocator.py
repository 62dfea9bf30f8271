"""Speed of the page allocator on the host: `python3 benchmarks/host_allocator.py`.

Two layouts in a 24 GiB pool: Qwen3-30B-A3B (48 layers of KV) and Qwen3.5-122B-A10B with float32 states (KV, 36
recurrent states and convolution rows per sequence, two expert pages to a huge page). Besides the sequence under test
128 others live in the pool, and experts fill most of the rest. Every line is the best of five repetitions of the mean
over many calls, so that a busy machine disturbs it least. No device is used.
"""

import os
import platform
import time
from collections.abc import Callable

import numpy as np

from rimuru_jax.host.allocator import EXPERTS, PageAllocator
from rimuru_jax.host.page_layout import PageKind, PageLayout

KIB, MIB = 2**10, 2**20
POOL_BYTES = 24 * 2**30
STREAMS = 128


def dense_layout() -> PageLayout:
    """Qwen3-30B-A3B in bf16, 16 tokens a KV page."""
    return PageLayout.plan(
        [
            PageKind(name="expert", level=2, page_bytes=3 * MIB, row_bytes=4 * KIB, layers=48),
            PageKind(name="kv", level=3, page_bytes=32 * KIB, row_bytes=256, layers=48, page_tokens=16),
        ]
    )


def hybrid_layout() -> PageLayout:
    """Qwen3.5-122B-A10B in bf16 with float32 states."""
    return PageLayout.plan(
        [
            PageKind(name="expert", level=2, page_bytes=6 * MIB, row_bytes=6 * KIB, layers=48),
            PageKind(name="ssm", level=2, page_bytes=4 * MIB, row_bytes=512, layers=36),
            PageKind(name="kv", level=3, page_bytes=32 * KIB, row_bytes=512, layers=12, page_tokens=16),
            PageKind(name="conv", level=3, page_bytes=24 * KIB, row_bytes=24 * KIB, layers=36, run=3),
        ]
    )


def filled(layout: PageLayout, streams: int, tokens: int) -> PageAllocator:
    """A pool with `streams` sequences of about `tokens` tokens, experts in all but 300 of the other expert pages."""
    allocator = PageAllocator(layout, layout.num_huge_pages(POOL_BYTES))
    for owner in range(streams):
        if allocator.allocate(owner, demand(layout, tokens + 7 * owner)) is None:
            raise RuntimeError("the pool is too small for this benchmark")
    allocator.allocate(EXPERTS, {"expert": max(0, allocator.free_expert_pages - 300)})
    return allocator


def demand(layout: PageLayout, tokens: int) -> dict[str, int]:
    return {placed.kind.name: placed.units_for(tokens) for placed in layout.sequence_kinds}


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Mean time of a call, the best of five repetitions."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def measure(name: str, layout: PageLayout, streams: int) -> list[tuple[str, str, str]]:
    allocator = filled(layout, streams, tokens=300)
    tables = layout["kv"].tables
    rows: list[tuple[str, str, str]] = []

    def line(what: str, value: float, note: str = "") -> None:
        rows.append((f"{name}: {what}", f"{value:9.1f} us", note))

    def rate(units: int, value: float) -> str:
        return f"{2 * units / value:.1f} M units/s, each taken and given back"

    request = demand(layout, 16 * (1008 // tables if name == "dense" else 60))
    units = sum(request.values())

    def admit_and_release() -> None:
        if allocator.allocate(9999, request) is None:
            raise RuntimeError("the request does not fit")
        allocator.release(9999)

    cost = microseconds(admit_and_release, 200)
    line(f"admission and release of {units} units", cost, rate(units, cost))

    growing = demand(layout, 16)
    chunk = {"kv": tables}
    allocator.allocate(9999, growing)
    columns = 60

    def grow() -> None:
        for _ in range(columns):
            allocator.allocate(9999, chunk)
        allocator.release(9999)
        allocator.allocate(9999, growing)

    def restart() -> None:
        allocator.release(9999)
        allocator.allocate(9999, growing)

    line(
        f"growth of one sequence by {tables} units",
        (microseconds(grow, 20) - microseconds(restart, 100)) / columns,
        f"mean over {columns} columns, new parents included",
    )
    few = {"kv": 4}

    def grow_little() -> None:
        for _ in range(columns):
            allocator.allocate(9999, few)
        allocator.release(9999)
        allocator.allocate(9999, growing)

    line("growth by 4 units", (microseconds(grow_little, 20) - microseconds(restart, 100)) / columns)

    busy = [(owner % streams if owner < streams else 10000 + owner, {}) for owner in range(256)]
    line("shortfall of 256 empty demands", microseconds(lambda: allocator.shortfall(busy), 500))
    mixed = [(owner, chunk if number % 8 == 0 else {}) for number, (owner, _) in enumerate(busy)]
    mixed[-1] = (mixed[-1][0], demand(layout, 500))
    line(
        "shortfall of 256, one in 8 grows, one is new", microseconds(lambda: allocator.shortfall(mixed), 500)
    )
    full = [(owner, chunk) for owner, _ in busy]
    line("shortfall of 256, all grow", microseconds(lambda: allocator.shortfall(full), 500))
    one = [(0, chunk)]
    line("shortfall of one", microseconds(lambda: allocator.shortfall(one), 2000))

    ids = allocator.allocate(EXPERTS, {"expert": 30})
    assert ids is not None

    def swap_experts() -> None:
        nonlocal ids
        assert ids is not None
        allocator.free(EXPERTS, "expert", ids["expert"], delay=1)
        allocator.returning_expert_pages  # noqa: B018 the scheduler asks once a pass
        allocator.begin_pass()
        ids = allocator.allocate(EXPERTS, {"expert": 30})

    line(
        "30 expert pages freed late and taken again",
        microseconds(swap_experts, 200),
        "one pass of the adjuster",
    )
    return rows


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}, numpy {np.__version__}; pool of {POOL_BYTES >> 30} GiB")
    rows = measure("dense", dense_layout(), STREAMS) + measure("hybrid", hybrid_layout(), 64)
    width = max(len(what) for what, *_ in rows)
    for what, value, note in rows:
        print(f"{what:{width}}  {value}  {note}")


if __name__ == "__main__":
    main()
