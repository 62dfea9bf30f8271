"""Outputs of the engine on their way to a client: whole, or as a stream of events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

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


class EventStream(Response):
    """Server-sent events, sent by the task that makes them. The first is there already."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Nothing is told of a client that goes away: nobody would hear it."""
        body = "http.response.body"
        with suppress(RefusedError):
            async with aclosing(self._events), _while_connected(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": body, "body": self._first, "more_body": True})
                async for event in self._events:
                    await send({"type": body, "body": event, "more_body": True})
                await send({"type": body, "body": b"", "more_body": False})


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
        try:
            async with _while_connected(http.receive):
                return list(await asyncio.gather(*tasks))
        finally:
            await _cancel(*tasks)

    async def stream(
        self, http: Request, job: Job, head: dict[str, Any], chunk: MakeChunk, options: StreamOptions | None
    ) -> Response:
        """Server-sent events as tokens come, of all prompts interleaved.

        The first output is awaited before the answer begins, so that a request that is refused gets a status.
        """
        events = self._events(http, job, head, chunk, options or StreamOptions())
        async with _while_connected(http.receive):
            first = await anext(events)
        return EventStream(first, events)

    async def _events(
        self, http: Request, job: Job, head: dict[str, Any], chunk: MakeChunk, options: StreamOptions
    ) -> AsyncGenerator[bytes]:
        """One piece for each output: its events. Raises RefusedError if there is no first."""
        event = responses.ChunkFormat(head)
        seen: dict[int, CompletionOutput] = {}
        newest: dict[int, RequestOutput] = {}
        try:
            async with aclosing(self._outputs(http, job)) as outputs:
                async for index, output in outputs:
                    newest[index], piece = output, b""
                    for part in output.outputs:
                        choice = index * job.params.n + part.index
                        before = seen.get(choice)
                        if (
                            before is None
                            or len(part.token_ids) != len(before.token_ids)
                            or part.finished() != before.finished()
                        ) and (said := chunk(choice, part, before)) is not None:
                            seen[choice] = part
                            if options.continuous_usage_stats:
                                piece += event(said, usage=responses.usage(list(newest.values())))
                            elif options.include_usage:
                                piece += event(said, usage=None)
                            else:
                                piece += event(said)
                    if piece:
                        yield piece
            if options.include_usage:
                yield responses.event(
                    {**head, "choices": [], "usage": responses.usage(list(newest.values()))}
                )
        except RefusedError as error:
            if not newest:
                raise
            yield responses.event(responses.error_body(str(error), error.kind, error.status))
        yield responses.DONE

    async def _outputs(self, http: Request, job: Job) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Of all prompts, each with its prompt's index."""
        if len(job.prompts) == 1:  # by the caller's own task, whose turn comes at once
            async with aclosing(self._generate(http, job, 0)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | RefusedError]] = asyncio.Queue(
            maxsize=len(job.prompts)
        )

        async def feed(index: int) -> None:
            # A client that does not read stops this task, not the engine: it takes the newest output afterwards.
            try:
                async for output in self._generate(http, job, index):
                    await queue.put((index, output))
            except RefusedError as error:
                await queue.put((index, error))

        tasks = [asyncio.ensure_future(feed(index)) for index in range(len(job.prompts))]
        unfinished = len(job.prompts)
        try:
            while unfinished:
                index, output = await queue.get()
                if isinstance(output, RefusedError):
                    raise output
                unfinished -= output.finished
                yield index, output
        finally:
            await _cancel(*tasks)

    async def _generate(self, http: Request, job: Job, index: int) -> AsyncGenerator[RequestOutput]:
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
            outputs = self._engine.generate(
                name,
                job.prompts[index],
                job.params,
                priority=job.priority,
                timeout=self._config.request_timeout,
            )
            async with aclosing(outputs):
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


@asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncIterator[None]:
    """What is within ends, with `client_gone`, when the client goes away."""
    task, within = asyncio.current_task(), True
    assert task is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def end(_: object) -> None:
        if within and not watching.cancelled():
            task.cancel()

    watching = asyncio.ensure_future(watch())
    watching.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        if watching.done() and not watching.cancelled() and not task.uncancel():
            raise client_gone() from None
        raise
    finally:
        within = False
        watching.cancel()
