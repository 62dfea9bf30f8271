"""Text in, text out: the tokenizer of a Hugging Face folder, its chat template, and streaming detokenization.

Reads ``tokenizer.json`` with the ``tokenizers`` library; ``transformers`` is not needed. A model without that file
still serves prompts given as token ids: `load_tokenizer` then returns None, and `require_tokenizer` says so in one
sentence where text is asked for.
"""

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from rimuru_jax.chat_template import Message, render_chat

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model folder.

    Attributes:
        backend: the underlying ``tokenizers.Tokenizer``.
        special_tokens: text of the named special tokens (``bos_token``, ``eos_token``, ...), as templates see them.
        special_token_ids: ids of all added tokens marked special.
        chat_templates: Jinja source by name; the usual single one is called "default".
        eos_token_ids: every id that ends a sequence, from ``read_eos_token_ids`` and the tokenizer's own.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ):
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        own = self.eos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*eos_token_ids, *([] if own is None else [own])])
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's logits may be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds what the post-processor of tokenizer.json asks for."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            if not isinstance(text, str):
                raise
            raise ValueError(
                "the text holds half of a surrogate pair, which is not valid Unicode; send well-formed text"
            ) from error

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of ``token_ids``; ids outside the vocabulary give no text, broken UTF-8 gives U+FFFD.

        ``spaces_between_special_tokens`` only concerns tokenizers without a decoder: these separate all tokens by
        spaces, and False leaves none between neighbouring special tokens.
        """
        return self.decoder(skip_special_tokens, spaces_between_special_tokens)(list(token_ids))

    def decoder(
        self, skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> Callable[[list[int]], str]:
        """`decode` with these settings: for one token after another it takes half the time."""
        if spaces_between_special_tokens or skip_special_tokens or self.backend.decoder is not None:
            return functools.partial(self.backend.decode, skip_special_tokens=skip_special_tokens)
        return self._decode_spaced

    def _decode_spaced(self, ids: list[int]) -> str:
        pieces: list[str] = []
        after_special = True
        for token_id in ids:
            if (token := self.backend.id_to_token(token_id)) is None:
                continue
            special = token_id in self.special_token_ids
            pieces.append(token if not pieces or (special and after_special) else f" {token}")
            after_special = special
        return "".join(pieces)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[False],
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int] | str:
        """The prompt for a chat, as token ids or (``tokenize=False``) as text.

        Args:
            messages: the chat, oldest first.
            tools: JSON schemas of callable functions, for templates that know them.
            add_generation_prompt: end with the opening of the assistant's next message.
            chat_template: Jinja source or the name of one of the model's templates; by default the model's own
                (of several, "tool_use" when tools are given, else "default").
            **kwargs: further variables of the template.

        Raises:
            ValueError: no template, malformed messages, or the template itself fails or refuses.
        """
        prompt = render_chat(
            self._choose_template(chat_template, with_tools=tools is not None),
            messages,
            {
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self.special_tokens,
                **kwargs,
            },
        )
        # The template has written the special tokens itself.
        return self.encode(prompt, add_special_tokens=False) if tokenize else prompt

    def _choose_template(self, wanted: str | None, *, with_tools: bool) -> str:
        if wanted is not None:
            return self.chat_templates.get(wanted, wanted)
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self.chat_templates:
                return self.chat_templates[name]
        if self.chat_templates:
            names = ", ".join(sorted(self.chat_templates))
            raise ValueError(
                f"the model has no default chat template; choose one of {names} with chat_template"
            )
        raise ValueError(
            "the model has no chat template; give one with chat_template, or send a plain prompt"
        )


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into pieces of text as they come, and finds stop strings.

    The pieces joined are the decoded text, cut at the first stop string. Text is held back while it may still
    change: an unfinished UTF-8 character, and an end that may be the start of a stop string. The cost is linear in
    the number of tokens. After a stop, further tokens are ignored.

    The stop that ends first in the text wins, the longest of those that end together, no matter how the text is cut
    into tokens. A stop does not count when one of the first ``min_tokens`` tokens completes it.

    Args:
        prompt_token_ids: the prompt; decoders that drop the space at the start of a text need what precedes it.
        stop: stop strings, none of them empty.
        include_stop_str_in_output: cut the text after the stop string instead of before it.
        min_tokens: output tokens before stop strings count.
        skip_special_tokens, spaces_between_special_tokens: as in `Tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._stream = _TextStream(
            tokenizer.decoder(skip_special_tokens, spaces_between_special_tokens),
            tokenizer.special_token_ids if skip_special_tokens else (),
            prompt_token_ids,
        )
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise ValueError("stop holds an empty string, which every text contains; leave it out")
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # decoded text that may be the start of a stop string
        self.text = ""
        """All text returned so far."""
        self.stop_reason: str | None = None
        """The stop string that was found."""

    def add(self, token_id: int) -> str:
        """The text that has become certain with this token, often empty."""
        if self.stop_reason is not None:
            return ""
        self._num_tokens += 1
        return self._release(self._stream.push(token_id), last=False)

    def extend(self, token_ids: Sequence[int]) -> str:
        """`add` of one after another, at once where no stop string may be among them."""
        if self._stop or len(token_ids) == 1:
            return "".join([self.add(token_id) for token_id in token_ids])
        self._num_tokens += len(token_ids)
        return self._release(self._stream.push_all(token_ids), last=False)

    def finish(self) -> str:
        """The text held back at the end of the sequence; call it once, after the last token."""
        if self.stop_reason is not None:
            return ""
        return self._release(self._stream.flush(), last=True)

    def _release(self, new: str, *, last: bool) -> str:
        if not self._stop:
            self.text += new
            return new
        text = self._held + new
        if new and self._num_tokens > self._min_tokens and (match := self._find_stop(text)):
            start, end = match
            self.stop_reason = text[start:end]
            text, self._held = text[: end if self._include_stop else start], ""
        else:
            keep = 0 if last else self._possible_start(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text

    def _find_stop(self, text: str) -> tuple[int, int] | None:
        """First [start, end) of a stop that ends behind the held text; within it all ends were looked at before."""
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start))
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _possible_start(self, text: str) -> int:
        """Characters at the end of ``text`` that begin some stop string; the most of them."""
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stop):
                return length
        return 0


class _TextStream:
    """Decodes a growing list of ids by looking at a short window of the newest ones.

    The window holds the ids behind the last point where the text was whole, and before them those of the previous
    piece: decoders treat the first token of a text differently, so the window must not start with a new one.
    """

    # U+FFFD at the end may become a character. A character has at most four bytes, so at most three ids of one can
    # be waiting for the rest; decoders write one U+FFFD for each, one for all, or (byte fallback) one for each byte
    # of the whole run of bytes, finished characters before them included.
    _MAX_WAITING = 3
    # Ids enough to contain the undecided bytes at the end and what could reach into them from before.
    _MIN_WINDOW = 16

    def __init__(self, decode: Callable[[list[int]], str], ignored: Collection[int], context: Sequence[int]):
        self._decode = decode
        self._ignored = ignored
        self._window = [int(i) for i in context[-self._MIN_WINDOW :] if i not in ignored]
        if (text := decode(self._window)).endswith("\ufffd"):
            self._window, text = [], ""
        self._previous = len(self._window)  # ids of the previous piece, at the start of the window
        self._sent = len(text)  # characters of the window's text already returned

    def push(self, token_id: int) -> str:
        if token_id in self._ignored:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        undecided = len(text) - len(text.rstrip("\ufffd"))
        if len(self._window) - self._previous > self._MAX_WAITING:
            undecided = min(undecided, self._MAX_WAITING)  # broken UTF-8: the older part stays U+FFFD
        piece = text[self._sent : len(text) - undecided]
        self._sent += len(piece)
        if piece and not undecided:  # ids without text leave a later first token its context
            self._window = self._window[self._previous :]
            self._previous = len(self._window)
            self._sent = len(self._decode(self._window))
        elif len(self._window) > 2 * self._MIN_WINDOW:
            # Broken UTF-8 without end. What is cut off here was returned; the end decodes the same without it.
            unsent = len(text) - self._sent
            self._window = self._window[-self._MIN_WINDOW :]
            self._previous = 0
            self._sent = max(0, len(self._decode(self._window)) - unsent)
        return piece

    def push_all(self, token_ids: Sequence[int]) -> str:
        """`push` of one after another, with as few calls of the decoder as if they were one where no UTF-8 is broken."""
        ids = [i for i in token_ids if i not in self._ignored]
        window = self._window + ids
        text = self._decode(window)
        if not ids or "\ufffd" in text:
            return "".join([self.push(i) for i in ids])
        piece = text[self._sent :]
        self._previous = (
            1  # ids of the last piece: one, or those of the bytes of one character, and any without text
        )
        while (text := self._decode(window[-self._previous :])).startswith("\ufffd") or not text:
            if self._previous == len(window):
                break
            self._previous += 1
        self._window, self._sent = window[-self._previous :], len(text)
        return piece

    def flush(self) -> str:
        text = self._decode(self._window)
        piece, self._sent = text[self._sent :], len(text)
        return piece


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a model folder, or None when it has no ``tokenizer.json``.

    Raises:
        ValueError: a file of the tokenizer cannot be understood.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer of the tokenizers library: {error}") from error
    # Both may be left in the file by training scripts; prompts are never cut or padded here.
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, file)
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in _NAMED_TOKENS} | (extra if isinstance(extra, dict) else {})
    return Tokenizer(
        backend,
        special_tokens={name: _token_text(token) for name, token in named.items() if token is not None},
        chat_templates=_read_chat_templates(folder, config),
        eos_token_ids=read_eos_token_ids(folder),
    )


def require_tokenizer(tokenizer: Tokenizer | None, folder: str | Path | None) -> Tokenizer:
    """``tokenizer``, or a ValueError that says what to do when the model at ``folder`` (None: in memory) has none."""
    if tokenizer is None and folder is None:
        raise ValueError(
            "a model in memory has no tokenizer, so it cannot handle text; send prompts as token ids with "
            "detokenize=False, or name a folder with a tokenizer.json as the engine's tokenizer"
        )
    if tokenizer is None:
        raise ValueError(
            f"{folder} has no tokenizer.json, so it cannot handle text; "
            "send prompts as token ids with detokenize=False, or add the file"
        )
    return tokenizer


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Ids that end a sequence by ``generation_config.json``, else by ``config.json``; needs no tokenizer."""
    config = _read_json(Path(folder) / "config.json")
    for source in (
        _read_json(Path(folder) / "generation_config.json"),
        config,
        config.get("text_config") or {},
    ):
        if (ids := source.get("eos_token_id")) is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, but an object is wanted")
    return content


def _token_text(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, declared: dict[str, dict[str, Any]], file: Path
) -> None:
    """Add the tokens that only ``tokenizer_config.json`` knows."""
    for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
        text = token["content"]
        if backend.token_to_id(text) is None:
            options = {key: token[key] for key in ("lstrip", "rstrip", "single_word") if key in token}
            special = bool(token.get("special"))
            normalized = bool(token.get("normalized", not special))
            backend.add_tokens(
                [tokenizers.AddedToken(text, special=special, normalized=normalized, **options)]
            )
        if backend.token_to_id(text) != int(token_id):
            raise ValueError(
                f"tokenizer_config.json gives token {text!r} the id {token_id}, but {file} gives it "
                f"{backend.token_to_id(text)}; take both files from the same model"
            )


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found = config.get("chat_template") or {}
    if isinstance(found, str):
        return {"default": found}
    return {entry["name"]: entry["template"] for entry in found}
