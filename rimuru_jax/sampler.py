"""`sample` as a fixed set of programs for each number of rows, so that all of them can be compiled before serving.

    logits -> bias, once for each piece -> mask -> no-counts, count for each piece, penalties -> greedy | draw | filter

What clients ask for decides which run; none has a shape that they could change. Only more log-probabilities than
LOGPROB_WIDTHS, which the server does not give, have programs of their own.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rimuru_jax.programs import Programs
from rimuru_jax.sampling import (
    BIAS_PIECE,
    HISTORY_PIECE,
    LOGPROB_WIDTHS,
    Biases,
    History,
    SampledTokens,
    SamplingFeatures,
    SamplingInputs,
    add_biases,
    apply_mask,
    build_sampling_inputs,
    choose,
    compute_logprobs,
    count_tokens,
    logprob_width,
    mask_words,
    no_counts,
    penalise,
)

_add_biases, _apply_mask = jax.jit(add_biases), jax.jit(apply_mask)
_penalise = jax.jit(penalise, donate_argnames="logits")
_no_counts = jax.jit(no_counts, static_argnames=("rows", "vocab_size"))
_count_tokens = jax.jit(count_tokens, donate_argnames="counts")
_choose = jax.jit(choose, static_argnames=("random", "filters"))
_compute_logprobs = jax.jit(compute_logprobs, static_argnames="num_logprobs")


class Sampler:
    """`sample` for the logits of one vocabulary.

    Args:
        programs: where its programs are kept.
    """

    def __init__(self, programs: Programs, vocab_size: int) -> None:
        self._programs = programs
        self._vocab_size = vocab_size

    def __call__(
        self, logits: Float[Array, "S V"], inputs: SamplingInputs, features: SamplingFeatures
    ) -> SampledTokens:
        """What `sample` would return for float32 logits."""
        run = functools.partial(self._run, logits.shape[0])
        edited = logits
        if features.biases:
            for biases in _pieces(inputs.biases, BIAS_PIECE):
                edited = run("bias", _add_biases, edited, biases)
        if features.token_mask:
            edited = run("mask", _apply_mask, edited, inputs.token_mask)
        if features.penalties:
            if edited is logits:  # penalties are applied in place
                edited = run("bias", _add_biases, edited, _no_biases(logits.shape[0]))
            counts = run("no-counts", _no_counts, rows=logits.shape[0], vocab_size=self._vocab_size)
            for history in _pieces(inputs.history, HISTORY_PIECE):
                counts = run("count", _count_tokens, counts, history)
            edited = run("penalties", _penalise, edited, counts, inputs.penalties)
        name = "filter" if features.filters else "draw" if features.random else "greedy"
        flags = {"random": features.random, "filters": features.filters}
        token_ids, finite = run(name, _choose, logits, edited, inputs.draws, **flags)
        logprobs = None
        if (width := features.num_logprobs) is not None:
            logprobs = run(f"logprobs-{width}", _compute_logprobs, logits, token_ids, num_logprobs=width)
        return SampledTokens(token_ids=token_ids, finite=finite, logprobs=logprobs)

    def _run(self, num_rows: int, name: str, function: Any, /, *args: Any, **static: Any) -> Any:
        return self._programs(_name(name, num_rows), function, *args, **static)

    def tasks(self, rows: int) -> Iterator[Callable[[], Any]]:
        """Calls that compile one program each of those for so many rows."""
        for name, function, args, static in self._all(rows):
            yield functools.partial(self._programs.compile, _name(name, rows), function, *args, **static)

    def _all(self, rows: int) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
        # Bound to the device as logits of a step are: what comes out is too, which `jit` would tell apart.
        on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        logits = jax.ShapeDtypeStruct((rows, self._vocab_size), jnp.float32, sharding=on_device)
        tokens = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=on_device)
        inputs, _ = build_sampling_inputs([], rows, self._vocab_size)
        sizes = {"rows": rows, "vocab_size": self._vocab_size}
        counts = jax.eval_shape(functools.partial(no_counts, **sizes))
        for name, random, filters in (
            ("greedy", False, False),
            ("draw", True, False),
            ("filter", True, True),
        ):
            yield name, _choose, (logits, logits, inputs.draws), {"random": random, "filters": filters}
        yield "bias", _add_biases, (logits, _no_biases(rows)), {}
        yield "mask", _apply_mask, (logits, np.zeros((rows, mask_words(self._vocab_size)), np.int32)), {}
        index = np.zeros(HISTORY_PIECE, np.int32)
        yield "no-counts", _no_counts, (), sizes
        yield "count", _count_tokens, (counts, History(rows=index, token_ids=index)), {}
        yield "penalties", _penalise, (logits, counts, inputs.penalties), {}
        for width in sorted({logprob_width(width, self._vocab_size) for width in LOGPROB_WIDTHS}):
            yield f"logprobs-{width}", _compute_logprobs, (logits, tokens), {"num_logprobs": width}


def workspace_bytes(rows: int, vocab_size: int) -> int:
    """Device memory that the largest of the programs takes, with edited logits beside those of a step."""
    logits = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32)
    inputs, _ = build_sampling_inputs([], rows, vocab_size)
    compiled = _choose.lower(logits, logits, inputs.draws, random=True, filters=True).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    edited, counts = 4 * rows * vocab_size, 5 * rows * vocab_size
    return edited + max(memory.temp_size_in_bytes, counts, edited)


def _name(name: str, rows: int) -> str:
    return f"sampler-{name}-{rows}"


def _no_biases(rows: int) -> Biases:
    padding = np.full(BIAS_PIECE, rows, np.int32)
    return Biases(rows=padding, token_ids=np.zeros_like(padding), values=np.zeros(BIAS_PIECE, np.float32))


def _pieces(arrays: Any, size: int) -> Iterator[Any]:
    """The arrays of a struct in pieces of this size."""
    leaves, structure = jax.tree.flatten(arrays)
    for first in range(0, len(leaves[0]), size):
        yield structure.unflatten([leaf[first : first + size] for leaf in leaves])
