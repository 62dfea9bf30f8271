"""Choosing the next tokens on the device, and the log-probabilities to report with them.

    logits -> bias, min_tokens ban -> allowed ids or grammar -> penalties
        -> temperature 0: argmax
        -> temperature -> min_p -> top_k -> top_p -> draw

The order is vLLM's. `sample` keeps nothing between calls: token histories come with every call and all counts
are made from them, so that preemption and reordering of rows cannot leave anything stale.

What clients ask for changes which of the parts run, and how often, but no shape: biases and histories are flat lists
in pieces of one size, and allowed ids are masks. So a few programs do it all (see `sampler`).
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

BIAS_PIECE = 1024
"""Biases that are applied at once."""
HISTORY_PIECE = 16384
"""Tokens of histories that are counted at once."""
DRAWS_AT_ONCE = 64
"""Rows: drawing takes up to twice the memory of their logits."""
LOGPROB_WIDTHS = (16, 32)
"""How many most probable tokens are reported: as many as cost little on a GPU, and more than OpenAI allows (20)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFeatures:
    """Which parts of `sample` are needed: the static side of a batch. The default is argmax alone."""

    random: bool = False
    """Some row has a temperature above 0. Without it min_p, top_k and top_p do not matter."""
    filters: bool = False
    """Some row has top_k or top_p."""
    biases: bool = False
    """Some row has a bias, or tokens that it must not choose yet."""
    token_mask: bool = False
    penalties: bool = False
    num_logprobs: int | None = None
    """Most probable tokens to report with each chosen one; None: no log-probabilities."""


@flax.struct.dataclass
class Draws:
    """How each of S rows chooses from its logits."""

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


@flax.struct.dataclass
class Biases:
    """What is added to logits: biases, and -inf to ids that must not be chosen. Past the last row for padding."""

    rows: Int[_HostOrDevice, " B"]
    token_ids: Int[_HostOrDevice, " B"]
    values: Float[_HostOrDevice, " B"]


@flax.struct.dataclass
class History:
    """Tokens of the rows that have penalties, in any order. Past the last row for padding."""

    rows: Int[_HostOrDevice, " H"]
    token_ids: Int[_HostOrDevice, " H"]
    """`~id`, which is negative, for a token of a prompt."""


@flax.struct.dataclass
class Penalties:
    """Of each of S rows."""

    repetition: Float[_HostOrDevice, "S"]
    presence: Float[_HostOrDevice, "S"]
    frequency: Float[_HostOrDevice, "S"]


@flax.struct.dataclass
class TokenCounts:
    """Which tokens a row has had."""

    seen: Bool[Array, "S V"]
    """In the prompt or the output."""
    output: Int[Array, "S V"]
    """How often in the output."""


@flax.struct.dataclass
class SamplingInputs:
    """What each of S rows asks of the sampler."""

    draws: Draws
    biases: Biases
    """Padded to a multiple of BIAS_PIECE; 0 when there are none."""
    token_mask: Int[_HostOrDevice, "S words"]
    """Bit `t % 32` of word `t // 32` says whether token `t` may be chosen. No words: all may."""
    history: History
    """Padded to a multiple of HISTORY_PIECE; 0 when no row has penalties."""
    penalties: Penalties


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
    edited = edit_logits(raw, inputs, features)
    token_ids, finite = choose(raw, edited, inputs.draws, random=features.random, filters=features.filters)
    logprobs = None
    if features.num_logprobs is not None:
        logprobs = compute_logprobs(raw, token_ids, features.num_logprobs)
    return SampledTokens(token_ids=token_ids, finite=finite, logprobs=logprobs)


def choose_greedily(logits: Float[Array, "S V"]) -> SampledTokens:
    """What `sample` makes of float32 logits when nobody asks for more than the most probable token."""
    token_ids = lax.argmax(logits, 1, jnp.int32)  # of a NaN, where there is one
    largest = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    return SampledTokens(token_ids=token_ids, finite=jnp.isfinite(largest), logprobs=None)


def choose(
    raw: Float[Array, "S V"], edited: Float[Array, "S V"], draws: Draws, *, random: bool, filters: bool
) -> tuple[Int[Array, "S"], Bool[Array, "S"]]:
    """Token ids from edited logits, and `SampledTokens.finite`."""
    finite = jnp.all(raw < jnp.inf, axis=1) & jnp.isfinite(jnp.max(edited, axis=1))
    token_ids = lax.argmax(edited, 1, jnp.int32)
    if random:
        with jax.named_scope("draw"):
            drawn = _in_parts(functools.partial(_draw, filters=filters), (edited, draws))
            token_ids = jnp.where(draws.temperature == 0, token_ids, drawn)
    return token_ids, finite


