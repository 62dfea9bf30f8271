"""How the next tokens of one request are chosen: names, defaults and meanings of vLLM's `SamplingParams`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one choose the most probable token, as in vLLM."""

_TOKEN_ID_LIMIT = 2**31 - 1

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must look like; exactly one of the first six. JSON is stored as its text."""

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar, in Lark's notation or in GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text and parts that have a structure, as JSON: XGrammar's formats, or the older structures and triggers."""
    disable_any_whitespace: bool = False
    """No whitespace between the tokens of JSON."""
    whitespace_pattern: str | None = None
    """What may be between the tokens of JSON, as a regular expression."""

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            raise ValueError("structured_outputs.json_object is False; leave it out to allow any text")
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {', '.join(given) or 'nothing'}; wanted exactly one of {', '.join(_KINDS)}"
            )
        for name, wanted in (("json", "a JSON schema"), ("structural_tag", "JSON")):
            value = getattr(self, name)
            if isinstance(value, Mapping) or (name == "json" and isinstance(value, bool)):
                try:
                    object.__setattr__(self, name, json.dumps(value, ensure_ascii=False))
                except (TypeError, ValueError, RecursionError) as error:
                    raise ValueError(f"structured_outputs.{name} is not {wanted}: {error}") from error
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(
                    f"structured_outputs.{name} is {value!r:.100}; wanted a text that is not empty"
                )
        if self.choice is not None:
            choice = _strings("structured_outputs.choice", self.choice)
            if not choice or isinstance(self.choice, str):
                raise ValueError(f"structured_outputs.choice is {self.choice!r}; wanted a list of texts")
            object.__setattr__(self, "choice", choice)
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(
                    f"structured_outputs.{name} is {getattr(self, name)!r}; wanted True or False"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Every impossible value raises `ValueError` with one sentence that names the parameter, the value got and
    the value wanted. Lists are stored as tuples, `stop="x"` as `("x",)`, and `top_k=-1` as 0.
    """

    n: int = 1
    """Completions per prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token already generated; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time a token was generated; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of the prompt or output; 1 is off."""
    temperature: float = 1.0
    """Divides the logits; 0 (or less than 1e-5) takes the most probable token."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose probabilities reach this sum; 1 is off."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 or -1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable one; 0 is off."""
    seed: int | None = None
    """Signed 64-bit seed of the request's own random numbers; None lets the engine choose."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output when they appear in its text."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output, beside the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the engine's `max_model_len`."""
    min_tokens: int = 0
    """Tokens to generate before a stop or end-of-sequence token may be chosen."""
    logprobs: int | None = None
    """Most probable tokens to report for each output token, beside the chosen one; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    detokenize: bool = True
    """Turn the output into text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; values in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may be generated; None allows all."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must look like. Its end ends the output, whatever `ignore_eos` and `min_tokens` say."""

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
                     "include_stop_str_in_output"):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; wanted True or False")

        self._store("presence_penalty", _real("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._store("frequency_penalty", _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        # The outer limits of these two keep float32 logits finite on the device.
        self._store("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6))
        self._store("temperature", _real("temperature", self.temperature, 0.0, 1e6))
        self._store("top_p", _real("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ValueError("top_p is 0.0; wanted a number above 0 and at most 1 (1 turns it off)")
        self._store("min_p", _real("min_p", self.min_p, 0.0, 1.0))

        self._store("n", _integer("n", self.n, 1))
        self._store("top_k", max(0, _integer("top_k", self.top_k, -1)))
        self._store("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        for name, low in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0)):
            if getattr(self, name) is not None:
                self._store(name, _integer(name, getattr(self, name), low))
        if self.seed is not None:
            self._store("seed", _integer("seed", self.seed, -(2**63), 2**63 - 1))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; wanted at most max_tokens, {self.max_tokens}")

        self._store("stop", _strings("stop", self.stop))
        self._store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.stop and not self.detokenize:
            raise ValueError(
                f"detokenize is False with stop={self.stop!r}; stop strings want detokenize=True"
            )
        if self.allowed_token_ids is not None:
            self._store("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError(
                    "allowed_token_ids is empty; wanted at least one token id, or None to allow all"
                )
        if self.logit_bias is not None:
            self._store("logit_bias", _logit_bias(self.logit_bias))
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise ValueError(
                    f"structured_outputs is a {type(self.structured_outputs).__name__}; "
                    "wanted StructuredOutputsParams"
                )
            if self.allowed_token_ids is not None:
                raise ValueError(
                    "allowed_token_ids and structured_outputs may leave no token to choose; wanted one of them"
                )

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without random numbers."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return _strings("stop", self.stop)

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Raise `ValueError` when a token id or a number of logprobs does not fit this vocabulary."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            outside = [token for token in getattr(self, name) or () if token >= vocab_size]
            if outside:
                raise ValueError(
                    f"{name} has token id {outside[0]}; wanted ids below the vocabulary's {vocab_size}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > vocab_size:
                raise ValueError(f"{name} is {value}; wanted at most the vocabulary's {vocab_size}")


def _real(name: str, value: object, low: float, high: float) -> float:
    """value as a float in [low, high]."""
    # A bool is a number to Python, but as a parameter it is a mistake. NaN fails the comparison.
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise ValueError(f"{name} is {value!r}; wanted a number from {low:g} to {high:g}")
    return float(value)


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """value as an int in [low, high]."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or int(value) < low
        or (high is not None and int(value) > high)
    ):
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {value!r}; wanted an integer {wanted}")
    return int(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"{name} is {value!r}; wanted a string that is not empty, or a list of such strings")
    return tuple(items)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    try:
        items = tuple(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"{name} is {value!r}; wanted a list of token ids") from None
    return tuple(_integer(f"a token id of {name}", item, 0, _TOKEN_ID_LIMIT) for item in items)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias is {value!r}; wanted a mapping from token ids to numbers")
    ids = _token_ids("logit_bias", value)
    return {
        token: _real(f"logit_bias[{token}]", bias, -100.0, 100.0)
        for token, bias in zip(ids, value.values(), strict=True)
    }
