"""Choosing the next tokens on the device, and the log-probabilities to report with them.

    logits -> bias, allowed ids, grammar mask, min_tokens ban -> penalties
        -> temperature 0: argmax
        -> temperature -> min_p -> top_k -> top_p -> draw

The order is vLLM's. `sample` keeps nothing between calls: token histories come with every call and all counts
are made from them, so that preemption and reordering of rows cannot leave anything stale.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from rimuru_jax.sampling_params import SamplingParams

_HostOrDevice = Array | np.ndarray
_MIN_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFeatures:
    """Which parts of `sample` are compiled: the static side of a batch. The default is argmax alone."""

    random: bool = False
    """Some row has a temperature above 0. Without it min_p, top_k and top_p do not matter."""
    top_k: bool = False
    top_p: bool = False
    repetition_penalty: bool = False
    output_penalties: bool = False
    """Presence and frequency penalties."""
    logit_bias: bool = False
    allowed_ids: bool = False
    token_mask: bool = False
    banned_ids: bool = False
    num_logprobs: int | None = None
    """Most probable tokens to report with each chosen one (0: that one alone); None: no log-probabilities."""


@flax.struct.dataclass
class SamplingInputs:
    """What each of S rows asks of the sampler. Id lists are padded with -1 to a power of two or to 0."""

    temperature: Float[_HostOrDevice, "S"]
    """0 means greedy."""
    min_p: Float[_HostOrDevice, "S"]
    top_k: Int[_HostOrDevice, "S"]
    """0 means off."""
    top_p: Float[_HostOrDevice, "S"]
    seed: UInt32[_HostOrDevice, "S 2"]
    """High and low word of a 64-bit seed."""
    token_index: Int[_HostOrDevice, "S"]
    """Index of the token to choose within the row's output, from 0."""
    repetition_penalty: Float[_HostOrDevice, "S"]
    presence_penalty: Float[_HostOrDevice, "S"]
    frequency_penalty: Float[_HostOrDevice, "S"]
    history: Int[_HostOrDevice, "S history"]
    """Prompt then output token ids, of rows with penalties."""
    prompt_length: Int[_HostOrDevice, "S"]
    """Columns of `history` that belong to the prompt."""
    bias_ids: Int[_HostOrDevice, "S biased"]
    bias_values: Float[_HostOrDevice, "S biased"]
    allowed_ids: Int[_HostOrDevice, "S allowed"]
    """The only ids that may be chosen; a row with none allows all."""
    token_mask: Int[_HostOrDevice, "S words"]
    """Of a grammar: bit `t % 32` of word `t // 32` says whether token `t` may be chosen. No words: all may."""
    banned_ids: Int[_HostOrDevice, "S banned"]
    """Ids that must not be chosen: stop and end-of-sequence ids before `min_tokens`."""


@flax.struct.dataclass
class TokenLogprobs:
    """Log-probabilities of given tokens under the unmodified logits, and of the most probable tokens."""

    logprob: Float[Array, "S"]
    rank: Int[Array, "S"]
    """1 + the number of tokens with a larger logit."""
    top_ids: Int[Array, "S top"]
    """The most probable tokens, most probable first; among equals the smaller id first."""
    top_logprobs: Float[Array, "S top"]


@flax.struct.dataclass
class SampledTokens:
    """The outcome of `sample`."""

    token_ids: Int[Array, "S"]
    finite: Bool[Array, "S"]
    """False where the logits had NaN or +inf, or left no token to choose: the row's request must fail, its
    token id is within the vocabulary but means nothing."""
    logprobs: TokenLogprobs | None
    """None unless `SamplingFeatures.num_logprobs` is set."""


def sample(logits: Float[Array, "S V"], inputs: SamplingInputs, features: SamplingFeatures) -> SampledTokens:
    """Choose one token for each of S rows. Pure; jit it with `features` static.

    A row's token depends on its own logits, parameters, seed and token index only, not on its place in
    the batch or on other rows (to the rounding of top_p's float32 sum, whose order the batch size may
    change). Greedy rows take the smallest of the ids that tie. Log-probabilities are those of the model
    itself: log_softmax of `logits` as they came.
    """
    raw = logits.astype(jnp.float32)
    with jax.named_scope("edit_logits"):
        edited = edit_logits(raw, inputs, features)
    finite = jnp.all(raw < jnp.inf, axis=1) & jnp.isfinite(jnp.max(edited, axis=1))
    token_ids = lax.argmax(edited, 1, jnp.int32)
    if features.random:
        with jax.named_scope("draw"):
            token_ids = jnp.where(inputs.temperature == 0, token_ids, _draw(edited, inputs, features))
    logprobs = None
    if features.num_logprobs is not None:
        with jax.named_scope("logprobs"):
            logprobs = compute_logprobs(raw, token_ids, features.num_logprobs)
    return SampledTokens(token_ids=token_ids, finite=finite, logprobs=logprobs)


