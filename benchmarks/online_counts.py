"""How many of the experts that tokens choose are away, under each policy of residency: a replay on the host, no device.

The engine's own cache and policies (`host/expert_cache.py`, `host/residency.py`) see the router counts of one step after
another, a step late as in the engine, with as many experts resident as is asked for. What chooses:

* a synthetic router: experts of each layer have logits -s ln(rank) in an order of their own, each request adds normal
  tilts of width t, each token Gumbel noise; 48 layers, 8 of 128 experts. Requests come and go, prompts in chunks.
* published counts of OLMoE (CSV: model, domain, layer, expert, count): tokens choose by the domain's shares; 8 of 64.
* recorded routes of one request each (gzipped CSV: phase, step, layer, experts): the prompt, then each decode.

Run: `python benchmarks/online_counts.py --records FOLDER` (of the last two; without it, the first alone).
"""

import argparse
import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rimuru_jax.host.allocator import PageAllocator
from rimuru_jax.host.expert_cache import ExpertCache
from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint
from rimuru_jax.host.page_layout import PageKind, PageLayout
from rimuru_jax.host.residency import residency_policy

MATRICES = 3
EXPANSION = 5
"""Experts that the adjuster takes back in one pass, at most."""
BURST_STEPS = 64
"""Steps from one burst to the next, which takes a tenth of the experts for some steps."""
SETTLED = 256
"""Steps after which a policy has seen enough."""
ROUTERS = {"uniform": (0.0, 0.0), "early layer": (0.5, 0.75), "typical": (0.8, 2.0), "steep": (1.2, 1.0)}
"""Skew s of all requests and tilt t of each; as measured on real models."""


class Step(NamedTuple):
    counts: np.ndarray
    """int32[L, E], tokens that chose each expert."""
    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    steps: list[Step]
    k: int
    profiles: dict[str, np.ndarray]
    """Counts `[L, E]` that residency starts from."""


class Replay(NamedTuple):
    reads: list[float]
    """Experts read from the host per expert chosen: while a policy learns, and once it has."""
    copies: float
    """Experts copied into the pool per expert chosen, swaps and growth."""


def route(rng: np.random.Generator, logits: np.ndarray, k: int) -> np.ndarray:
    """Counts `int32[L, E]` of tokens with logits `[n, L, E]` that take `k` experts of each layer."""
    keys = logits + rng.gumbel(size=logits.shape).astype(np.float32)
    chosen = np.argpartition(-keys, k - 1, axis=-1)[..., :k]
    counts = np.zeros(logits.shape[1:], np.int32)
    np.add.at(counts, (np.arange(counts.shape[0])[None, :, None], chosen), 1)
    return counts


def serve(
    logits: np.ndarray, tilt: float, k: int, streams: int, steps: int, seed: int, chunk: int = 2048
) -> list[Step]:
    """Steps of `streams` requests at once, of 200 tokens of prompt and 300 of answer on average."""
    rng = np.random.default_rng(seed)
    running: list[tuple[np.ndarray, list[int]]] = []  # logits, answer tokens to come
    done = []
    for _ in range(steps):
        counts, tokens = np.zeros(logits.shape, np.int32), len(running)
        if running:
            counts += route(rng, np.stack([own for own, _ in running]), k)
        for _, left in running:
            left[0] -= 1
        running = [request for request in running if request[1][0] > 0]
        while len(running) < streams and tokens < chunk:
            own = logits + tilt * rng.standard_normal(logits.shape, np.float32)
            prompt = min(int(rng.geometric(1 / 200)), chunk - tokens)
            for first in range(0, prompt, 64):
                counts += route(rng, np.broadcast_to(own, (min(64, prompt - first), *own.shape)), k)
            tokens += prompt
            running.append((own, [int(rng.geometric(1 / 300))]))
        done.append(Step(counts, tokens, len(running)))
    return done


def synthetic(name: str, streams: int, steps: int) -> Workload:
    layers, experts, k = 48, 128, 8
    skew, tilt = ROUTERS[name]
    rng = np.random.default_rng(0)
    ranks = np.log(np.arange(1, experts + 1, dtype=np.float32))
    here, elsewhere = (-skew * np.stack([rng.permutation(ranks) for _ in range(layers)]) for _ in range(2))
    profiles = {
        "matched": sum(step.counts for step in serve(here, tilt, k, 32, 100, seed=1)),
        "mismatched": sum(step.counts for step in serve(elsewhere, tilt, k, 32, 100, seed=2)),
        "uniform": np.zeros((layers, experts), int),
    }
    return Workload(f"{name}, {streams}", serve(here, tilt, k, streams, steps, seed=3), k, profiles)  # type: ignore[arg-type]


def published(path: Path, domain: str, other: str, streams: int, steps: int) -> Workload:
    """Layers 0, 7 and 15 of OLMoE, whose counts are known."""
    tables: dict[str, np.ndarray] = {}
    for row in csv.DictReader(path.open()):
        if row["model"] == "olmoe-1b-7b-0924":
            table = tables.setdefault(row["domain"], np.zeros((16, 64)))
            table[int(row["layer"]), int(row["expert"])] = int(row["count"])
    counts = {name: table[[0, 7, 15]] for name, table in tables.items()}
    logits = np.log(np.maximum(counts[domain], 0.5)).astype(np.float32)
    profiles = {
        "matched": counts[domain],
        "mismatched": counts[other],
        "uniform": np.zeros(logits.shape, int),
    }
    return Workload(
        f"OLMoE {domain} (profile {other}), {streams}", serve(logits, 0.0, 8, streams, steps, seed=3), 8, profiles
    )  # fmt: skip