def _in_parts(draw: Callable[..., Array], rows: tuple[Any, ...]) -> Array:
    """`draw` of arguments with a row each, DRAWS_AT_ONCE rows after another if that divides them."""
    parts, rest = divmod(len(rows[0]), DRAWS_AT_ONCE)
    if rest or parts < 2:
        return draw(*rows)
    split = jax.tree.map(lambda x: jnp.reshape(x, (parts, DRAWS_AT_ONCE, *x.shape[1:])), rows)
    return lax.map(lambda part: draw(*part), split).reshape(-1)


@jax.named_scope("logprobs")
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
    top_logits, top_ids = _most_probable(logits, min(num_logprobs, logits.shape[1]))
    return TokenLogprobs(
        logprob=chosen[:, 0] - log_total,
        rank=rank,
        top_ids=top_ids,
        top_logprobs=top_logits - log_total[:, None],
    )


def _most_probable(
    logits: Float[Array, "T V"], count: int
) -> tuple[Float[Array, "T count"], Int[Array, "T count"]]:
    """`lax.top_k`, a GPU's kernel for which takes 16 at once at most; beyond that XLA sorts the whole vocabulary.

    Among tokens of probability 0, one may come twice where that sort is avoided.
    """
    if not 16 < count <= max(LOGPROB_WIDTHS):
        return lax.top_k(logits, count)
    rows = jnp.arange(logits.shape[0])[:, None]
    values, ids = lax.top_k(logits, 16)
    more_values, more_ids = lax.top_k(logits.at[rows, ids].set(-jnp.inf), count - 16)
    return jnp.concatenate([values, more_values], axis=1), jnp.concatenate([ids, more_ids], axis=1)


def edit_logits(
    logits: Float[Array, "S V"], inputs: SamplingInputs, features: SamplingFeatures
) -> Float[Array, "S V"]:
    """Biases and bans, allowed ids or a grammar, then penalties: what changes even a greedy choice."""
    if features.biases:
        logits = add_biases(logits, inputs.biases)
    if features.token_mask:
        logits = apply_mask(logits, inputs.token_mask)
    if features.penalties:
        counts = count_tokens(no_counts(*logits.shape), inputs.history)
        logits = penalise(logits, counts, inputs.penalties)
    return logits


@jax.named_scope("bias")
def add_biases(logits: Float[Array, "S V"], biases: Biases) -> Float[Array, "S V"]:
    return logits.at[biases.rows, biases.token_ids].add(biases.values, mode="drop")


@jax.named_scope("mask")
def apply_mask(logits: Float[Array, "S V"], token_mask: Int[_HostOrDevice, "S words"]) -> Float[Array, "S V"]:
    rows, vocab_size = logits.shape
    # Not `jnp.repeat`, whose index XLA computes while compiling: for a large vocabulary that takes half a minute.
    bits = jnp.asarray(token_mask)[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]
    allowed = (bits & 1).reshape(rows, -1)[:, :vocab_size]
    return jnp.where(allowed == 1, logits, -jnp.inf)


def no_counts(rows: int, vocab_size: int) -> TokenCounts:
    shape = (rows, vocab_size)
    return TokenCounts(seen=jnp.zeros(shape, bool), output=jnp.zeros(shape, jnp.int32))


@jax.named_scope("counts")
def count_tokens(counts: TokenCounts, history: History) -> TokenCounts:
    """Add tokens to the counts."""
    in_prompt = history.token_ids < 0
    columns = jnp.where(in_prompt, ~history.token_ids, history.token_ids)
    return TokenCounts(
        seen=counts.seen.at[history.rows, columns].set(True, mode="drop"),
        output=counts.output.at[history.rows, columns].add(1 - in_prompt.astype(jnp.int32), mode="drop"),
    )


@jax.named_scope("penalties")
def penalise(logits: Float[Array, "S V"], counts: TokenCounts, penalties: Penalties) -> Float[Array, "S V"]:
    """Penalties on the tokens that a row has had; the rows' are 1, 0 and 0 where it has none."""
    repetition = jnp.asarray(penalties.repetition)[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts.seen, repeated, logits)
    logits = logits - jnp.asarray(penalties.frequency)[:, None] * counts.output.astype(jnp.float32)
    return logits - jnp.asarray(penalties.presence)[:, None] * (counts.output > 0).astype(jnp.float32)


