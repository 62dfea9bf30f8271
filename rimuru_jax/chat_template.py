"""Chat templates: messages in, prompt text out, as the templates on the Hugging Face hub expect.

Templates are Jinja source that comes with a checkpoint, so they run in Jinja's sandbox. The environment offers
what that of ``transformers`` does (``raise_exception``, ``strftime_now``, a ``tojson`` that leaves HTML alone, loop
controls), since templates are written against it.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
"""One chat message: ``role``, and ``content`` as a string or a list of ``{"type": "text", "text": ...}`` parts."""


def render_chat(source: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """The prompt that the template ``source`` makes of ``messages``.

    The text parts of a message are joined by newlines; keys that are None count as absent.

    Raises:
        ValueError: malformed messages, or the template fails or refuses them.
    """
    plain = _plain_messages(messages)
    try:
        return _compile_template(source).render(messages=plain, **variables)
    except (
        Exception
    ) as error:  # a template is foreign code: whatever it raises is its answer to these messages
        raise ValueError(f"the chat template fails on these messages: {error}") from error


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages with text content as one string and without keys that are None."""
    if isinstance(messages, str | Mapping) or not messages:
        raise ValueError("messages must be a list of at least one {'role': ..., 'content': ...}")
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {number} must be an object with a string as 'role', got {message!r:.100}"
            )
        copy = {key: value for key, value in message.items() if value is not None}
        if "content" in copy:
            copy["content"] = _plain_content(copy["content"], number)
        elif "tool_calls" not in copy:
            raise ValueError(f"message {number} has neither 'content' nor 'tool_calls'")
        plain.append(copy)
    return plain


def _plain_content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the content of message {number} must be a string or a list, got {content!r:.100}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ValueError(
                f"message {number} may only have parts {{'type': 'text', 'text': ...}}, got {part!r:.100}"
            )
        texts.append(text)
    return "\n".join(texts)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here its content is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


@functools.lru_cache(maxsize=16)
def _compile_template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this does not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
