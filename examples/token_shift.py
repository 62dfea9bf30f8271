"""A new kind of layer, with a state of its own in the page pool: the token shift of RWKV.

A token-shift layer sees each token and the one before it, so that a sequence needs one vector of memory per layer. All
it takes is below: what the layer keeps (`states`), where its weights come from (`sources`), an operator on pages
(`token_shift`) and the layer itself (`run`). Allocation, admission, chunked prefill, preemption, expert offload and
batching come with it. `docs/adding-a-kind.md` goes through it step by step.

    python examples/token_shift.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from rimuru_jax import Engine, SamplingParams
from rimuru_jax.array_types import Hidden, Pool
from rimuru_jax.models import stack
from rimuru_jax.models.config import Moe, SequenceState
from rimuru_jax.models.context import LayerParams, StepContext
from rimuru_jax.models.hybrid import hybrid, random_model
from rimuru_jax.models.layers import linear
from rimuru_jax.models.weights import TensorSource
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.ragged import write_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShift:
    """Two projections of a mix of each token with the one before it. Source: Peng et al. 2023 (arXiv 2305.13048)."""

    channels: int

    def states(self) -> tuple[SequenceState, ...]:
        """The newest token's vector: one page `[1, channels]`, cut from a larger one (level 3)."""
        return (SequenceState(kind="shift", level=3, page_shape=(1, self.channels)),)

    def sources(self, prefix: str, hidden: int) -> dict[str, TensorSource]:
        return {
            "shift_mix": TensorSource((f"{prefix}shift.mix",), ((hidden,),)),
            "shift_in": TensorSource((f"{prefix}shift.in_proj.weight",), ((2 * hidden, hidden),)),
            "shift_out": TensorSource((f"{prefix}shift.out_proj.weight",), ((hidden, 2 * hidden),)),
        }


def token_shift(
    x: Float[Array, "T c"],
    pool: Pool,
    view: MemoryView,
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
) -> tuple[Float[Array, "T c"], Pool]:
    """For each token the one before it, zeros before the first of a sequence; the last one of each row is kept.

    `rimuru_jax.pallas.ragged` says what the metadata means. A page is read once and written once.
    """
    start, end = query_start[:-1], query_start[1:]
    busy = end > start
    pages = jnp.where(busy, pages, 0)
    # Select, do not multiply: the page of a new sequence holds whatever was there before, NaN included.
    states = jnp.where(has_state[:, None], view.read(pool, pages)[:, 0], jnp.zeros((), view.dtype))
    first = jnp.where(busy, start, x.shape[0])  # past the end for idle rows, which are dropped
    previous = jnp.roll(x, 1, axis=0).at[first].set(states.astype(x.dtype), mode="drop")
    return previous, write_pages(pool, view, pages, x[jnp.maximum(end - 1, 0)][:, None])


def run(
    step: StepContext, layer: TokenShift, params: LayerParams, x: Hidden, pool: Pool, index: dict[str, Array]
) -> tuple[Hidden, Pool]:
    """The layer: packed tokens in, what it adds to them out."""
    view, pages = step.state_pages("shift", index["shift"])
    previous, pool = token_shift(x, pool, view, pages, step.batch.query_start, step.has_state)
    mix = jax.nn.sigmoid(params["shift_mix"])[None]
    inner = linear(x * mix + previous * (1 - mix), params["shift_in"])
    return linear(jnp.square(jax.nn.relu(inner)), params["shift_out"]), pool


stack.MIXERS[TokenShift] = run


def build(pattern: Sequence[str] = ("shift", "gdn", "shift", "attn") * 2, **config: Any) -> Engine:
    """An engine for a small model of shift, delta-net and attention layers with random weights."""
    model = hybrid(
        pattern,
        hidden_size=128,
        vocab_size=512,
        moe=Moe(num_experts=16, num_experts_per_tok=4, intermediate_size=64, normalize=True),
        mixers={"shift": TokenShift(channels=128)},
    )
    settings = {"dtype": "float32", "page_pool_bytes": 8 << 20, "max_num_seqs": 8, "max_model_len": 512}
    return Engine(random_model(model, "float32"), **(settings | config))


def main() -> None:
    engine = build()
    print("\n".join(engine.plan.layout.describe().splitlines()))
    prompts = [[1, 2, 3], list(range(100)), [7] * 20]
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    for output in engine.generate(prompts, greedy, use_tqdm=False):
        print(f"{len(output.prompt_token_ids):4} tokens -> {output.outputs[0].token_ids}")


if __name__ == "__main__":
    main()