def recorded(path: Path, name: str) -> Workload:
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    layers = {number: index for index, number in enumerate(sorted({int(row["layer"]) for row in rows}))}
    phases: dict[str, dict[int, np.ndarray]] = {"prefill": {}, "decode": {}}
    for row in rows:
        counts = phases[row["phase"]].setdefault(int(row["step"]), np.zeros((len(layers), 128), np.int32))
        counts[layers[int(row["layer"])], [int(expert) for expert in row["experts"].split()]] += 1
    prompt, decodes = ([counts for _, counts in sorted(phases[phase].items())] for phase in phases)
    steps = [Step(np.sum(prompt, axis=0), len(prompt), 1), *(Step(counts, 1, 1) for counts in decodes)]
    k = int(decodes[0][0].sum())
    return Workload(f"{name}, recorded", steps, k, {"uniform": np.zeros(steps[0].counts.shape, int)})


def best_static(workload: Workload, share: float) -> float:
    """Reads per expert chosen with the residents that decodes chose in most steps, as many in each layer."""
    steps = [step.counts > 0 for step in workload.steps if step.tokens == step.rows]
    chosen = np.sort(np.sum(steps, axis=0), axis=1)[:, ::-1]
    return float(1 - chosen[:, : round(share * chosen.shape[1])].sum() / chosen.sum())


def replay(workload: Workload, profile: np.ndarray, policy: str, share: float, bursts: bool) -> Replay:
    """Reads of decode steps with `share` of all experts resident."""
    layers, experts = profile.shape
    resident = round(layers * experts * share)
    kind = PageKind(name="expert", level=2, page_bytes=64, row_bytes=16, layers=layers)
    allocator = PageAllocator(PageLayout.plan([kind]), resident * MATRICES + 1)
    model = ModelFingerprint(
        model_type="replay", num_layers=layers, num_experts=experts, experts_per_token=workload.k
    )
    cache = ExpertCache(
        num_layers=layers,
        num_experts=experts,
        matrices=MATRICES,
        allocator=allocator,
        policy=residency_policy(policy, HotsetProfile.uniform(model).record(profile, 1)),
        expert_offload_limit=experts,
        buffer_experts=0,
    )
    cache.fill(0)
    read, chosen, copies = [0, 0], [0, 0], 0
    for number, step in enumerate(workload.steps):
        allocator.begin_pass()
        cache.begin_pass()
        if bursts and number % BURST_STEPS == BURST_STEPS - 1:
            cache.shrink(resident // 10)
        elif bursts:
            copies += len(cache.expand(min(EXPANSION, allocator.free_expert_pages // MATRICES)))
        copies += len(cache.swap())
        if number:
            cache.observe(*workload.steps[number - 1])
        if step.tokens == step.rows:
            settled = int(number >= min(SETTLED, len(workload.steps) // 2))
            here = step.counts > 0
            read[settled] += int(np.count_nonzero(here & ~cache.resident))
            chosen[settled] += int(np.count_nonzero(here))
    return Replay([part / max(1, of) for part, of in zip(read, chosen, strict=True)], copies / sum(chosen))


def table(workloads: list[Workload], shares: list[float], bursts: bool) -> Iterator[str]:
    policies = ["hotset", "lru", "online"] if bursts else ["hotset", "online"]
    yield "| workload, streams | resident | best static | profile | " + " | ".join(policies) + " |"
    yield "| --- | ---: | ---: | --- |" + " ---: |" * len(policies)
    for workload in workloads:
        for share in shares:
            for name, profile in workload.profiles.items():
                cells = []
                for policy in policies:
                    result = replay(workload, profile, policy, share, bursts)
                    text = " → ".join(f"{part:.3f}" for part in result.reads)
                    cells.append(f"{text} + {result.copies:.3f}" if result.copies else text)
                first = [workload.name, f"{share:.0%}", f"{best_static(workload, share):.3f}", name]
                yield "| " + " | ".join([*first, *cells]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, help="folder of expert_counts.csv and route_trace_*.csv.gz")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    runs = [("typical", 1), ("typical", 16), ("typical", 64), ("early layer", 1), ("steep", 16)]
    workloads = [synthetic(name, streams, args.steps) for name, streams in runs]
    even = [synthetic("uniform", streams, args.steps) for streams in (1, 16)]
    if args.records:
        counts = args.records / "expert_counts.csv"
        workloads += [
            published(counts, "github", "c4", 1, args.steps),
            published(counts, "wikipedia", "github", 16, args.steps),
        ]
        workloads += [
            recorded(args.records / f"route_trace_{file}.csv.gz", name)
            for file, name in (
                ("qwen3_30b_a3b", "Qwen3-30B-A3B"),
                ("gemma4_26b_a4b", "gemma-4-26B-A4B"),
                ("gpt_oss_120b", "gpt-oss-120b"),
            )
        ]
    for workload in even:
        workload.profiles.pop("mismatched")
    print("\nAs many experts resident throughout (`lru` is `hotset` then):\n")
    print(*table(workloads + even, [0.5, 0.25], bursts=False), sep="\n", flush=True)
    print(f"\nWith a tenth of them given up every {BURST_STEPS} steps, and taken back {EXPANSION} a step:\n")
    print(*table(workloads, [0.5], bursts=True), sep="\n", flush=True)


if __name__ == "__main__":
    main()