_sample: Any = jax.jit(sample, static_argnames="features")  # Any: its cache is in no stub

MAX_COMPILED = 128
"""Variants of `sample` that are kept compiled."""


def sample_compiled(
    logits: Float[Array, "S V"], inputs: SamplingInputs, features: SamplingFeatures
) -> SampledTokens:
    """`sample`, compiled for the features and shapes at hand.

    Clients decide about those, and every variant takes memory: on a CPU also more than a hundred of the 65,530 memory
    maps that a process may have. So all are forgotten when there are too many.
    """
    if _sample._cache_size() >= MAX_COMPILED:
        _sample.clear_cache()
    return _sample(logits, inputs, features)


def compute_logprobs(
    logits: Float[Array, "T V"], targets: Int[Array, "T"], num_logprobs: int = 0
) -> TokenLogprobs:
    """Log-probabilities and ranks of `targets`, and the `num_logprobs` most probable tokens of each row.

    For prompt log-probabilities call it on chunks of rows: it may hold a few float32 arrays as large as
    `logits`.
    """
    logits = logits.astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)
    rank = 1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32)
    top_logits, top_ids = lax.top_k(logits, min(num_logprobs, logits.shape[1]))
    return TokenLogprobs(
        logprob=chosen[:, 0] - log_total,
        rank=rank,
        top_ids=top_ids,
        top_logprobs=top_logits - log_total[:, None],
    )


