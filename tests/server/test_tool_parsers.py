"""Tool calls in texts: written by a generator that knows them, read back, and read in pieces."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rimuru_jax.server.protocol import ChatCompletionRequest
from rimuru_jax.server.tool_parsers import PARSERS, Parsed, ToolCall, hermes, json_calls, qwen3_coder
from rimuru_jax.server.tools import ToolDeltas, ToolUse

TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "time": {"type": "object", "properties": {}},
}
NAMES = st.sampled_from(["weather", "time", "no such"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just("</tool_call>") | st.just('{"name": "x"'),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
PROSE = st.text(alphabet="ab <>\n/_tolcr{", max_size=12).filter(lambda text: "<tool_call>" not in text)


def calls(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def check_prefixes(parse, text: str, end: Parsed) -> None:
    """What a stream was told is the beginning of what it is told later."""
    before = Parsed()
    for length in range(len(text) + 1):
        now = parse(text[:length], False, TOOLS) if length < len(text) else end
        assert now.content.startswith(before.content)
        assert len(now.calls) >= len(before.calls)
        for old, new in zip(before.calls, now.calls, strict=False):
            assert new.name == old.name and new.arguments.startswith(old.arguments)
        before = now


@given(PROSE, st.lists(st.tuples(NAMES, ARGUMENTS, st.booleans()), max_size=3), st.sampled_from([None, 1]))
@settings(max_examples=100)
@example("", [("weather", {"city": "</tool_call>"}, False)], None)
def test_hermes(prose, written, indent):
    if "<tool_call>" in prose + "<tool_call>"[:-1] and written:
        prose += "."
    text = prose
    for name, arguments, late_name in written:
        members = {"name": name, "arguments": arguments}
        if late_name:
            members = dict(reversed(members.items()))
        text += f"<tool_call>\n{json.dumps(members, indent=indent)}\n</tool_call>\n"
    parsed = hermes(text, True, TOOLS)
    assert parsed.content == prose and calls(parsed) == [(name, arguments) for name, arguments, _ in written]
    check_prefixes(hermes, text, parsed)


@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3))
@settings(max_examples=50)
def test_required_calls(written):
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in written])
    parsed = json_calls(text, True, TOOLS)
    assert parsed.content == "" and calls(parsed) == written
    check_prefixes(json_calls, text, parsed)


VALUES = st.text(alphabet="ab1 {\n\"'é", max_size=6).filter(lambda text: not text.startswith("\n") and not text.endswith("\n"))  # fmt: skip


@given(PROSE, VALUES, st.none() | st.integers(), st.booleans())
@settings(max_examples=100)
def test_qwen3_coder(prose, city, days, tight):
    space = "" if tight else "\n"
    text = prose + f"<tool_call>{space}<function=weather>{space}<parameter=city>\n{city}\n</parameter>{space}"
    if days is not None:
        text += f"<parameter=days>{space}{days}{space}</parameter>{space}"
    text += f"</function>{space}</tool_call>"
    parsed = qwen3_coder(text, True, TOOLS)
    expected = {"city": city} | ({} if days is None else {"days": days})
    assert parsed.content == prose and calls(parsed) == [("weather", expected)]
    check_prefixes(qwen3_coder, text, parsed)


@given(
    st.text(alphabet='<>tool_call/{}":,name[]arguments \\=function', max_size=60),
    st.sampled_from(sorted(PARSERS)),
)
@settings(max_examples=200)
@example('<tool_call>{"name": "a", "arguments": {"x"</tool_call>', "hermes")
@example("<tool_call>no json</tool_call> and more", "hermes")
@example('<tool_call>{"a": "</tool_call>", "name": "b"}</tool_call>', "hermes")
@example("<tool_call><function=a><parameter=b>1</tool_call>", "qwen3_coder")
def test_whatever_a_model_writes_is_never_taken_back(text, name):
    check_prefixes(PARSERS[name], text, PARSERS[name](text, True, TOOLS))


def test_what_is_no_call_is_content():
    for text in (
        "<tool_call>no json</tool_call> and more",
        '<tool_call>{"n": 1}</tool_call>',
        "a < b",
        "<tool_ca",
    ):
        assert hermes(text, True, TOOLS) == Parsed(text, [])
    assert hermes("a <tool_ca", False, TOOLS) == Parsed("a ", [])


def test_types_of_xml_values():
    def read(value: str, key: str = "x") -> Any:
        text = f"<tool_call><function=weather><parameter={key}>{value}</parameter></function></tool_call>"
        return json.loads(qwen3_coder(text, True, TOOLS).calls[0].arguments)[key]

    assert read("12", "city") == "12" and read("12", "days") == 12 and read("[1, {}]") == [1, {}]
    assert read("True") is True and read("None") == "None" and read("NaN") == "NaN" and read("a b") == "a b"


def request(**fields: Any) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": s}} for name, s in TOOLS.items()]
    return ChatCompletionRequest.model_validate({"messages": [], "tools": tools} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "wants a server that was started with --enable-auto-tool-choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice is 'required', but there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "names 'x', but the tools are weather, time"),
        ({"tool_choice": "weather"}, "tool_choice is 'weather', it must be 'auto', 'none', 'required' or"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] is"),
        ({"tools": [{"function": {"name": "a", "parameters": 3}}]}, "parameters is 3, not a JSON schema"),
        ({"tools": [{"function": {"name": "a"}}] * 2}, "has the function 'a' twice"),
    ],
)  # fmt: skip
def test_choices_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        ToolUse(request(**fields), None)


def test_definitions_of_tools_stay_reachable():
    own = {"$defs": {"A": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}
    tools = [{"function": {"name": name, "parameters": own}} for name in ("one", "two")]
    use = ToolUse(request(tools=tools, tool_choice="required", parallel_tool_calls=False), None)
    assert use.structure is not None and isinstance(use.structure.json, str)
    schema = json.loads(use.structure.json)
    assert schema["$defs"] == own["$defs"] and schema["maxItems"] == 1
    other = {"function": {"name": "three", "parameters": {"$defs": {"A": {"type": "string"}}}}}
    with pytest.raises(ValueError, match="two tools define 'A' in different ways"):
        ToolUse(request(tools=[*tools, other], tool_choice="required"), None)


def test_deltas_add_up():
    text = 'Hm. <tool_call>{"name": "time", "arguments": {"zone": "x"}}</tool_call><tool_call>{"name": "weather"}</tool_call>'
    deltas = ToolDeltas(ToolUse(request(), hermes))
    content, found = "", []
    for length in range(len(text) + 1):
        delta, _ = deltas.next(text[:length], length == len(text))
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(found) and call["type"] == "function"
                found.append(ToolCall(**call["function"]))
            else:
                last = found[call["index"]]
                found[call["index"]] = ToolCall(last.name, last.arguments + call["function"]["arguments"])
    assert content == "Hm. " and found == [ToolCall("time", '{"zone": "x"}'), ToolCall("weather", "{}")]
