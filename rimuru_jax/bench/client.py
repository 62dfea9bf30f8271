"""One streamed request after another against an OpenAI-compatible server, with the time of every token.

By aiohttp, whose parser is C: a token costs it 50 us of a processor, and httpx 120, so that thousands of tokens a second
would wait for the client and not for the server.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from rimuru_jax.bench.report import BenchResult
from rimuru_jax.bench.workload import BenchRequest

type Backend = Literal["openai", "openai-chat"]

ENDPOINTS: dict[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}

LONGEST_EVENT = 1 << 20
"""Bytes of one event of a stream that are read, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and what all of them say."""

    base_url: str
    endpoint: str
    backend: Backend
    model: str
    body: dict[str, Any] = field(default_factory=dict)
    """Further fields: temperature, ignore_eos, ..."""


async def send(session: aiohttp.ClientSession, target: Target, request: BenchRequest) -> BenchResult:
    """Never raises for what a server or network does: the result says what went wrong."""
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.output_tokens,
        **target.body,
    }
    if target.backend == "openai":
        body["prompt"] = request.prompt
    else:
        body["messages"] = [{"role": "user", "content": request.prompt}]
    result = BenchResult(time.perf_counter(), prompt_tokens=request.prompt_tokens)
    last, chunks = result.start, 0
    try:
        async with session.post(f"{target.base_url}{target.endpoint}", json=body) as answer:
            if answer.status != 200:
                text = await answer.text(errors="replace")
                result.error = f"status {answer.status}: {text[:300]}"
                return result
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    result.error = str(event["error"])[:300]
                    return result
                now = time.perf_counter()
                if _has_token(event):
                    if chunks:
                        result.itl.append(now - last)
                    else:
                        result.ttft = now - result.start
                    chunks += 1
                    last = now
                if usage := event.get("usage"):
                    result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
                    result.output_tokens = usage.get("completion_tokens", 0)
    except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
        result.error = f"{type(error).__name__}: {error}"
        return result
    result.output_tokens = result.output_tokens or chunks
    result.latency = last - result.start
    if not chunks:
        result.error = "the answer had no tokens"
    return result


def _has_token(event: dict[str, Any]) -> bool:
    """Whether the event brings a token; that of completions may have no text yet (part of a character)."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or ("text" in choice and choice.get("finish_reason") is None):
            return True
        if any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            return True
    return False


async def run(
    target: Target,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    headers: dict[str, str] | None = None,
    done: Callable[[], None] = lambda: None,
) -> tuple[list[BenchResult], float]:
    """Send each request at its time; returns the results in order, and how many seconds it took.

    With `max_concurrency` a request that is due waits until fewer are under way; its clock starts when it is sent.
    """
    slots = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    async with aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=LONGEST_EVENT,
    ) as session:
        begin = time.perf_counter()

        async def one(request: BenchRequest, at: float) -> BenchResult:
            await asyncio.sleep(begin + at - time.perf_counter())
            async with slots:
                result = await send(session, target, request)
            done()
            return result

        results = await asyncio.gather(
            *(one(request, at) for request, at in zip(requests, times, strict=True))
        )
        return results, time.perf_counter() - begin


def served_model(base_url: str, headers: dict[str, str]) -> str:
    """The first model that a server offers. Raises ValueError, in one sentence, if nothing answers there."""

    async def ask() -> str:
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, raise_for_status=True) as session,
            session.get(f"{base_url}/v1/models") as answer,
        ):
            return (await answer.json(content_type=None))["data"][0]["id"]

    try:
        return asyncio.run(ask())
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{base_url}/v1/models gives no model ({type(error).__name__}: {error}); is --base-url right?"
        ) from error