def edit_logits(
    logits: Float[Array, "S V"], inputs: SamplingInputs, features: SamplingFeatures
) -> Float[Array, "S V"]:
    """Bias, allowed ids, grammar, banned ids, then penalties: what changes even a greedy choice."""
    vocab_size = logits.shape[1]
    rows = jnp.arange(logits.shape[0])[:, None]

    def columns(ids: Int[_HostOrDevice, "S width"]) -> Int[Array, "S width"]:
        # Padding goes past the end, where scatters drop it: -1 would mean the last column.
        return jnp.where(ids < 0, vocab_size, ids)

    if features.logit_bias:
        logits = logits.at[rows, columns(inputs.bias_ids)].add(inputs.bias_values, mode="drop")
    if features.allowed_ids:
        allowed = jnp.zeros(logits.shape, bool).at[rows, columns(inputs.allowed_ids)].set(True, mode="drop")
        unrestricted = jnp.all(inputs.allowed_ids < 0, axis=1, keepdims=True)
        logits = jnp.where(allowed | unrestricted, logits, -jnp.inf)
    if features.token_mask:
        bits = jnp.repeat(inputs.token_mask, 32, axis=1, total_repeat_length=32 * inputs.token_mask.shape[1])
        bit = lax.rem(jnp.arange(vocab_size, dtype=jnp.int32), jnp.int32(32))
        allowed = (bits[:, :vocab_size] >> bit[None, :]) & 1
        logits = jnp.where(allowed == 1, logits, -jnp.inf)
    if features.banned_ids:
        logits = logits.at[rows, columns(inputs.banned_ids)].set(-jnp.inf, mode="drop")
    if features.repetition_penalty:
        seen = jnp.zeros(logits.shape, bool).at[rows, columns(inputs.history)].set(True, mode="drop")
        penalty = inputs.repetition_penalty[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if features.output_penalties:
        is_prompt = jnp.arange(inputs.history.shape[1])[None, :] < inputs.prompt_length[:, None]
        outputs = columns(jnp.where(is_prompt, -1, inputs.history))
        counts = jnp.zeros(logits.shape, jnp.int32).at[rows, outputs].add(1, mode="drop")
        logits = logits - inputs.frequency_penalty[:, None] * counts.astype(jnp.float32)
        logits = logits - inputs.presence_penalty[:, None] * (counts > 0).astype(jnp.float32)
    return logits


def kept_tokens(
    logits: Float[Array, "S V"], inputs: SamplingInputs, features: SamplingFeatures
) -> Bool[Array, "S V"]:
    """Tokens that min_p, top_k and top_p leave, in this order, each working on what the one before left.

    No filter separates tokens with equal logits: top_k keeps every token whose logit is at least the k-th
    largest; top_p takes the smallest set, most probable first, whose renormalised mass reaches top_p, and
    every token that ties with its last. Thresholds are exact logits (the search is over the 2^32 float
    patterns, not over an interval); the mass is summed in float32. The most probable token always stays.
    """
    vocab_size = logits.shape[1]
    scaled = _scaled(logits, inputs)
    keep = scaled >= jnp.log(inputs.min_p)[:, None]
    if not (features.top_k or features.top_p):
        return keep
    keys = _ordered_keys(logits)
    if features.top_k:
        at_least = jnp.where(inputs.top_k > 0, jnp.minimum(inputs.top_k, vocab_size), vocab_size)
        threshold = _largest_threshold(keys, lambda mask: jnp.sum(mask, axis=1, dtype=jnp.int32), at_least)
        keep &= keys >= threshold[:, None]
    if features.top_p:
        weights = jnp.where(keep, jnp.exp(scaled), 0.0)
        mass = jnp.sum(weights, axis=1) * inputs.top_p
        threshold = _largest_threshold(
            keys, lambda mask: jnp.sum(jnp.where(mask, weights, 0.0), axis=1), mass
        )
        threshold = jnp.minimum(threshold, jnp.max(keys, axis=1))
        keep &= (keys >= threshold[:, None]) | (inputs.top_p >= 1)[:, None]
    return keep


def _scaled(logits: Float[Array, "S V"], inputs: SamplingInputs) -> Float[Array, "S V"]:
    """Logits under the temperature, shifted so that the largest is 0: no temperature overflows."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)
    return (logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None]


def _draw(logits: Float[Array, "S V"], inputs: SamplingInputs, features: SamplingFeatures) -> Int[Array, "S"]:
    """A draw from the filtered distribution of each row by the Gumbel-max trick."""

    def row_noise(seed: UInt32[Array, "2"], token_index: Int[Array, ""]) -> Float[Array, "V"]:
        # The implementation is named: a seed must mean the same tokens whatever JAX's default generator is.
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), token_index)
        # "high": 23 bits of noise would tie among 150k tokens in percents of the draws, and favour small ids.
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32, mode="high")

    noise = jax.vmap(row_noise)(jnp.asarray(inputs.seed), jnp.asarray(inputs.token_index))
    keep = kept_tokens(logits, inputs, features)
    return lax.argmax(jnp.where(keep, _scaled(logits, inputs) + noise, -jnp.inf), 1, jnp.int32)


def _ordered_keys(x: Float[Array, "S V"]) -> UInt32[Array, "S V"]:
    """Integers in the order of the floats; 0.0 and -0.0 share one."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # -0.0 is not below 0 and has its top bit set already, so it gets the key of 0.0.
    return jnp.where(x < 0, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(
    keys: UInt32[Array, "S V"], measure: Callable[[Bool[Array, "S V"]], Array], target: Array
) -> UInt32[Array, "S"]:
    """The largest t of each row with measure(keys >= t) >= target, for a measure that falls as t grows.

    Finds two bits of t in each of 16 passes over the keys; a pass measures three candidates at once.
    """

    def refine(step: Array, threshold: UInt32[Array, "S"]) -> UInt32[Array, "S"]:
        shift = (30 - 2 * step).astype(jnp.uint32)
        reached = jnp.zeros_like(threshold)
        for digit in (1, 2, 3):
            candidate = threshold + (jnp.uint32(digit) << shift)
            reached += (measure(keys >= candidate[:, None]) >= target).astype(jnp.uint32)
        return threshold + (reached << shift)

    return lax.fori_loop(0, 16, refine, jnp.zeros(keys.shape[:1], jnp.uint32))


def with_last_tokens(inputs: SamplingInputs, last_tokens: Int[Array, "S"]) -> SamplingInputs:
    """Complete histories with tokens that were still in flight when the host built `inputs`.

    `last_tokens[S]` are the newest tokens of each row, on the device. They fill the hole that
    `build_sampling_inputs` left for a token in flight; rows without a hole stay as they are.
    """
    newest = (inputs.prompt_length + inputs.token_index - 1)[:, None]
    hole = (jnp.arange(inputs.history.shape[1])[None, :] == newest) & (inputs.history < 0)
    history = jnp.where(hole, last_tokens[:, None], inputs.history)
    return dataclasses.replace(inputs, history=history)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One row of a batch, as the host knows it."""

    params: SamplingParams
    seed: int
    """The request's seed, chosen by the engine when `params.seed` is None; taken modulo 2^64."""
    prompt_token_ids: Sequence[int] | np.ndarray
    """Needed by penalties only; an int32 array saves a conversion at every step."""
    output_token_ids: Sequence[int] | np.ndarray
    """Output tokens the host knows; as above."""
    num_output_tokens: int
    """Output tokens, with the one still in flight: the index of the token to choose."""
    stop_token_ids: Collection[int]
    """Stop and end-of-sequence ids, banned until `params.min_tokens` are out."""
    token_mask: np.ndarray | None = None
    """Words of `SamplingInputs.token_mask`; None allows all tokens."""


def build_sampling_inputs(
    rows: Sequence[SamplingRow], num_rows: int
) -> tuple[SamplingInputs, SamplingFeatures]:
    """Inputs of `sample` for these rows, padded with greedy rows to `num_rows`, and what to compile for them.

    The arrays are fresh numpy arrays that nobody else holds; jit never transfers those that the features do
    not use. Widths, and `num_logprobs` above 0, are rounded up to powers of two to keep compilations few.
    Raises `ValueError` for more rows than `num_rows`, and for a row with penalties and more than one token in
    flight.
    """
    if len(rows) > num_rows:
        raise ValueError(f"{len(rows)} rows came; wanted at most num_rows, {num_rows}")
    params = [row.params for row in rows]
    random = [not p.greedy for p in params]
    banned = [row.stop_token_ids if row.num_output_tokens < row.params.min_tokens else () for row in rows]
    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    features = SamplingFeatures(
        random=any(random),
        top_k=any(r and p.top_k > 0 for r, p in zip(random, params, strict=True)),
        top_p=any(r and p.top_p < 1 for r, p in zip(random, params, strict=True)),
        repetition_penalty=any(p.repetition_penalty != 1 for p in params),
        output_penalties=any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params),
        logit_bias=any(p.logit_bias for p in params),
        allowed_ids=any(p.allowed_token_ids for p in params),
        token_mask=any(row.token_mask is not None for row in rows),
        banned_ids=any(banned),
        num_logprobs=_power_of_two(max(logprobs)) if logprobs else None,
    )

    def column(values: Iterable[float], pad: float, dtype: type[np.generic]) -> np.ndarray:
        array = np.full(num_rows, pad, dtype)
        array[: len(rows)] = list(values)
        return array

    bias = [p.logit_bias or {} for p in params]
    penalised = [
        p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params
    ]
    seeds = np.zeros((num_rows, 2), np.uint32)
    for i, row in enumerate(rows):
        seeds[i] = (row.seed >> 32) & 0xFFFFFFFF, row.seed & 0xFFFFFFFF
    inputs = SamplingInputs(
        temperature=column((0.0 if p.greedy else p.temperature for p in params), 0.0, np.float32),
        min_p=column((p.min_p for p in params), 0.0, np.float32),
        top_k=column((min(p.top_k, 2**31 - 1) for p in params), 0, np.int32),
        top_p=column((p.top_p for p in params), 1.0, np.float32),
        seed=seeds,
        token_index=column((row.num_output_tokens for row in rows), 0, np.int32),
        repetition_penalty=column((p.repetition_penalty for p in params), 1.0, np.float32),
        presence_penalty=column((p.presence_penalty for p in params), 0.0, np.float32),
        frequency_penalty=column((p.frequency_penalty for p in params), 0.0, np.float32),
        history=_padded(
            [_history(row) if used else () for row, used in zip(rows, penalised, strict=True)], num_rows
        ),
        prompt_length=column((len(row.prompt_token_ids) for row in rows), 0, np.int32),
        bias_ids=_padded([list(b) for b in bias], num_rows),
        bias_values=_padded([list(b.values()) for b in bias], num_rows, pad=0.0, dtype=np.float32),
        allowed_ids=_padded([p.allowed_token_ids or () for p in params], num_rows),
        token_mask=_masks([row.token_mask for row in rows], num_rows),
        banned_ids=_padded([list(ids) for ids in banned], num_rows),
    )
    return inputs, features


def _history(row: SamplingRow) -> np.ndarray:
    """Prompt and output ids, with a hole (-1) for a token in flight."""
    in_flight = row.num_output_tokens - len(row.output_token_ids)
    if not 0 <= in_flight <= 1:
        raise ValueError(
            f"num_output_tokens is {row.num_output_tokens} with {len(row.output_token_ids)} known tokens; "
            "a row with penalties wants at most one token in flight"
        )
    return np.concatenate(
        [
            np.asarray(row.prompt_token_ids, np.int32),
            np.asarray(row.output_token_ids, np.int32),
            np.full(in_flight, -1, np.int32),
        ]
    )


def _masks(masks: Sequence[np.ndarray | None], num_rows: int) -> np.ndarray:
    """The masks as rows of one array; rows without allow all."""
    words = max((len(mask) for mask in masks if mask is not None), default=0)
    array = np.full((num_rows, words), -1, np.int32)
    for row, mask in enumerate(masks):
        if mask is not None:
            array[row] = mask
    return array


def _padded(
    lists: Sequence[Sequence[float] | np.ndarray],
    num_rows: int,
    *,
    pad: float = -1,
    dtype: type[np.generic] = np.int32,
) -> np.ndarray:
    """The lists as rows of one array [num_rows, width], width a power of two; 0 when all are empty."""
    longest = max((len(items) for items in lists), default=0)
    width = max(_MIN_WIDTH, _power_of_two(longest)) if longest else 0
    array = np.full((num_rows, width), pad, dtype)
    for i, items in enumerate(lists):
        array[i, : len(items)] = items
    return array


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
