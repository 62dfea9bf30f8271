"""Tool calls in the text of a model: what is content, which functions are called, and with what arguments.

A parser is a function of all the text so far. For each beginning of a text it gives a beginning of what it gives for the
text, so that a stream sends the difference of two results and never takes anything back.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

type Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of functions, by name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text, as far as it has come."""


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str = ""
    calls: Sequence[ToolCall] = field(default_factory=tuple)


type ToolParser = Callable[[str, bool, Tools], Parsed]
"""Of all text so far, whether it is finished, and the tools."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def hermes(text: str, finished: bool, tools: Tools) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""
    return _tagged(text, finished, lambda body: _json_call(body, 0))


def qwen3_coder(text: str, finished: bool, tools: Tools) -> Parsed:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""
    return _tagged(text, finished, lambda body: _xml_call(body, tools))


PARSERS: Mapping[str, ToolParser] = {"hermes": hermes, "qwen3_coder": qwen3_coder}
"""By vLLM's names."""


def json_calls(text: str, finished: bool, tools: Tools) -> Parsed:
    """`[{"name": ..., "parameters": {...}}, ...]`: what a grammar for required calls makes a model write."""
    calls, position = [], text.find("[") + 1
    while position and (start := text.find("{", position)) >= 0:
        call, end = _json_call(text, start)
        if call is not None:
            calls.append(call)
        if end is None:
            break
        position = end
    return Parsed("", calls)


def _tagged(text: str, finished: bool, read: Callable[[str], tuple[ToolCall | None, int | None]]) -> Parsed:
    """Calls between tags. `read` gives the call that a text begins with, once its name is known, and where it ends."""
    content, calls, position = "", [], 0
    while True:
        start = text.find(_OPEN, position)
        outside = text[position : start if start >= 0 else len(text)]
        if start < 0 and not finished:
            outside = outside[: len(outside) - _possible_start(outside)]
        content += outside.lstrip() if calls else outside
        if start < 0:
            return Parsed(content, calls)
        body = text[start + len(_OPEN) :]
        call, end = read(body)
        close = body.find(_CLOSE, end or 0)
        if call is not None:
            calls.append(call)
        elif end is None and not finished and body.lstrip().startswith("{"):
            return Parsed(content, calls)  # the tag that closes may be within a text
        elif close >= 0 or finished:  # no call at all: the user shall see what the model wrote
            content += text[start : start + len(_OPEN) + (close + len(_CLOSE) if close >= 0 else len(body))]
        if close < 0 or (call is not None and end is None):
            return Parsed(content, calls)
        position = start + len(_OPEN) + close + len(_CLOSE)


def _possible_start(text: str) -> int:
    """Characters at the end of `text` that may be the beginning of a tag."""
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)


# JSON ---------------------------------------------------------------------------------------------------------------

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[^\s,{}\[\]\"]+")
_MARK = re.compile(r'[{}\[\]"]')


def _json_call(text: str, start: int) -> tuple[ToolCall | None, int | None]:
    start = _skip(text, start)
    if text[start : start + 1] != "{":
        return None, None
    name, arguments = None, None
    for key, begin, end in _members(text, start):  # of keys that come twice the first counts
        if key == "name" and name is None and end is not None and text[begin] == '"':
            name = _decoded(text[begin:end])
        if key in ("arguments", "parameters") and arguments is None:
            arguments = text[begin:end]
    end = _value_end(text, start)
    if arguments is None:
        arguments = "" if end is None else "{}"
    return ToolCall(name, arguments) if name else None, end


def _members(text: str, start: int) -> Iterator[tuple[str, int, int | None]]:
    """Keys of the object at `start` and where their values are, as far as the text goes."""
    position = start + 1
    while True:
        position = _skip(text, position)
        string = _STRING.match(text, position)
        if string is None:
            return
        position = _skip(text, string.end())
        if text[position : position + 1] != ":":
            return
        begin = _skip(text, position + 1)
        if begin == len(text):
            return
        end = _value_end(text, begin)
        yield str(_decoded(string.group())), begin, end
        if end is None:
            return
        position = _skip(text, end)
        if text[position : position + 1] != ",":
            return
        position += 1


def _value_end(text: str, start: int) -> int | None:
    """Where the JSON value at `start` ends; None while that is not known."""
    if text[start] == '"':
        string = _STRING.match(text, start)
        return string.end() if string else None
    if text[start] not in "{[":
        scalar = _SCALAR.match(text, start)
        end = scalar.end() if scalar else start
        return end if end < len(text) else None
    depth, position = 0, start
    while (mark := _MARK.search(text, position)) is not None:
        position = mark.end()
        if mark.group() == '"':
            string = _STRING.match(text, mark.start())
            if string is None:
                return None
            position = string.end()
        else:
            depth += 1 if mark.group() in "{[" else -1
            if not depth:
                return position
    return None


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space is not None
    return space.end()


def _decoded(string: str) -> Any:
    try:
        return json.loads(string, strict=False)
    except ValueError:
        return string.strip('"')


# XML ----------------------------------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_END = re.compile(r"\s*</function>")


def _xml_call(text: str, tools: Tools) -> tuple[ToolCall | None, int | None]:
    function = _FUNCTION.match(text)
    if function is None:
        return None, None
    name, position = function.group(1).strip(), function.end()
    properties = tools.get(name, {}).get("properties")
    members = []
    while (parameter := _PARAMETER.match(text, position)) is not None:
        key, value = parameter.group(1).strip(), parameter.group(2).removeprefix("\n").removesuffix("\n")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        members.append(f"{json.dumps(key, ensure_ascii=False)}: {_typed(value, schema)}")
        position = parameter.end()
    end = _END.match(text, position)
    arguments = "{" + ", ".join(members) + ("}" if end else "")
    return ToolCall(name, arguments), end.end() if end else None


def _typed(value: str, schema: Any) -> str:
    """The value as JSON: as text if the schema says so, else whatever it can be read as."""
    if not (isinstance(schema, Mapping) and schema.get("type") == "string"):
        for text in (value, value.lower()):  # True and None are what some models write
            try:
                return json.dumps(json.loads(text, parse_constant=_no_constant), ensure_ascii=False)
            except (ValueError, RecursionError):
                continue
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
