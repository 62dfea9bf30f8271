"""The decoder stack: any sequence of `LayerSpec`s over packed tokens, with everything large read from pages.

Repeating runs of layers become one `lax.scan` each, so that compile time follows the pattern, not the depth. The page
pool is carried through all of them and written in place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Hidden, HostPages, Pool, RouterCounts
from rimuru_jax.host.page_layout import EXPERT
from rimuru_jax.models.attention import attention
from rimuru_jax.models.checkpoint import Dtype, parameter_dtype, parameter_tree
from rimuru_jax.models.config import (
    Attention,
    Dense,
    GatedDeltaNet,
    LayerSpec,
    Mamba2,
    ModelConfig,
    ShortConv,
)
from rimuru_jax.models.context import Batch, ExpertTables, ModelSpec, PageTables, StepContext
from rimuru_jax.models.layers import linear, mlp, norm
from rimuru_jax.models.moe import load_first_experts, moe
from rimuru_jax.models.recurrent import gated_delta_net, mamba2, short_conv
from rimuru_jax.models.registry import tensor_names
from rimuru_jax.models.weights import resident_sources

type StackParams = Mapping[str, Any]
"""{"embedding", "final_norm", "head"?, "segments": one tuple per segment of one stacked `LayerParams` per layer}.

Of `unroll_params`, segments are `Unrolled`."""

IN_FUSIONS = frozenset({"input_norm", "ffn_norm"})
"""Parameters that XLA's own kernels alone read, which take a row of all layers' as it is."""

WIDENED = frozenset({"qkv_bias", "attention_output_bias"})
"""Parameters that products add in float32: without a loop XLA would widen each in a launch of its own."""


class Unrolled(NamedTuple):
    """Parameters of a segment for a program without loops.

    The host looks at whatever a program takes at every call (3 us each), so not all are each layer's own. Other kernels
    want whole arrays, though: what XLA has to cut for them, it gives a GPU's graph anew at every step.
    """

    layers: list[tuple[dict[str, Any], ...]]
    """For each repetition the layers of the pattern."""
    stacked: tuple[dict[str, Any], ...]
    """IN_FUSIONS of each layer of the pattern, stacked as before."""

    def repetitions(self) -> Iterator[tuple[dict[str, Any], ...]]:
        """All parameters, as layers know them."""
        for i, layers in enumerate(self.layers):
            yield tuple(
                own | {name: leaf[i] for name, leaf in shared.items()}
                for own, shared in zip(layers, self.stacked, strict=True)
            )


class Segment(NamedTuple):
    """`repeats` times the same run of layers."""

    pattern: tuple[LayerSpec, ...]
    repeats: int


def segments(layers: Sequence[LayerSpec]) -> tuple[Segment, ...]:
    """Cut the layers into repeating runs such that the fewest layers have to be compiled."""
    best: list[tuple[int, tuple[Segment, ...]]] = [(0, ())]
    for end in range(1, len(layers) + 1):
        options = []
        for start in range(end):
            count = end - start
            for period in range(1, count + 1):
                if count % period == 0 and all(
                    layers[i] == layers[i - period] for i in range(start + period, end)
                ):
                    segment = Segment(tuple(layers[start : start + period]), count // period)
                    options.append((best[start][0] + period, (*best[start][1], segment)))
                    break
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]


def stack_params(
    config: ModelConfig, params: Mapping[str, Any], stack: Callable[[list[Any]], Any] = np.stack
) -> dict[str, Any]:
    """`params` with its list "layers" replaced by "segments": layers of a segment stacked along a new first axis.

    Takes the arrays out of `params` as it goes, so that no second copy of the model is ever held. Other leaves than
    arrays need a `stack` of their own.
    """
    layers = list(params["layers"])
    stacked, first = [], 0
    for pattern, repeats in segments(config.layers):
        period = len(pattern)
        group = []
        for j in range(period):
            members = [layers[first + j + r * period] for r in range(repeats)]
            group.append({name: stack([member.pop(name) for member in members]) for name in list(members[0])})
        stacked.append(tuple(group))
        first += period * repeats
    return {**{k: v for k, v in params.items() if k != "layers"}, "segments": tuple(stacked)}


def unroll_params(params: StackParams, rows: Callable[[Any], Sequence[Any]]) -> StackParams:
    """The same parameters for a program without loops; `rows` takes a stacked leaf apart."""

    def unroll(pattern: tuple[dict[str, Any], ...]) -> Unrolled:
        stacked = tuple({name: layer[name] for name in layer if name in IN_FUSIONS} for layer in pattern)
        parts = [
            {
                name: rows(leaf.astype(jnp.float32) if name in WIDENED else leaf)
                for name, leaf in layer.items()
                if name not in IN_FUSIONS
            }
            for layer in pattern
        ]
        repeats = len(next(iter(pattern[0].values())))
        layers = [tuple({name: x[i] for name, x in layer.items()} for layer in parts) for i in range(repeats)]
        return Unrolled(layers, stacked)

    return {**params, "segments": tuple(map(unroll, params["segments"]))}


class StackOutput(NamedTuple):
    pool: Pool
    hidden: Hidden
    """After the final norm."""
    router_counts: RouterCounts
    """Tokens that chose each expert of each MoE layer."""
    router_experts: Int32[Array, "L T K"]
    router_weights: Float[Array, "L T K"]


MIXERS: dict[type, Callable[..., tuple[Hidden, Pool]]] = {
    Attention: attention,
    GatedDeltaNet: gated_delta_net,
    Mamba2: mamba2,
    ShortConv: short_conv,
}
"""How each kind of mixer runs: (step, mixer, params, x, pool, index) -> (what it adds, pool).

