"""Tools of a chat: which the model may or must call, and its calls as OpenAI's clients expect them."""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from rimuru_jax.sampling_params import StructuredOutputsParams
from rimuru_jax.server.protocol import ChatCompletionRequest
from rimuru_jax.server.tool_parsers import Parsed, ToolCall, ToolParser, Tools, json_calls

# Between the tokens of calls that a grammar asks for: a model that may write spaces without end sometimes does.
_SPACES = " ?"


class ToolUse:
    """What `tools` and `tool_choice` of one request mean. Raises ValueError in one sentence.

    Attributes:
        structure: the grammar that makes the model call; None where it may answer with text.
    """

    def __init__(self, body: ChatCompletionRequest, parser: ToolParser | None) -> None:
        self.structure: StructuredOutputsParams | None = None
        self._parse: Callable[[str, bool], Parsed] | None = None
        self._called_reason = "tool_calls"
        tools, choice = _schemas(body.tools or []), body.tool_choice
        if choice is None:
            choice = "auto" if tools else "none"
        if choice == "none":
            return
        if choice != "auto" and not tools:
            raise ValueError(f"tool_choice is {choice!r:.100}, but there are no tools")
        if choice == "auto":
            if not tools:
                return
            if parser is None:
                raise ValueError(
                    "tool_choice 'auto' wants a server that was started with --enable-auto-tool-choice and "
                    "--tool-call-parser; use 'required', 'none' or the name of a function"
                )
            self._parse = lambda text, finished: parser(text, finished, tools)
        elif choice == "required":
            schema = _required_schema(tools, at_most_one=body.parallel_tool_calls is False)
            self._parse = lambda text, finished: json_calls(text, finished, tools)
            self.structure = StructuredOutputsParams(json=schema, whitespace_pattern=_SPACES)
        else:
            name = _chosen(choice)
            if name not in tools:
                raise ValueError(f"tool_choice names {name!r}, but the tools are {', '.join(tools)}")
            self._parse = lambda text, finished: Parsed("", [ToolCall(name, text)])
            self._called_reason = "stop"  # as OpenAI says of a call that was asked for by name
            self.structure = StructuredOutputsParams(json=dict(tools[name]), whitespace_pattern=_SPACES)

    @property
    def parses(self) -> bool:
        """Whether there can be calls."""
        return self._parse is not None

    def parse(self, text: str, finished: bool) -> Parsed:
        return self._parse(text, finished) if self._parse else Parsed(text)

    def finish_reason(self, parsed: Parsed, reason: str | None) -> str | None:
        return self._called_reason if parsed.calls and reason == "stop" else reason

    def message(self, text: str) -> tuple[dict[str, Any], Parsed]:
        """The assistant's message of a finished output."""
        parsed = self.parse(text, True)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": _function(call)} for call in parsed.calls
            ]
        return message, parsed


class ToolDeltas:
    """What a client was told of one choice of a stream, and what comes next."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._sent = Parsed()

    def next(self, text: str, finished: bool) -> tuple[dict[str, Any], Parsed]:
        """Fields of the next delta, none if there is nothing new."""
        parsed, sent = self._use.parse(text, finished), self._sent
        self._sent = parsed
        delta: dict[str, Any] = {}
        if (new := parsed.content[len(sent.content) :]) or not self._use.parses:
            delta["content"] = new
        calls = []
        for index, call in enumerate(parsed.calls):
            if index >= len(sent.calls):
                calls.append(
                    {"index": index, "id": _call_id(), "type": "function", "function": _function(call)}
                )
            elif new := call.arguments[len(sent.calls[index].arguments) :]:
                calls.append({"index": index, "function": {"arguments": new}})
        if calls:
            delta["tool_calls"] = calls
        return delta, parsed


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _schemas(tools: list[dict[str, Any]]) -> Tools:
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
            raise ValueError(
                f"tools[{number}] is {tool!r:.100}, it must be {{'type': 'function', 'function': {{'name': ...}}}}"
            )
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if not isinstance(parameters, Mapping | None):
            raise ValueError(f"tools[{number}].function.parameters is {parameters!r:.100}, not a JSON schema")
        if name in schemas:
            raise ValueError(f"tools has the function {name!r} twice")
        schemas[name] = parameters or {"type": "object", "properties": {}}
    return schemas


def _required_schema(tools: Tools, *, at_most_one: bool) -> dict[str, Any]:
    """Of an array of calls. Definitions go to the top, where the references of the tools look for them."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, schema in tools.items():
        own = dict(schema)
        for key in ("$defs", "definitions"):
            for definition, content in (own.pop(key, None) or {}).items():
                if definitions.setdefault(key, {}).setdefault(definition, content) != content:
                    raise ValueError(f"two tools define {definition!r} in different ways; give it two names")
        calls.append({
            "type": "object",
            "properties": {"name": {"enum": [name]}, "parameters": own},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        })  # fmt: skip
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
    return {**schema, "maxItems": 1} if at_most_one else schema


def _chosen(choice: str | dict[str, Any]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            f"tool_choice is {choice!r:.100}, it must be 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    return name