def kept_tokens(logits: Float[Array, "S V"], draws: Draws, filters: bool = True) -> Bool[Array, "S V"]:
    """Tokens that min_p, top_k and top_p leave, in this order, each working on what the one before left.

    No filter separates tokens with equal logits: top_k keeps every token whose logit is at least the k-th
    largest; top_p takes the smallest set, most probable first, whose renormalised mass reaches top_p, and
    every token that ties with its last. Thresholds are exact logits (the search is over the 2^32 float
    patterns, not over an interval); the mass is summed in float32. The most probable token always stays.
    """
    vocab_size = logits.shape[1]
    scaled = _scaled(logits, draws)
    keep = scaled >= jnp.log(draws.min_p)[:, None]
    if not filters:
        return keep
    keys = _ordered_keys(logits)
    at_least = jnp.where(draws.top_k > 0, jnp.minimum(draws.top_k, vocab_size), vocab_size)
    threshold = _largest_threshold(keys, lambda mask: jnp.sum(mask, axis=1, dtype=jnp.int32), at_least)
    keep &= keys >= threshold[:, None]
    weights = jnp.where(keep, jnp.exp(scaled), 0.0)
    mass = jnp.sum(weights, axis=1) * draws.top_p
    threshold = _largest_threshold(keys, lambda mask: jnp.sum(jnp.where(mask, weights, 0.0), axis=1), mass)
    threshold = jnp.minimum(threshold, jnp.max(keys, axis=1))
    return keep & ((keys >= threshold[:, None]) | (draws.top_p >= 1)[:, None])


def _scaled(logits: Float[Array, "S V"], draws: Draws) -> Float[Array, "S V"]:
    """Logits under the temperature, shifted so that the largest is 0: no temperature overflows."""
    temperature = jnp.where(draws.temperature > 0, draws.temperature, 1.0)
    return (logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None]


def _draw(logits: Float[Array, "S V"], draws: Draws, filters: bool) -> Int[Array, "S"]:
    """A draw from the filtered distribution of each row by the Gumbel-max trick."""

    def row_noise(seed: UInt32[Array, "2"], token_index: Int[Array, ""]) -> Float[Array, "V"]:
        # The implementation is named: a seed must mean the same tokens whatever JAX's default generator is.
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), token_index)
        # "high": 23 bits of noise would tie among 150k tokens in percents of the draws, and favour small ids.
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32, mode="high")

    noise = jax.vmap(row_noise)(jnp.asarray(draws.seed), jnp.asarray(draws.token_index))
    keep = kept_tokens(logits, draws, filters)
    return lax.argmax(jnp.where(keep, _scaled(logits, draws) + noise, -jnp.inf), 1, jnp.int32)


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
    rows: Sequence[SamplingRow], num_rows: int, vocab_size: int
) -> tuple[SamplingInputs, SamplingFeatures]:
    """Inputs of `sample` for these rows, padded with greedy rows to `num_rows`, and what parts of it they need.

    The arrays are fresh numpy arrays that nobody else holds; jit never transfers those that a part does not use.
    Raises `ValueError` for more rows than `num_rows`, and for a row with penalties and a token in flight.
    """
    if len(rows) > num_rows:
        raise ValueError(f"{len(rows)} rows came; wanted at most num_rows, {num_rows}")
    params = [row.params for row in rows]
    biases, token_mask, history = build_edits(dict(enumerate(rows)), num_rows, vocab_size)
    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    features = SamplingFeatures(
        random=not all(p.greedy for p in params),
        filters=any(not p.greedy and (p.top_k > 0 or p.top_p < 1) for p in params),
        biases=biases.rows.size > 0,
        token_mask=token_mask.size > 0,
        penalties=history.rows.size > 0,
        num_logprobs=logprob_width(max(logprobs), vocab_size) if logprobs else None,
    )

    def column(values: Iterable[float], pad: float, dtype: type[np.generic]) -> np.ndarray:
        array = np.full(num_rows, pad, dtype)
        array[: len(rows)] = list(values)
        return array

    seeds = np.zeros((num_rows, 2), np.uint32)
    for i, row in enumerate(rows):
        seeds[i] = (row.seed >> 32) & 0xFFFFFFFF, row.seed & 0xFFFFFFFF
    inputs = SamplingInputs(
        draws=Draws(
            temperature=column((0.0 if p.greedy else p.temperature for p in params), 0.0, np.float32),
            min_p=column((p.min_p for p in params), 0.0, np.float32),
            top_k=column((min(p.top_k, 2**31 - 1) for p in params), 0, np.int32),
            top_p=column((p.top_p for p in params), 1.0, np.float32),
            seed=seeds,
            token_index=column((row.num_output_tokens for row in rows), 0, np.int32),
        ),
        biases=biases,
        token_mask=token_mask,
        history=history,
        penalties=Penalties(
            repetition=column((p.repetition_penalty for p in params), 1.0, np.float32),
            presence=column((p.presence_penalty for p in params), 0.0, np.float32),
            frequency=column((p.frequency_penalty for p in params), 0.0, np.float32),
        ),
    )
    return inputs, features


