"""Outputs of the engine on their way to a client: whole, or as a stream of events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from rimuru_jax.outputs import CompletionOutput, RequestOutput
from rimuru_jax.sampling_params import SamplingParams
from rimuru_jax.server import responses
from rimuru_jax.server.async_engine import (
    AsyncEngine,
    EngineFailedError,
    QueueFullError,
    ShuttingDownError,
)
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.protocol import StreamOptions
from rimuru_jax.server.refusals import RefusedError, client_gone
from rimuru_jax.server.request_log import EndedRequest, EndObserver

type MakeChunk = Callable[[int, CompletionOutput, CompletionOutput | None], dict[str, Any] | None]
"""Of a choice's index, its newest output and the one sent before: what a chunk of the stream says of it, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks of the engine."""

    name: str
    """The client's name for it, or a random one."""
    prompts: Sequence[list[int]]
    params: SamplingParams
    priority: int


class Delivery:
    """Runs jobs for clients that may leave, be slow, or ask too much. Raises RefusedError for what fails."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, observers: Sequence[EndObserver] = ()
    ) -> None:
        self._engine = engine
        self._config = config
        self._observers = observers

    async def whole(self, http: Request, job: Job) -> list[RequestOutput]:
        """Every prompt's finished output. A client that goes away ends them all."""

        async def one(index: int) -> RequestOutput:
            last = None
            async for output in self._generate(http, job, index):
                last = output
            assert last is not None
            for part in last.outputs:
                if part.finish_reason == "error" and part.stop_reason is not None:
                    raise RefusedError(400, str(part.stop_reason))
                if part.finish_reason == "error":
                    raise RefusedError(
                        500, "the model gave no finite numbers for this request", "server_error"
                    )
            return last

        tasks = [asyncio.ensure_future(one(index)) for index in range(len(job.prompts))]
        gone = asyncio.ensure_future(_disconnect(http))
        try:
            everything = asyncio.gather(*tasks)
            await asyncio.wait([everything, gone], return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                everything.cancel()
                raise client_gone()
            return list(await everything)
        finally:
            await _cancel(*tasks, gone)

    async def stream(
        self, http: Request, job: Job, head: dict[str, Any], chunk: MakeChunk, options: StreamOptions | None
    ) -> Response:
        """Server-sent events as tokens come, of all prompts interleaved.

        The first output is awaited before the answer begins, so that a request that is refused gets a status.
        """
        options = options or StreamOptions()
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=len(job.prompts))

        async def feed(index: int) -> None:
            # A client that does not read stops this task, not the engine: it takes the newest output afterwards.
            try:
                async for output in self._generate(http, job, index):
                    await queue.put((index, output))
            except RefusedError as error:
                await queue.put((index, error))

        tasks = [asyncio.ensure_future(feed(index)) for index in range(len(job.prompts))]
        waiting, gone = asyncio.ensure_future(queue.get()), asyncio.ensure_future(_disconnect(http))
        await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()  # from now on the answer itself notices
        if not waiting.done() or isinstance(waiting.result()[1], Exception):
            error = waiting.result()[1] if waiting.done() else None
            await _cancel(*tasks, waiting)
            raise error if isinstance(error, Exception) else client_gone()
        first = waiting.result()

        async def events() -> AsyncGenerator[bytes]:
            seen: dict[int, CompletionOutput] = {}
            newest: dict[int, RequestOutput] = {}
            unfinished = len(job.prompts)
            item = first
            try:
                while True:
                    index, output = item
                    if isinstance(output, RefusedError):
                        yield responses.event(responses.error_body(str(output), output.kind, output.status))
                        break
                    assert isinstance(output, RequestOutput)
                    newest[index] = output
                    for part in output.outputs:
                        choice = index * job.params.n + part.index
                        before = seen.get(choice)
                        if (
                            before is None
                            or part.token_ids != before.token_ids
                            or part.finished() != before.finished()
                        ) and (said := chunk(choice, part, before)) is not None:
                            body = {**head, "choices": [said]}
                            if options.include_usage or options.continuous_usage_stats:
                                body["usage"] = (
                                    responses.usage(list(newest.values()))
                                    if options.continuous_usage_stats
                                    else None
                                )
                            seen[choice] = part
                            yield responses.event(body)
                    unfinished -= output.finished
                    if not unfinished:
                        if options.include_usage:
                            usage = responses.usage(list(newest.values()))
                            yield responses.event({**head, "choices": [], "usage": usage})
                        break
                    item = await queue.get()
                yield responses.DONE
            finally:
                await _cancel(*tasks)

        # Only a generator that has begun runs to its end when it is dropped, as happens to answers whose client has
        # gone before the first byte.
        begun = events()
        beginning = await anext(begun)

        async def answer() -> AsyncIterator[bytes]:
            async with aclosing(begun):
                yield beginning
                async for event in begun:
                    yield event

        return StreamingResponse(
            answer(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def _generate(self, http: Request, job: Job, index: int) -> AsyncIterator[RequestOutput]:
        """The outputs of one prompt; in the end observers are told how it went."""
        name = job.name if len(job.prompts) == 1 else f"{job.name}/{index}"
        last, reason = None, client_gone().kind
        try:
            async with aclosing(self._attempt(name, job, index)) as outputs:
                async for output in outputs:
                    last = output
                    if output.finished:
                        reason = str(output.outputs[0].finish_reason)
                    yield output
        except RefusedError as error:
            reason = error.kind
            raise
        finally:
            traced = {key: http.headers[key] for key in ("traceparent", "tracestate") if key in http.headers}
            for observe in self._observers:
                observe(EndedRequest(name=name, trace_headers=traced, output=last, reason=reason))

    async def _attempt(self, name: str, job: Job, index: int) -> AsyncGenerator[RequestOutput]:
        """`AsyncEngine.generate` with the server's timeout, and with errors that have a status."""
        try:
            async with (
                asyncio.timeout(self._config.request_timeout),
                aclosing(
                    self._engine.generate(name, job.prompts[index], job.params, priority=job.priority)
                ) as outputs,
            ):
                async for output in outputs:
                    yield output
        except ValueError as error:
            raise RefusedError(400, str(error)) from error
        except QueueFullError as error:
            raise RefusedError(429, str(error), "rate_limit_error") from error
        except ShuttingDownError as error:
            raise RefusedError(503, str(error), "server_error") from error
        except EngineFailedError as error:
            raise RefusedError(500, str(error), "server_error") from error
        except TimeoutError as error:
            raise RefusedError(
                504,
                f"the request was not done within {self._config.request_timeout} s (request_timeout)",
                "timeout_error",
            ) from error


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(http: Request) -> None:
    """Wait until the client has gone away."""
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            return
