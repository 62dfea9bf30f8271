"""The official client against the embedded default model."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from rimuru_jax import Engine, StructuredOutputsParams
from rimuru_jax.server import responses
from rimuru_jax.server.grammar_check import GrammarCheck
from rimuru_jax.server.refusals import RefusedError
from tests.server.running import running


class Capital(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    country: Literal["France", "Italy"]


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    # In float32 a token does not depend on who else is in the batch.
    engine = Engine(
        dtype="float32",
        page_pool_bytes=256 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_model_len=512,
    )
    with running(engine, served_model_name="smol", tool_call_parser="hermes") as url:
        yield engine, url


@pytest.fixture(scope="module")
def client(served: tuple[Engine, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_chunks_are_written_as_whole_bodies_would_be():
    head, choice = {"id": 'a"b', "created": 3}, {"index": 0, "text": 'é\n"', "stop_reason": None}
    for rest in ({}, {"usage": None}, {"usage": {"total_tokens": 3}}):
        for before in (head, {}):
            chunk = responses.ChunkFormat(before)(choice, **rest)
            assert chunk == responses.event({**before, "choices": [choice], **rest})


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("smol", "rimuru_jax")


def test_chat(client):
    answer = client.chat.completions.create(model="smol", messages=QUESTION, temperature=0, max_tokens=24)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content and choice.message.role == "assistant"
    assert answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    shorter = client.chat.completions.create(
        model="smol", messages=QUESTION, temperature=0, max_completion_tokens=2
    )
    assert shorter.choices[0].finish_reason == "length" and shorter.usage.completion_tokens == 2
    assert choice.message.content.startswith(shorter.choices[0].message.content)


def test_streams_add_up_to_the_answer(client):
    options = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content and len(chunks) > 4
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_chat_logprobs(client):
    options = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 4}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        # Greedy: the chosen token is the most probable one.
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob
        assert bytes(entry.bytes).decode() == entry.token
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_completions_of_several_prompts(client, served):
    prompts = ["The capital of France is", "The water cycle"]
    answer = client.completions.create(
        model="smol", prompt=prompts, max_tokens=6, temperature=0, n=2, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text == " Paris.\n\nThe answer"
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert all(
        answer.choices[0].text[at:].startswith(t)
        for at, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    )
    ids = httpx.post(f"{served[1]}/tokenize", json={"prompt": prompts[0]}).json()["tokens"]
    by_ids = client.completions.create(model="smol", prompt=ids, max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == answer.choices[0].text
    echoed = client.completions.create(
        model="smol", prompt=prompts[0], max_tokens=2, temperature=0, extra_body={"echo": True}
    )
    assert echoed.choices[0].text == "The capital of France is Paris."


def test_stop_bias_and_seed(client):
    prompt = "The capital of France is"
    stopped = client.completions.create(
        model="smol", prompt=prompt, max_tokens=8, temperature=0, stop=[".", "\n"]
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" Paris", "stop")
    token = 260  # whatever it is, 100 makes it certain
    biased = client.completions.create(
        model="smol", prompt=prompt, max_tokens=3, temperature=0, logit_bias={str(token): 100}, logprobs=0
    )
    assert len(set(biased.choices[0].logprobs.tokens)) == 1
    one, same, other = (
        client.completions.create(model="smol", prompt=prompt, max_tokens=8, temperature=1.5, seed=seed)
        .choices[0]
        .text
        for seed in (1, 1, 2)
    )
    assert one == same != other


def test_concurrent_streams_give_the_same_text_as_one_at_a_time(client):
    def stream(seed: int) -> str:
        chunks = client.completions.create(
            model="smol", prompt="Once upon a time", max_tokens=10, temperature=0.9, seed=seed, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

    alone = [stream(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(stream, range(6)))
    assert together == alone and len(set(alone)) > 3


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Italy"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def test_json_schema(client):
    options = {
        "model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}},
    }  # fmt: skip
    answer = client.chat.completions.create(**options).choices[0]
    value = json.loads(answer.message.content)
    assert (
        value["country"] == "France" and set(value) == {"city", "country"} and answer.finish_reason == "stop"
    )
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == answer.message.content
    answer = client.chat.completions.create(**options | {"response_format": {"type": "json_object"}}).choices[
        0
    ]
    assert answer.message.content.startswith("{")
    parsed = client.chat.completions.parse(**options | {"response_format": Capital}).choices[0].message.parsed
    assert parsed.country in ("France", "Italy")


def test_structured_outputs_of_vllm(client):
    def complete(**what: object) -> str:
        answer = client.completions.create(
            model="smol", prompt="The capital of France is", max_tokens=20, temperature=0,
            extra_body={"structured_outputs": what},
        )  # fmt: skip
        return answer.choices[0].text

    assert complete(choice=["Rome", "Paris", "Berlin"]) == "Paris"
    assert re.fullmatch(r"[A-Z]{4}\d", complete(regex=r"[A-Z]{4}\d"))
    assert re.fullmatch(r"\([a-z]{3}\)", complete(grammar='start: "(" /[a-z]{3}/ ")"'))
    numbers = {
        "structures": [{"begin": " Paris", "schema": {"enum": [12, 34]}, "end": "!"}],
        "triggers": [" Paris"],
    }
    assert re.fullmatch(r"(?s).* Paris(12|34)!.*", complete(structural_tag=json.dumps(numbers)))


def test_structural_tag_as_a_response_format(client):
    city = {
        "type": "tag",
        "begin": "<city>",
        "content": {"type": "regex", "pattern": "[A-Z][a-z]{2,8}"},
        "end": "</city>",
    }
    form = {"type": "triggered_tags", "triggers": ["<city>"], "tags": [city], "at_least_one": True}
    answer = client.chat.completions.create(
        model="smol", messages=QUESTION, temperature=0, max_tokens=30,
        extra_body={"response_format": {"type": "structural_tag", "format": form}},
    )  # fmt: skip
    assert re.match("<city>[A-Z][a-z]{2,8}</city>", answer.choices[0].message.content)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_time")
]


def streamed_calls(stream) -> tuple[str, list[tuple[str, str]], str]:
    """Content, (name, arguments) of each call, and the reason of a stream, put together as clients do."""
    content, calls, reason = "", [], ""
    for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                calls.append((call.function.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.function.arguments)
        reason = choice.finish_reason or reason
    return content, calls, reason


def test_required_and_named_tools(client):
    options = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 60, "tools": TOOLS}
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**options, **one).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name in ("get_weather", "get_time") and set(json.loads(call.function.arguments)) == {
        "city"
    }
    content, calls, reason = streamed_calls(client.chat.completions.create(**options, **one, stream=True))
    assert (content, reason) == ("", "tool_calls")
    assert calls == [(call.function.name, call.function.arguments)]

    named = {"tool_choice": {"type": "function", "function": {"name": "get_time"}}}
    choice = client.chat.completions.create(**options, **named).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_time" and choice.finish_reason == "stop"
    content, calls, _ = streamed_calls(client.chat.completions.create(**options, **named, stream=True))
    assert (content, calls) == ("", [("get_time", call.function.arguments)])


def test_tools_that_the_model_chooses(client):
    # A model of this size does not call tools by itself: a grammar makes it write what a larger one would.
    written = 'Sure. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    options = {
        "model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 60, "tools": TOOLS,
        "extra_body": {"structured_outputs": {"choice": [written]}},
    }  # fmt: skip
    choice = client.chat.completions.create(**options).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    assert (choice.message.content, choice.finish_reason) == ("Sure. ", "tool_calls")
    streamed = streamed_calls(client.chat.completions.create(**options, stream=True))
    assert streamed == ("Sure. ", [("get_weather", '{"city": "Paris"}')], "tool_calls")
    answered = [
        *QUESTION,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    options = {"model": "smol", "messages": answered, "temperature": 0, "max_tokens": 4, "tools": TOOLS}
    free = client.chat.completions.create(**options).choices[0]
    assert free.message.tool_calls is None and free.message.content
    assert client.chat.completions.create(**options, tool_choice="none").choices[0].message.content


def test_a_schema_that_takes_for_ever_is_stopped(served):
    endless = {"allOf": [{"type": "string", "pattern": f"a{{{i},}}b"} for i in range(40)]}
    check = GrammarCheck(served[0].grammars, seconds=0.5)
    begin = time.monotonic()
    with pytest.raises(RefusedError, match="was not compiled within"):
        asyncio.run(check(StructuredOutputsParams(json=endless)))
    assert time.monotonic() - begin < 10


def test_tokenize_and_back(served):
    url = served[1]
    answer = httpx.post(f"{url}/tokenize", json={"messages": QUESTION}).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 512
    text = httpx.post(f"{url}/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert "What is the capital of France?" in text and text.endswith("<|im_start|>assistant\n")


def test_metrics_and_pool(client, served):
    engine, url = served
    client.completions.create(model="smol", prompt="One", max_tokens=3)
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    values = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")
    }
    label = '{model_name="smol"}'
    assert values[f"vllm:generation_tokens_total{label}"] >= 3
    assert (
        values[f"vllm:time_to_first_token_seconds_count{label}"]
        == values[f"vllm:e2e_request_latency_seconds_count{label}"]
    )
    assert values['vllm:request_success_total{finished_reason="length",model_name="smol"}'] >= 1
    assert values[f"rimuru:resident_experts{label}"] > 0 and values[f"vllm:num_requests_running{label}"] == 0
    names = {line.split("{")[0] for line in lines if not line.startswith("#")}
    panels = json.loads((Path(__file__).parents[2] / "dashboards" / "rimuru.json").read_text())["panels"]
    shown = " ".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    used = set(re.findall(r"(?:vllm|rimuru):\w+", shown))
    assert len(used) > 25 and used <= names
    pool = httpx.get(f"{url}/v1/pool").json()
    assert sum(pool["experts"]["resident"]) == engine.experts.resident.sum()
    assert pool["requests"] == [] and pool["kinds"]["kv"]["used"] == 0
    assert {"admitted", "finished"} <= {event["name"] for event in pool["events"]}
    total = pool["kinds"]["expert"]["total"]
    assert total + pool["free_huge_pages"] == pool["huge_pages"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {"prompt": "x", "model": "gpt-4"}, 404, "model 'gpt-4' is not served here, only 'smol'"),
        ("/v1/completions", {}, 400, "prompt: Field required"),
        ("/v1/completions", {"prompt": []}, 400, "prompt is empty"),
        ("/v1/completions", {"prompt": [[]]}, 400, "the prompt is empty"),
        ("/v1/completions", {"prompt": [10**6]}, 400, "prompt token id 1000000 is outside the vocabulary"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature is -1.0; wanted a number from 0"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        ("/v1/completions", {"prompt": "x", "n": 129}, 400, "129 completions were asked for in one request"),
        ("/v1/completions", {"prompt": "x" * 9000, "stream": True}, 400, "max_model_len is 512"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix is 'y', but this server does not support it"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias has the key 'a'"),
        ("/v1/completions", {"prompt": "x", "request_id": "\ud800"}, 400, "request_id: "),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "half of a surrogate pair"),
        ("/v1/chat/completions", {"messages": []}, 400, ""),
        ("/v1/chat/completions", {"messages": QUESTION, "top_logprobs": 2}, 400, "wants logprobs to be true"),
        ("/v1/chat/completions", {"messages": QUESTION, "chat_template": "x"}, 400, "chat_template is not taken"),
        ("/v1/chat/completions", {"messages": QUESTION, "chat_template_kwargs": {"chat_template": "x"}}, 400, "no variable of templates"),
        ("/v1/chat/completions", {"messages": QUESTION, "tool_choice": "required"}, 400, "but there are no tools"),
        ("/v1/chat/completions", {"messages": QUESTION, "tools": [{}]}, 400, "tools[0] is {}"),
        ("/v1/chat/completions", {"messages": QUESTION, "tools": [{"function": {"name": "f"}}], "tool_choice": "required", "response_format": {"type": "json_object"}}, 400, "tool_choice demands a call"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, 400, "arguments of a tool call are no JSON"),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}, 400, "echo is not supported together with logprobs"),
        ("/v1/chat/completions", {"messages": QUESTION, "response_format": {"type": "xml"}}, 400, "response_format.type is 'xml'"),
        ("/v1/chat/completions", {"messages": QUESTION, "response_format": {"type": "json_schema"}}, 400, "json_schema.schema is None"),
        ("/v1/chat/completions", {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, 400, "Invalid type: no"),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "structural_tag"}}, 400, "structural_tag cannot be used: it has the format None"),
        ("/v1/completions", {"prompt": "x", "guided_regex": "a"}, 400, "guided_regex is called structured_outputs.regex now"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regx": "a"}}, 400, "structured_outputs has 'regx'"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}, "stream": True}, 400, "unclosed group"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400, "give one"),
        ("/tokenize", {}, 400, "give either prompt or messages"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens has -1"),
    ],
)  # fmt: skip
def test_bad_requests_get_one_sentence(served, path, body, status, message):
    json_type = {"Content-Type": "application/json"}
    answer = httpx.post(f"{served[1]}{path}", content=json.dumps(body), headers=json_type, timeout=60)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"] and "\n" not in error["message"] and error["code"] == status


def test_bodies_that_are_no_json(served):
    for content in (b"", b"{", b"\xff\xfe", b'{"prompt": ' + b"[" * 100_000, b"[]", b'"x"'):
        for headers in ({}, {"Content-Type": "application/json"}):
            answer = httpx.post(f"{served[1]}/v1/completions", content=content, headers=headers)
            assert answer.status_code == 400, content[:20]
    untyped = httpx.post(
        f"{served[1]}/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}
    )
    assert "Content-Type is 'text/plain', it must be application/json" in untyped.json()["error"]["message"]
    assert httpx.get(f"{served[1]}/v1/completions").status_code == 405
    assert httpx.get(f"{served[1]}/nothing").json()["error"]["message"] == "GET /nothing: Not Found"
    assert httpx.get(f"{served[1]}/health").json() == {"status": "ok"}