def build_edits(
    rows: Mapping[int, SamplingRow], num_rows: int, vocab_size: int
) -> tuple[Biases, Int[np.ndarray, "S words"], History]:
    """The edits that these rows, by their numbers, ask for, as in `SamplingInputs`: without any where there are none."""
    biases = [(number, token, value) for number, row in rows.items() for token, value in _biases(row)]
    masks = {number: mask for number, row in rows.items() if (mask := _mask(row, vocab_size)) is not None}
    token_mask = np.full((num_rows, mask_words(vocab_size) if masks else 0), -1, np.int32)
    for number, mask in masks.items():
        token_mask[number] = mask
    histories = [(number, ids) for number, row in rows.items() for ids in _history(row)]
    return _pack_biases(biases, num_rows), token_mask, _pack_histories(histories, num_rows)


def logprob_width(num_logprobs: int, vocab_size: int) -> int:
    """Tokens to report where so many are asked for: one of LOGPROB_WIDTHS, beyond them a power of two."""
    width = next((width for width in LOGPROB_WIDTHS if width >= num_logprobs), 0)
    return min(width or 1 << (num_logprobs - 1).bit_length(), vocab_size)


def _biases(row: SamplingRow) -> Iterable[tuple[int, float]]:
    yield from (row.params.logit_bias or {}).items()
    if row.num_output_tokens < row.params.min_tokens:
        yield from ((token, -np.inf) for token in row.stop_token_ids)


def _pack_biases(entries: Sequence[tuple[int, int, float]], num_rows: int) -> Biases:
    size = _whole_pieces(len(entries), BIAS_PIECE)
    rows, token_ids = np.full(size, num_rows, np.int32), np.zeros(size, np.int32)
    values = np.zeros(size, np.float32)
    if entries:
        count = len(entries)
        rows[:count], token_ids[:count], values[:count] = zip(*entries, strict=True)
    return Biases(rows=rows, token_ids=token_ids, values=values)


def _history(row: SamplingRow) -> tuple[np.ndarray, ...]:
    """Prompt and output as in `History`, of a row with penalties."""
    params = row.params
    if params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0:
        return ()
    if row.num_output_tokens != len(row.output_token_ids):
        raise ValueError(
            f"num_output_tokens is {row.num_output_tokens} with {len(row.output_token_ids)} known tokens; "
            "a row with penalties wants all of them known"
        )
    return ~np.asarray(row.prompt_token_ids, np.int32), np.asarray(row.output_token_ids, np.int32)


def _pack_histories(parts: Sequence[tuple[int, np.ndarray]], num_rows: int) -> History:
    lengths = [len(ids) for _, ids in parts]
    count = sum(lengths)
    size = _whole_pieces(count, HISTORY_PIECE)
    rows, token_ids = np.full(size, num_rows, np.int32), np.zeros(size, np.int32)
    if parts:
        rows[:count] = np.repeat(np.array([number for number, _ in parts], np.int32), lengths)
        np.concatenate([ids for _, ids in parts], out=token_ids[:count])
    return History(rows=rows, token_ids=token_ids)


def _mask(row: SamplingRow, vocab_size: int) -> np.ndarray | None:
    """Of the grammar, or of the allowed ids."""
    if not row.params.allowed_token_ids:
        return row.token_mask
    bits = np.zeros(32 * mask_words(vocab_size), bool)
    bits[list(row.params.allowed_token_ids)] = True
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    return mask if row.token_mask is None else mask & row.token_mask


def mask_words(vocab_size: int) -> int:
    """Words of a row of `SamplingInputs.token_mask`."""
    return -(-vocab_size // 32)


def _whole_pieces(count: int, piece: int) -> int:
    return -(-count // piece) * piece