`index` gives, for each kind of state the mixer keeps, the number of the layer among those that keep it. Add an entry to
serve a mixer of your own.
"""

EXTENSIONS: tuple[Mapping[Any, Any], ...] = (MIXERS,)
"""All tables of functions of a step that are open to additions: the package's sources do not say what is in them."""


def forward(
    spec: ModelSpec,
    params: StackParams,
    pool: Pool,
    host_pages: HostPages,
    tables: PageTables,
    experts: ExpertTables,
    batch: Batch,
    *,
    decode: bool,
) -> StackOutput:
    """Run the packed tokens of `batch` through the stack, writing what they leave behind into the pool.

    `decode` promises at most one token per row. With parameters of `unroll_params` equal layers are repeated in the
    program rather than in a loop: what they share is computed once, and a GPU gets the whole step as one graph. Call it
    under `jax.jit` with the pool donated.
    """
    config = spec.config
    step = StepContext.create(spec, batch, tables, experts, host_pages, decode=decode)
    hidden = params["embedding"][batch.token_ids] * config.embedding_scale
    pool = load_first_experts(step, pool)

    def add(hidden: Hidden, part: Hidden) -> Hidden:
        return hidden + part * config.residual_scale if config.residual_scale != 1.0 else hidden + part

    routed = []
    counters = {kind: jnp.int32(0) for kind in (*tables, EXPERT)}
    for (pattern, repeats), layers in zip(segments(config.layers), params["segments"], strict=True):

        def run(carry, xs, pattern=pattern):
            hidden, pool, counters = carry
            decisions = []
            for layer, layer_params in zip(pattern, xs, strict=True):
                if layer.mixer is not None:
                    normed = norm(hidden, layer_params["input_norm"], config)
                    mixed, pool = MIXERS[type(layer.mixer)](
                        step, layer.mixer, layer_params, normed, pool, counters
                    )
                    hidden = add(hidden, mixed)
                    counters = counters | {
                        state.kind: counters[state.kind] + 1 for state in layer.mixer.states()
                    }
                if layer.ffn is None:
                    continue
                normed = norm(hidden, layer_params["ffn_norm"], config)
                if isinstance(layer.ffn, Dense):
                    hidden = add(hidden, mlp(normed, layer_params, "dense"))
                else:
                    mixed, pool, decision = moe(step, layer.ffn, layer_params, normed, pool, counters[EXPERT])
                    hidden = add(hidden, mixed)
                    counters = counters | {EXPERT: counters[EXPERT] + 1}
                    decisions.append(decision)
            stacked_decisions = jax.tree.map(lambda *x: jnp.stack(x), *decisions) if decisions else None
            return (hidden, pool, counters), stacked_decisions

        if isinstance(layers, Unrolled):
            (hidden, pool, counters), decisions = _unrolled(
                run, (hidden, pool, counters), layers.repetitions()
            )
        else:
            (hidden, pool, counters), decisions = lax.scan(
                run, (hidden, pool, counters), layers, length=repeats
            )
        if decisions is not None:
            routed.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), decisions))

    counts, chosen, weights = (jnp.concatenate(parts) for parts in zip(*routed, strict=True))
    hidden = norm(hidden, params["final_norm"], config)
    return StackOutput(pool, hidden, counts, chosen, weights)


def param_shapes(config: ModelConfig, dtype: Dtype) -> dict[str, Any]:
    """Shapes and dtypes of what `stack_params` returns for a model served in `dtype`."""
    sources = resident_sources(config, tensor_names(config.model_type)[0])
    leaves = {
        path: jax.ShapeDtypeStruct(source.shape, parameter_dtype(source, dtype))
        for path, source in sources.items()
    }

    def stack(parts: list[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(parts), *parts[0].shape), parts[0].dtype)

    return stack_params(config, parameter_tree(config, leaves), stack)


def _unrolled(run: Callable[..., Any], carry: Any, xs: Iterable[Any]) -> tuple[Any, Any]:
    """`lax.scan` without a loop. The body is traced and lowered once all the same."""
    body, outputs = jax.jit(run), []
    for x in xs:
        carry, output = body(carry, x)
        outputs.append(output)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


def logits(spec: ModelSpec, params: StackParams, hidden: Float[Array, "n d"]) -> Float[Array, "n V"]:
    """Unnormalised scores of the next token, float32."""
    head = params["embedding"] if spec.config.tie_word_embeddings else params["head"]
    return linear(hidden, head, dtype=jnp.float32) * spec.config.logits_scale
