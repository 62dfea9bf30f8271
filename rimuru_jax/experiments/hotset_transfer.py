"""What an offline profile of routing is worth on the requests it was recorded on, and on others.

    python -m rimuru_jax.experiments.hotset_transfer --output DIR

Routing is that of OLMoE-1B-7B, counted over six kinds of text; the profile that decides which experts stay comes from
one of them, or from none, and is followed as it is (`expert_cache_policy="hotset"`) or corrected by what is chosen
("online"). Counts are published for layers 0, 7 and 15; the layers between are taken to route like the
nearest of these. Tokens of the simulation choose experts independently of each other, so that nothing is said here of
the locality within a request.
"""

import argparse
import csv
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rimuru_jax.controller import fingerprint
from rimuru_jax.experiments import study
from rimuru_jax.experiments.pictures import grids
from rimuru_jax.experiments.results import Arrival, RunResult
from rimuru_jax.experiments.simulator import matched_profile
from rimuru_jax.experiments.study import Case
from rimuru_jax.host.hotset import HotsetProfile
from rimuru_jax.models.config import ModelConfig

COUNTS = study.DATA / "olmoe_expert_counts.csv"
NO_PROFILE = "none"
LOADS = {"one stream": [Arrival(0.0, 512, 512)], "64 streams": [Arrival(0.0, 256, 128)] * 64}
CACHE_POLICIES = ("hotset", "online")
ENGINE = {"memory_policy": "elastic", "adjuster_policy": "throughput"}


def routing_by_domain(model: ModelConfig) -> dict[str, np.ndarray]:
    """float64[L, E] by domain: how often each expert of each layer is chosen; rows sum to 1.

    Raises ValueError for a model with other numbers of experts than the counts are of.
    """
    counts: dict[str, dict[int, np.ndarray]] = {}
    with COUNTS.open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = np.array(row["counts"].split(), np.float64)
            counts.setdefault(row["domain"], {})[int(row["layer"])] = numbers / numbers.sum()
    routing = {}
    for domain, by_layer in counts.items():
        counted = np.array(sorted(by_layer))
        nearest = [counted[np.abs(counted - layer).argmin()] for layer in range(len(model.moe_layers))]
        routing[domain] = np.stack([by_layer[layer] for layer in nearest])
    experts = len(next(iter(next(iter(counts.values())).values())))
    if model.moe.num_experts != experts:
        raise ValueError(
            f"the model has {model.moe.num_experts} experts in a layer, the counts are of OLMoE's {experts}"
        )
    return routing


def bytes_and_time(result: RunResult) -> tuple[float, float]:
    """MiB fetched from the host per generated token, and ms per token of a stream, prompts aside."""
    tokens = sum(request.output_tokens - 1 for request in result.requests)
    started = max(request.start + request.ttft for request in result.requests)
    timeline = result.timeline
    fetched = sum(
        size for end, size in zip(timeline.seconds, timeline.host_bytes, strict=True) if end > started
    )
    times = [request.tpot for request in result.requests if request.output_tokens > 1]
    return fetched / max(1, tokens) / 2**20, 1000 * float(np.mean(times or [0.0]))


def transfer(args: argparse.Namespace) -> None:
    case = study.case_of(args, [], max_model_len=4096)
    routing = routing_by_domain(case.model)
    domains = list(routing)
    uniform = HotsetProfile.uniform(fingerprint(case.model))
    profiles = {domain: matched_profile(case.model, shares) for domain, shares in routing.items()}
    profiles[NO_PROFILE] = uniform
    times: dict[str, np.ndarray] = {}
    fetched: dict[str, np.ndarray] = {}
    for load, policy in itertools.product(LOADS, CACHE_POLICIES):
        found = np.array(
            [
                [
                    _run(case, routing[domain], profile, LOADS[load][: args.requests], policy)
                    for domain in domains
                ]
                for profile in profiles.values()
            ]
        )
        fetched[f"{load}, {policy}: MiB fetched per token"] = found[:, :, 0]
        times[f"{load}, {policy}: ms per token"] = found[:, :, 1]
    print(table(fetched | times, domains))
    if args.output is None:
        return
    title = (
        "Profiles of routing, of the same text (diagonal) and not\n"
        f"{args.model}, simulated: {case.card.name} with {args.device_gib:g} GiB"
    )
    grids(times, list(profiles), domains, args.output / "hotset_transfer.png", title)
    content: dict[str, Any] = {"profiles": list(profiles), "requests_from": domains}
    content["figures"] = {name: values.tolist() for name, values in (fetched | times).items()}
    study.save(args, case, "hotset_transfer", content)


def _run(
    case: Case, shares: np.ndarray, profile: HotsetProfile, arrivals: Sequence[Arrival], policy: str
) -> tuple[float, float]:
    outcome = dataclasses.replace(case, shares=shares).run(
        arrivals, profile=profile, expert_cache_policy=policy, **ENGINE
    )
    if isinstance(outcome, str):
        raise ValueError(outcome)
    return bytes_and_time(outcome)


def table(values: dict[str, np.ndarray], domains: Sequence[str]) -> str:
    """Means over domains: the profile of the requests' own domain, another's, and none."""
    rows = [
        "| | profile of the same text | of another: mean | worst | none |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, grid in values.items():
        square, none = grid[: len(domains)], grid[len(domains)]
        others = square[~np.eye(len(domains), dtype=bool)]
        rows.append(
            f"| {name} | {np.diag(square).mean():.2f} | {others.mean():.2f} | {others.max():.2f} | {none.mean():.2f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = study.arguments(__doc__, model="OLMoE-1B-7B-0924", requests=64, device_gib=8.0)
    study.command(parser, transfer)


if __name__ == "__main__":
    main()
