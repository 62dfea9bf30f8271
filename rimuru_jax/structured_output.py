"""Grammars that outputs must follow: which tokens may come next, as bit masks made on the host between two steps.

    StructuredOutputsParams -> GrammarCompiler.compile -> Grammar: mask() -> the sampler -> accept(token) -> mask() ...

The work is done by llguidance (extra `structured`), which is imported only when somebody asks for a grammar.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rimuru_jax import structural_tag
from rimuru_jax.sampling_params import StructuredOutputsParams
from rimuru_jax.tokenizer import Tokenizer, require_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_DEFINITION_BYTES = 256 << 10
"""Of a schema, an expression or a grammar. The time to compile some of them grows with the square of their length."""

PARSER_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,  # 1 to 2 KiB each
    "verbose_errors": False,  # they would print the whole grammar
}
"""What compiling a grammar, and each of its masks, may take; about half of what llguidance allows by itself."""

_KEPT = 32  # compiled grammars


class Grammar:
    """How far one sequence has come in its grammar.

    Attributes:
        error: why the grammar cannot be followed any further (it has become too complex); None while it can.
    """

    def __init__(self, matcher: "LLMatcher", num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._check()

    def _check(self) -> None:
        self.error = _sentence(self._matcher.get_error()) if self._matcher.is_error() else None

    def mask(self, unwanted: Collection[int] = ()) -> np.ndarray:
        """The tokens that may come next: int32 `[ceil(V / 32)]`, bit `t % 32` of word `t // 32` for token `t`.

        `unwanted` tokens are left out unless nothing else would remain. Always the same until the next `accept`.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]
        self._check()
        if self.error is not None:  # whatever is chosen, `accept` is told the error
            return np.full(self._num_words, -1, np.int32)
        if unwanted:
            left = mask.copy()
            for token in unwanted:
                left[token // 32] &= ~np.uint32(1 << token % 32)
            mask = left if left.any() else mask
        return mask.view(np.int32)

    def accept(self, token_id: int) -> None:
        """Go on with a token that the mask allowed."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def done(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()


class GrammarCompiler:
    """Makes grammars for one model, and keeps those used last. May be called from several threads.

    Args:
        tokenizer: None: every grammar is refused.
        folder: where the tokenizer should be, for the error.
        vocab_size: width of the logits.
        eos_token_ids: what ends an output; none: the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        folder: Path | None,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._vocab_size = vocab_size
        ends = eos_token_ids or (tokenizer.eos_token_ids if tokenizer else ())
        self._eos_token_ids = [token for token in ends if token < vocab_size]
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, definition: str) -> bool:
        """Whether `compile` has what is defined like this at hand."""
        return definition in self._compiled

    def definition(self, params: StructuredOutputsParams) -> str:
        """The grammar in llguidance's words. Raises ValueError, in one sentence, for what is none or too large."""
        kind = _kind(params)
        text = (
            params.json
            or params.regex
            or params.grammar
            or params.structural_tag
            or "".join(params.choice or ())
        )
        assert isinstance(text, str)
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"structured_outputs.{kind} holds half of a surrogate pair, which is not valid Unicode"
            ) from error
        if size > MAX_DEFINITION_BYTES:
            raise ValueError(
                f"structured_outputs.{kind} has {size} bytes; wanted at most {MAX_DEFINITION_BYTES}"
            )
        matcher = _llguidance().LLMatcher
        tokens = self._special_tokens() if kind == "structural_tag" else {}
        try:
            if params.json is not None or params.json_object:
                return matcher.grammar_from_json_schema(
                    text or '{"type": "object"}', overrides=_options(params)
                )
            if params.choice is not None:
                texts = (json.dumps(choice, ensure_ascii=False) for choice in params.choice)
                return matcher.grammar_from_lark("start: " + " | ".join(texts))
            if params.structural_tag is None:
                return matcher.grammar_from_lark(_expression_grammar(kind, text))

            def part(kind: str, content: Any) -> dict[str, Any]:
                if kind != "json_schema":
                    return {"lark_grammar": _expression_grammar(kind, content)}
                schema = content if isinstance(content, bool) else {**content, "x-guidance": _options(params)}
                return {"json_schema": schema}

            control = self._tokenizer.special_token_ids if self._tokenizer else ()
            return structural_tag.grammar_of(json.loads(text), tokens, control, part)
        except Exception as error:  # the converters raise what they like
            raise ValueError(f"structured_outputs.{kind} cannot be used: {_sentence(str(error))}") from error

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar at its beginning. Raises ValueError in one sentence."""
        key = self.definition(params)
        num_words = -(-self._vocab_size // 32)
        with self._lock:
            matcher = self._compiled.get(key)
        if matcher is None:
            llguidance = _llguidance()
            limits = llguidance.LLParserLimits(**PARSER_LIMITS)
            matcher = llguidance.LLMatcher(self._vocabulary(), key, limits=limits, log_level=0)
            grammar = Grammar(matcher, num_words)
            if grammar.error is None:
                grammar.mask()  # some grammars turn out too complex here, and the work is kept for the copies
            if grammar.error is not None:
                raise ValueError(f"structured_outputs.{_kind(params)} cannot be used: {grammar.error}")
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return Grammar(matcher.deep_copy(), num_words)

    def _special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that llguidance makes from no text, by name."""
        known = self._vocabulary()
        assert self._tokenizer is not None
        added = self._tokenizer.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if known.is_special_token(number)}

    def _vocabulary(self) -> "LLTokenizer":
        with self._lock:
            if self._tokens is None:
                tokenizer = require_tokenizer(self._tokenizer, self._folder)
                if not self._eos_token_ids:
                    raise ValueError(
                        "structured_outputs wants a model with an end-of-sequence token, and this one has none"
                    )
                try:
                    self._tokens = _llguidance().LLTokenizer(
                        tokenizer.backend.to_str(),
                        n_vocab=max(self._vocab_size, tokenizer.vocab_size),
                        eos_token=self._eos_token_ids,
                    )
                except Exception as error:  # foreign code, which raises what it likes
                    raise ValueError(
                        "structured_outputs wants a tokenizer whose tokens are bytes (byte-level or with byte "
                        f"fallback), and that of this model is not: {_sentence(str(error))}"
                    ) from error
            return self._tokens


def _options(params: StructuredOutputsParams) -> Any:
    """How the text of JSON may look, in llguidance's words."""
    return {
        "whitespace_flexible": not params.disable_any_whitespace,
        "whitespace_pattern": params.whitespace_pattern,
    }


def _expression_grammar(kind: str, text: str) -> str:
    """The Lark grammar of a "regex", or of a "grammar" in any notation."""
    if kind == "regex":
        grammars = json.loads(_llguidance().LLMatcher.grammar_from_regex(text))["grammars"]
        return grammars[0]["lark_grammar"]
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(text)


def _kind(params: StructuredOutputsParams) -> str:
    names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    return next(name for name in names if getattr(params, name) is not None)


def _llguidance():
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ValueError(
            "structured_outputs needs the package llguidance: install rimuru-jax[structured]"
        ) from error
    return llguidance


def _sentence(message: str) -> str:
    """The first thing a message of several lines says, in one line of a bearable length."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return reason if len(reason) <= 200 else f"{reason[:200]}..."
