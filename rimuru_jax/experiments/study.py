"""What the studies share: one case that is run in several ways, and what comes out as a table and as JSON."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rimuru_jax.bench.report import summary
from rimuru_jax.bench.workload import trace_lengths
from rimuru_jax.config import EngineConfig
from rimuru_jax.experiments.cards import CARDS, Card
from rimuru_jax.experiments.results import Arrival, RunResult
from rimuru_jax.experiments.simulator import ROUTING, Simulation, matched_profile, pool_for, popularity
from rimuru_jax.host.hotset import HotsetProfile
from rimuru_jax.models.config import ModelConfig
from rimuru_jax.models.registry import parse_config, read_config

DATA = Path(__file__).parent / "data"
CONVERSATIONS = DATA / "sharegpt_qwen3_lengths.csv"
BURSTS = DATA / "azure_code_2023.csv"

LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}

LISTED_STEPS = 1000
"""Steps whose state is written as JSON, at most."""

type Outcome = RunResult | str
"""Of one run; or why it cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all runs of a study have in common, unless they say otherwise."""

    model: ModelConfig
    card: Card
    device_bytes: int
    """Of the card's memory that may be used."""
    shares: np.ndarray
    """float64[L, E], how often each expert is chosen; see `popularity`."""
    profile: HotsetProfile
    """What residency follows."""
    arrivals: Sequence[Arrival]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine."""

    def simulation(self, *, profile: HotsetProfile | None = None, **arguments: Any) -> Simulation:
        """An engine with further `arguments`: those of `EngineConfig`, and the options of `Simulation`.

        Raises ValueError when it cannot be.
        """
        options = {name: arguments.pop(name) for name in ("fused", "allocator") if name in arguments}
        config = EngineConfig(**{**self.arguments, **arguments})
        pool = pool_for(self.model, config, self.device_bytes)
        config = dataclasses.replace(config, page_pool_bytes=pool)
        return Simulation(self.model, config, self.card, self.shares, profile or self.profile, **options)

    def run(self, arrivals: Sequence[Arrival] | None = None, **arguments: Any) -> Outcome:
        """Serve the case's requests, or others."""
        try:
            return self.simulation(**arguments).run(self.arrivals if arrivals is None else arrivals)
        except ValueError as error:
            return str(error)


def figures(result: RunResult) -> dict[str, float]:
    """What a run is judged by."""
    found = summary(
        result.requests, result.seconds, metrics=["ttft", "tpot", "e2el"], percentiles=[50, 99], goodput={}
    )
    return {
        "most_at_once": result.peak_running,
        "steps": result.steps,
        "seconds": result.seconds,
        "completed": found["completed"],
        "output_throughput": found["output_throughput"],
        "mean_tpot_ms": found.get("mean_tpot_ms", 0.0),
        "p50_ttft_s": found.get("p50_ttft_ms", 0.0) / 1000,
        "p99_ttft_s": found.get("p99_ttft_ms", 0.0) / 1000,
        "mean_e2el_s": found.get("mean_e2el_ms", 0.0) / 1000,
        "host_gib": sum(result.timeline.host_bytes) / 2**30,
        "preemptions": result.counters["num_preemptions"],
        "experts_given_up": result.counters["expert_shrinks"],
        "experts_taken_back": result.counters["expert_expansions"],
    }


