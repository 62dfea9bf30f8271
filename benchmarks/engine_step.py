"""What one step of the engine takes the host: everything but the device, which answers at once.

    python benchmarks/engine_step.py [--num-seqs 256] [--detokenize] [--outputs]

A model of 48 layers and 128 experts whose weights are tiny, with `--detokenize` the tokenizer of the embedded model. In place of forward pass and sampler stand
tokens and router counts made beforehand; all else is the engine's own: planning, page tables, expert tables, packing, sampler inputs, delivery, text,
and the outputs of all requests where `--outputs` asks for them after every step, as a server does. A closed loop of requests of random lengths keeps
the batch full.
"""

import argparse
import gc
import os
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rimuru_jax import Engine, SamplingParams, serving_loop
from rimuru_jax.models.config import Moe
from rimuru_jax.models.default_model import default_model_path
from rimuru_jax.models.hybrid import hybrid, random_model
from rimuru_jax.sampling import SampledTokens
from rimuru_jax.serving_loop import StepOutputs

LAYERS, EXPERTS, CHOSEN = 48, 128, 8
VOCAB = 49152
PREPARED = 64
"""Steps whose outcomes are made beforehand, and come again and again."""


def build(num_seqs: int, pool_mib: int, *, tokenizer: bool) -> Engine:
    """An engine that needs no device."""
    model = hybrid(
        ("attn",) * LAYERS,
        hidden_size=64,
        vocab_size=VOCAB,
        moe=Moe(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, intermediate_size=96, normalize=True),
        tie_word_embeddings=True,
    )
    engine = Engine(
        random_model(model, "bfloat16"),
        tokenizer=str(default_model_path()) if tokenizer else None,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        page_pool_bytes=pool_mib << 20,
        compile_ahead=False,
    )
    rng = np.random.default_rng(0)
    popular = rng.permuted(np.tile(np.arange(1, EXPERTS + 1) ** -0.3, (LAYERS, 1)), axis=1)
    chances = popular / popular.sum(1, keepdims=True) * CHOSEN * num_seqs
    counts = [jnp.asarray(rng.poisson(chances), jnp.int32) for _ in range(PREPARED)]
    tokens = [jnp.asarray(rng.integers(0, VOCAB, 4 * num_seqs), jnp.int32) for _ in range(PREPARED)]
    finite, nothing = jnp.ones(4 * num_seqs, bool), jnp.zeros(0)
    number = 0

    def run(packed: Any, *, loads_ahead: bool = True) -> StepOutputs:
        nonlocal number
        number += 1
        _, bucket = packed
        logits = np.broadcast_to(np.float32(0), (bucket.rows, VOCAB))
        return StepOutputs(
            logits=logits,  # type: ignore[arg-type]
            hidden=nothing,
            router_counts=counts[number % PREPARED],
            slots=nothing,
            greedy=SampledTokens(token_ids=tokens[number % PREPARED], finite=finite, logprobs=None),
        )

    def sample(outputs: StepOutputs, inputs: Any, features: Any) -> SampledTokens:
        del outputs, inputs, features
        return SampledTokens(token_ids=tokens[number % PREPARED], finite=finite, logprobs=None)

    engine.loop.run, engine.loop.sample = run, sample  # type: ignore[method-assign]
    # On a CPU these compute at once; on a GPU they are given to it.
    serving_loop._scatter = lambda table, where, pages: table  # type: ignore[assignment]
    engine.loop.copy_experts = lambda copies: None  # type: ignore[method-assign]
    return engine


def measure(engine: Engine, args: argparse.Namespace) -> list[tuple[float, float, bool]]:
    """For each step wall time and CPU time in seconds, and whether nobody came or left."""
    rng = np.random.default_rng(1)
    rows, arrivals = [], 0
    counters = engine.metrics.counters
    names = ("request_success", "prompt_tokens")
    gc.collect()
    gc.freeze()
    for number in range(-args.warmup, args.steps):
        while len(engine.scheduler.waiting) < 4:
            arrivals += 1
            prompt, output = int(rng.integers(16, 1024)), int(rng.integers(64, 1024))
            params = SamplingParams(
                temperature=0.7, max_tokens=output, ignore_eos=True, detokenize=args.detokenize
            )
            engine.add_request(str(arrivals), rng.integers(0, VOCAB, prompt).tolist(), params)
        before = [counters[name] for name in names]
        wall, cpu = time.perf_counter(), time.thread_time()
        if args.outputs:
            engine.step()
        else:
            engine._advance()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        if number >= 0:
            rows.append((wall, cpu, before == [counters[name] for name in names]))
    return rows


def describe(name: str, rows: list[tuple[float, float, bool]]) -> str:
    cells = [f"{name:26} {len(rows):6}"]
    for column in (0, 1):
        times = [row[column] for row in rows]
        values = (np.mean(times), *np.percentile(times, [10, 50, 99]))
        cells.append(" / ".join(f"{value * 1e3:.2f}" for value in values))
    return "   ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=600, help="steps before the clock starts")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--pool-mib", type=int, default=760)
    parser.add_argument("--detokenize", action="store_true", help="make text of the tokens")
    parser.add_argument(
        "--outputs", action="store_true", help="make the output of every request in every step"
    )
    parser.add_argument("--profile", action="store_true", help="where the time goes, in place of the times")
    args = parser.parse_args()
    engine = build(args.num_seqs, args.pool_mib, tokenizer=args.detokenize)
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, jax {jax.__version__} on "
        f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}; "
        f"detokenize {args.detokenize}, outputs {args.outputs}"
    )
    if args.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.runcall(measure, engine, args)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    rows = measure(engine, args)
    metrics = engine.get_metrics()
    print(
        f"{metrics['num_requests_running']} running, {metrics['resident_experts']} of {LAYERS * EXPERTS} experts resident"
    )
    print(f"{'ms: mean / 10 % / median / 99 %':26}  steps   wall   CPU")
    print(describe("all steps", rows))
    print(describe("decodes alone", [row for row in rows if row[2]]))


if __name__ == "__main__":
    main()
