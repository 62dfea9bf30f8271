"""Many steps of one engine, and what memory they leave behind: requests that come, end, are aborted and preempted, experts that move.

    python benchmarks/soak.py                                   # the embedded model, 20,000 steps
    python benchmarks/soak.py --model tests/data/configs/Qwen3-30B-A3B.json --load-format dummy --num-layers 4 \
        --page-pool-bytes 3.25GiB --expert-offload-limit 64 --adjuster-policy watermark --max-num-seqs 256 --max-model-len 1024

Load comes in tides: for some hundred steps requests always wait, then there is one at a time, so that experts go and come
back. Memory is read while nothing runs, `--settle` steps after the start and again at the end. The run fails in one sentence
when something grew that should not, when the ledger is not clean, or when nobody was preempted or no expert moved, since
then it has shown nothing.
"""

import contextlib
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from rimuru_jax import Engine, SamplingParams
from rimuru_jax.cli.console import progress
from rimuru_jax.cli.options import Model, engine_options, with_options

TIDE, HIGH = 400, 250
"""Steps of a tide, and those of them in which requests always wait."""
ABORTED = 0.2
"""Share of requests that are aborted, some while they wait and some in the middle."""
MUST_HAPPEN = (
    "request_success",
    "requests_aborted",
    "num_preemptions",
    "expert_shrinks",
    "expert_expansions",
)
SMALL = {
    "max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 128,
    "page_pool_bytes": 130 << 20, "expert_offload_limit": 3,
}  # fmt: skip
"""For the embedded model: short steps, and less room than two long requests want."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What an idle engine's process holds."""

    host_mib: float
    device_mib: float
    arrays: int
    """Of JAX, on the device."""
    objects: int
    """Of Python, that its garbage collector knows."""

    @classmethod
    def read(cls) -> "Memory":
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # what is freed and kept by the C library did not leak
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        device = (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
        return cls(resident / 2**20, device / 2**20, len(jax.live_arrays()), len(gc.get_objects()))


class Load:
    """Requests of all kinds for one engine, by a fixed seed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(0)
        self._number = 0
        self._aborts: dict[str, int] = {}  # request, step

    def step(self, number: int) -> None:
        engine = self._engine
        wanted = 2 if number % TIDE < HIGH else 1 - len(engine.scheduler.running)
        while len(engine.scheduler.waiting) < wanted:
            self._add(number)
        for name in [name for name, when in self._aborts.items() if when <= number]:
            del self._aborts[name]
            engine.abort(name)
        for output in engine.step():
            if output.finished:
                self._aborts.pop(output.request_id, None)

    def drain(self) -> None:
        """End everything; the pool is then as if nobody had been there."""
        for output in self._engine.step():
            self._aborts.pop(output.request_id, None)
        for name in list(self._engine._states):
            self._engine.abort(name)
        self._aborts.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        for _ in range(3):  # what was given back returns in the passes that follow
            self._engine.step()

    def _add(self, number: int) -> None:
        engine, rng = self._engine, self._rng
        limit = engine.plan.max_model_len
        prompt, output = int(rng.integers(1, limit // 2)), int(rng.integers(1, limit // 2))
        kinds: list[dict[str, Any]] = [
            {}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 2}, {"n": 2, "temperature": 1.0}, {"prompt_logprobs": 1},
        ]  # fmt: skip
        if engine.tokenizer is not None:
            kinds.append({"stop": ["the", "\n\n"]})
        chosen = {"temperature": 0.0, "ignore_eos": True, "max_tokens": output} | kinds[
            rng.integers(len(kinds))
        ]
        self._number += 1
        name = f"soak-{self._number}"
        ids = rng.integers(0, engine.model_config.vocab_size, prompt).tolist()
        engine.add_request(name, ids, SamplingParams(**chosen))
        if rng.random() < ABORTED:
            self._aborts[name] = number + int(rng.integers(0, limit))


def grown(before: Memory, after: Memory, steps: int, most_mib: float) -> list[str]:
    """What grew more than it may, in words."""
    host, device = after.host_mib - before.host_mib, after.device_mib - before.device_mib
    arrays, objects = after.arrays - before.arrays, after.objects - before.objects
    found = [
        (host > most_mib, f"host memory by {host:.1f} MiB, at most {most_mib:g} are allowed (--most-mib)"),
        (device > most_mib, f"device memory by {device:.1f} MiB, at most {most_mib:g} (--most-mib)"),
        (arrays > 16, f"arrays on the device by {arrays}, at most 16"),
        (objects > steps // 2 + 5000, f"Python objects by {objects}, at most {steps // 2 + 5000}"),
    ]
    return [text for wrong, text in found if wrong]


@contextlib.contextmanager
def with_layers(config: Path, layers: int | None) -> Iterator[Path]:
    """The config.json with another number of layers, if one is given."""
    if layers is None:
        yield config
        return
    content = json.loads(config.read_text())
    for part in (content, content.get("text_config") or {}):
        if "num_hidden_layers" in part:
            part["num_hidden_layers"] = layers
        if "layer_types" in part:
            part["layer_types"] = part["layer_types"][:layers]
    with tempfile.TemporaryDirectory() as folder:
        shorter = Path(folder) / "config.json"
        shorter.write_text(json.dumps(content))
        yield shorter


@with_options(engine=engine_options)
def soak(
    model: Model = None,
    steps: Annotated[int, typer.Option(help="Steps in all.")] = 20_000,
    settle: Annotated[int, typer.Option(help="Of these, before memory is read first.")] = 1000,
    num_layers: Annotated[
        int | None, typer.Option(help="Layers of a config.json with dummy weights, in place of its own.")
    ] = None,
    most_mib: Annotated[float, typer.Option(help="What host and device memory may grow by.")] = 32.0,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Serve, and compare memory."""
    if not 0 < settle < steps:
        sys.exit(f"settle is {settle} steps, it must be at least 1 and less than steps ({steps})")
    if num_layers is not None and not (model and model.is_file()):
        sys.exit("num_layers changes a config.json: it goes with --model CONFIG.JSON --load-format dummy")
    if model is None:
        engine = {**engine, **SMALL}
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(progress("loading"))
        path = stack.enter_context(with_layers(model, num_layers)) if model else None
        try:
            served = Engine(path, progress=report, **engine)
        except ValueError as error:
            sys.exit(str(error))
    print(served.plan.describe())
    load, readings, begin = Load(served), list[Memory](), time.perf_counter()
    for number in range(1, steps + 1):
        load.step(number)
        if number in (settle, steps):
            load.drain()
            served.allocator.check_ledger()
            readings.append(Memory.read())
        if number % 1000 == 0:
            print(f"{number} steps, {time.perf_counter() - begin:.0f} s, {Memory.read()}", flush=True)
    counters = served.get_metrics()
    used = {kind: count.used for kind, count in served.allocator.ledger().kinds.items() if kind != "expert"}
    print({name: value for name, value in counters.items() if value})
    print(f"compiled late: {served.loop.late_compilations}; in use at the end: {used}")
    before, after = readings
    for name in Memory.__slots__:
        first, last = getattr(before, name), getattr(after, name)
        print(f"{name:12} {first:12.1f} {last:12.1f} {last - first:+10.1f}")
    wrong = grown(before, after, steps - settle, most_mib)
    if wrong:
        sys.exit(f"after {steps - settle} steps memory has grown: {'; '.join(wrong)}")
    if any(used.values()):
        sys.exit(f"pages are in use although nothing runs: {used}")
    if idle := [name for name in MUST_HAPPEN if not counters[name]]:
        sys.exit(
            f"nothing was shown, since these never happened: {', '.join(idle)}; "
            "lower page_pool_bytes or expert_offload_limit, or raise max_num_seqs"
        )


if __name__ == "__main__":
    typer.run(soak)