def table(outcomes: Mapping[str, Outcome]) -> str:
    """For people, as Markdown."""
    heads = [
        "policy", "most at once", "steps", "seconds", "output tok/s", "mean TPOT ms", "p50 TTFT s", "p99 TTFT s",
        "preemptions", "experts given up / taken back",
    ]  # fmt: skip
    rows = [heads, ["---"] * len(heads)]
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            rows.append([name, "does not fit", *[""] * (len(heads) - 2)])
            continue
        f = figures(outcome)
        rows.append(
            [
                name,
                f"{f['most_at_once']:.0f}",
                f"{f['steps']:.0f}",
                f"{f['seconds']:.0f}",
                f"{f['output_throughput']:.1f}",
                f"{f['mean_tpot_ms']:.1f}",
                f"{f['p50_ttft_s']:.1f}",
                f"{f['p99_ttft_s']:.1f}",
                f"{f['preemptions']:.0f}",
                f"{f['experts_given_up']:.0f} / {f['experts_taken_back']:.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def conversations(count: int) -> list[Arrival]:
    """Of ShareGPT, all there at once."""
    return [Arrival(0.0, r.prompt_tokens, r.output_tokens) for r in trace_lengths(CONVERSATIONS, count)]


def bursts(count: int, time_scale: float) -> list[Arrival]:
    """Of Azure's trace of code completion, `time_scale` times slower than they came.

    Raises ValueError when that is not above 0.
    """
    if not time_scale > 0:
        raise ValueError(f"--time-scale is {time_scale:g}, it must be above 0")
    return [
        Arrival(time_scale * (r.arrival or 0.0), r.prompt_tokens, r.output_tokens)
        for r in trace_lengths(BURSTS, count)
    ]


def config_path(name: str) -> Path:
    """Of one of the configs in `data/` by its name, or the path that `name` is."""
    ours = DATA / "configs" / f"{name}.json"
    return ours if ours.is_file() else Path(name)


def find_model(name: str) -> ModelConfig:
    """By the name of one of the configs in `data/`, or by path."""
    return parse_config(read_config(config_path(name)))


def arguments(
    description: str | None,
    *,
    model: str,
    requests: int,
    card: str = "h200",
    device_gib: float | None = 32.0,
    routing: str = "typical",
) -> argparse.ArgumentParser:
    """The parser of a study's command, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(sorted(path.stem for path in (DATA / "configs").glob("*.json")))
    parser.add_argument(
        "model", nargs="?", default=model, help=f"{names}, a model folder or a config.json; default: {model}"
    )
    parser.add_argument("--card", choices=CARDS, default=card)
    parser.add_argument(
        "--device-gib", type=float, default=device_gib, help="of the card's memory; 0: all of it"
    )
    parser.add_argument("--routing", choices=ROUTING, default=routing)
    parser.add_argument("--requests", type=int, default=requests, help="the first so many of the trace")
    parser.add_argument("--output", type=Path, help="folder for JSON and pictures")
    return parser


def case_of(args: argparse.Namespace, arrivals: Sequence[Arrival], max_model_len: int) -> Case:
    """The case that a command asks for; `max_model_len` is at most the model's own."""
    model, card = find_model(args.model), CARDS[args.card]
    shares = popularity(model, ROUTING[args.routing])
    return Case(
        model=model,
        card=card,
        device_bytes=int(args.device_gib * 2**30) if args.device_gib else card.memory_bytes,
        shares=shares,
        profile=matched_profile(model, shares),
        arrivals=arrivals,
        arguments=LIMITS | {"max_model_len": min(max_model_len, model.max_position_embeddings)},
    )


def title(args: argparse.Namespace, case: Case, what: str) -> str:
    """Of a picture: what was simulated, and on what."""
    gib = case.device_bytes / 2**30
    return f"{what}\n{short_name(args.model)}, simulated: {case.card.name} with {gib:g} GiB, {args.routing} routing"


def short_name(model: str) -> str:
    """Of a model given by name or path."""
    return Path(model).name.removesuffix(".json")


def save(args: argparse.Namespace, case: Case, name: str, content: Mapping[str, Any]) -> None:
    """Write `name`.json into the folder for output: the conditions, and whatever was found."""
    conditions = {
        "simulated": True,
        "model": short_name(args.model),
        "card": dataclasses.asdict(case.card),
        "device_memory": case.device_bytes,
        "routing": args.routing,
        "requests": len(case.arrivals),
        "arguments": dict(case.arguments),
    }
    (args.output / f"{name}.json").write_text(json.dumps(conditions | dict(content)) + "\n")


def runs_to_json(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Figures, counters and timeline of each run, or why there was none."""
    return {
        name: outcome if isinstance(outcome, str) else figures(outcome) | outcome.to_json(LISTED_STEPS)
        for name, outcome in outcomes.items()
    }


def results_only(outcomes: Mapping[str, Outcome]) -> dict[str, RunResult]:
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, RunResult)}


def command(parser: argparse.ArgumentParser, study: Callable[[argparse.Namespace], None]) -> None:
    """Run a study, with errors in one sentence."""
    args = parser.parse_args()
    try:
        if args.requests < 1:
            raise ValueError(f"--requests is {args.requests}, it must be at least 1")
        if args.output is not None:
            args.output.mkdir(parents=True, exist_ok=True)
        study(args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.error(str(error))
