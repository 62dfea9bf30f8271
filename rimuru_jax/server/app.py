"""The routes: OpenAI's completions and chats, vLLM's smaller ones, and the pool."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from rimuru_jax.engine import Engine
from rimuru_jax.generation_config import recommended_sampling
from rimuru_jax.outputs import CompletionOutput, RequestOutput
from rimuru_jax.request_state import Prompt
from rimuru_jax.sampling_params import SamplingParams
from rimuru_jax.server import responses
from rimuru_jax.server.async_engine import (
    AsyncEngine,
    EngineFailedError,
    QueueFullError,
    ShuttingDownError,
)
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.guard import Guard
from rimuru_jax.server.metrics import ServerMetrics
from rimuru_jax.server.pool_state import pool_state
from rimuru_jax.server.protocol import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)

_PAGE = Path(__file__).with_name("pool.html")


class RefusedError(Exception):
    """A request that is answered with an error; the message is for the user."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
    ):
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


def build_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """The application around one engine, which it owns from now on. `app.state.engine` is its `AsyncEngine`."""
    metrics = ServerMetrics(engine, config.served_model_name)
    async_engine = AsyncEngine(
        engine, max_num_queued_reqs=config.max_num_queued_reqs, listener=metrics.observe
    )
    async_engine.start()
    app = FastAPI(title="rimuru_jax", version=version("rimuru-jax"), docs_url=None, redoc_url=None)
    app.state.engine = async_engine
    _Routes(async_engine, config, metrics).register(app)
    return app


class _Routes:
    def __init__(self, engine: AsyncEngine, config: ServerConfig, metrics: ServerMetrics) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.started = int(time.time())
        self.tokenizer = engine.engine.tokenizer
        self.defaults = recommended_sampling(engine.engine.tokenizer_folder)

    def register(self, app: FastAPI) -> None:
        app.add_middleware(Guard, config=self.config)
        app.exception_handler(RefusedError)(self.refused)
        app.exception_handler(RequestValidationError)(self.malformed)
        app.exception_handler(HTTPException)(self.not_found)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat)
        app.get("/v1/models")(self.models)
        app.get("/v1/pool")(self.pool)
        app.get("/", include_in_schema=False)(self.page)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.post("/abort_requests")(self.abort)
        app.get("/health")(self.health)
        app.get("/version")(self.version)
        app.get("/metrics")(self.prometheus)

    # Errors ---------------------------------------------------------------------------------------------------------

    async def refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return _error(error.status, str(error), error.kind, error.param, headers)

    async def malformed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        kind = request.headers.get("content-type", "")
        if "json" not in kind:
            return _error(
                400, f"the Content-Type is {kind!r}, it must be application/json", "invalid_request_error"
            )
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(400, f"{place or 'the body'}: {first['msg']}", "invalid_request_error", place or None)

    async def not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}", "invalid_request_error"
        )

    # Generation -----------------------------------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Complete one or several prompts."""
        self._check_model(body.model)
        prompts = body.prompts()
        if not prompts:
            raise RefusedError(
                400, "prompt is empty, it must be a text, token ids, or a list of those", param="prompt"
            )
        self._check_count(len(prompts) * max(1, body.n))
        if body.logprobs is not None and not 0 <= body.logprobs <= 20:
            raise RefusedError(400, f"logprobs is {body.logprobs}, it must be from 0 to 20", param="logprobs")
        params = self._params(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
        if body.echo and (body.stream or body.logprobs is not None):
            other = "stream" if body.stream else "logprobs"
            raise RefusedError(400, f"echo is not supported together with {other}", param="echo")
        ids = [await self._encode(prompt) for prompt in prompts]
        name = _name(body.request_id, "cmpl")
        if body.stream:

            def chunk(index: int, part: CompletionOutput, before: CompletionOutput | None) -> dict[str, Any]:
                seen, tokens = (len(before.text), len(before.token_ids)) if before else (0, 0)
                logprobs = None
                if part.logprobs is not None:
                    logprobs = responses.completion_logprobs(
                        part.token_ids[tokens:], part.logprobs[tokens:], body.logprobs or 0, seen
                    )
                return {
                    "index": index,
                    "text": part.text[seen:],
                    "logprobs": logprobs,
                    "finish_reason": part.finish_reason,
                    "stop_reason": part.stop_reason,
                }

            head = responses.header(name, "text_completion", self.config.served_model_name)
            return await self._stream(
                http, name, ids, params, body.priority, head, chunk, body.stream_options
            )
        outputs = await self._all(http, name, ids, params, body.priority)
        choices = []
        for prompt, output in zip(prompts, outputs, strict=True):
            shown = ""
            if body.echo:
                shown = prompt if isinstance(prompt, str) else self._decode(prompt)
            for part in output.outputs:
                logprobs = None
                if part.logprobs is not None:
                    logprobs = responses.completion_logprobs(
                        part.token_ids, part.logprobs, body.logprobs or 0, len(shown)
                    )
                choices.append({
                    "index": len(choices),
                    "text": shown + part.text,
                    "logprobs": logprobs,
                    "finish_reason": part.finish_reason,
                    "stop_reason": part.stop_reason,
                })  # fmt: skip
        head = responses.header(name, "text_completion", self.config.served_model_name)
        return JSONResponse({**head, "choices": choices, "usage": responses.usage(outputs)})

    async def chat(self, body: ChatCompletionRequest, http: Request) -> Response:
        """Answer a conversation."""
        self._check_model(body.model)
        self._check_count(max(1, body.n))
        try:
            top = body.num_logprobs()
        except ValueError as error:
            raise RefusedError(400, str(error), param="top_logprobs") from error
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        params = self._params(body, max_tokens=limit, logprobs=top)
        ids = [await self._render(body)]
        name = _name(body.request_id, "chatcmpl")
        if body.stream:

            def chunk(index: int, part: CompletionOutput, before: CompletionOutput | None) -> dict[str, Any]:
                seen, tokens = (len(before.text), len(before.token_ids)) if before else (0, 0)
                delta: dict[str, Any] = {"content": part.text[seen:]}
                if before is None:
                    delta["role"] = "assistant"
                return {
                    "index": index,
                    "delta": delta,
                    "logprobs": responses.chat_logprobs(part, tokens, top or 0),
                    "finish_reason": part.finish_reason,
                }

            head = responses.header(name, "chat.completion.chunk", self.config.served_model_name)
            return await self._stream(
                http, name, ids, params, body.priority, head, chunk, body.stream_options
            )
        (output,) = await self._all(http, name, ids, params, body.priority)
        choices = [
            {
                "index": part.index,
                "message": {"role": "assistant", "content": part.text, "refusal": None},
                "logprobs": responses.chat_logprobs(part, 0, top or 0),
                "finish_reason": part.finish_reason,
                "stop_reason": part.stop_reason,
            }
            for part in output.outputs
        ]
        head = responses.header(name, "chat.completion", self.config.served_model_name)
        return JSONResponse({**head, "choices": choices, "usage": responses.usage([output])})

    async def _all(
        self, http: Request, name: str, prompts: Sequence[list[int]], params: SamplingParams, priority: int
    ) -> list[RequestOutput]:
        """Every prompt's finished output. A client that goes away ends them all."""

        async def one(index: int) -> RequestOutput:
            last = None
            async for output in self._generate(
                _part(name, index, len(prompts)), prompts[index], params, priority
            ):
                last = output
            assert last is not None
            if any(part.finish_reason == "error" for part in last.outputs):
                raise RefusedError(500, "the model gave no finite numbers for this request", "server_error")
            return last

        tasks = [asyncio.ensure_future(one(index)) for index in range(len(prompts))]
        gone = asyncio.ensure_future(_disconnect(http))
        try:
            everything = asyncio.gather(*tasks)
            await asyncio.wait([everything, gone], return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                everything.cancel()
                raise _client_gone()
            return list(await everything)
        finally:
            await _cancel(*tasks, gone)

    async def _stream(
        self,
        http: Request,
        name: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        priority: int,
        head: dict[str, Any],
        chunk: Callable[[int, CompletionOutput, CompletionOutput | None], dict[str, Any]],
        options: StreamOptions | None,
    ) -> Response:
        """Server-sent events as tokens come, of all prompts interleaved.

        The first output is awaited before the answer begins, so that a request that is refused gets a status.
        """
        options = options or StreamOptions()
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=len(prompts))

        async def feed(index: int) -> None:
            # A client that does not read stops this task, not the engine: it takes the newest output afterwards.
            try:
                async for output in self._generate(
                    _part(name, index, len(prompts)), prompts[index], params, priority
                ):
                    await queue.put((index, output))
            except RefusedError as error:
                await queue.put((index, error))

        tasks = [asyncio.ensure_future(feed(index)) for index in range(len(prompts))]
        waiting, gone = asyncio.ensure_future(queue.get()), asyncio.ensure_future(_disconnect(http))
        await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()  # from now on the answer itself notices
        if not waiting.done() or isinstance(waiting.result()[1], Exception):
            error = waiting.result()[1] if waiting.done() else None
            await _cancel(*tasks, waiting)
            raise error if isinstance(error, Exception) else _client_gone()
        first = waiting.result()

        async def events() -> AsyncIterator[bytes]:
            seen: dict[int, CompletionOutput] = {}
            newest: dict[int, RequestOutput] = {}
            unfinished = len(prompts)
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
                        choice = index * params.n + part.index
                        before = seen.get(choice)
                        if (
                            before is None
                            or part.token_ids != before.token_ids
                            or part.finished() != before.finished()
                        ):
                            body = {**head, "choices": [chunk(choice, part, before)]}
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

        return StreamingResponse(
            events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def _generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int
    ) -> AsyncIterator[RequestOutput]:
        """`AsyncEngine.generate` with the server's timeout, and with errors that have a status."""
        try:
            async with (
                asyncio.timeout(self.config.request_timeout),
                aclosing(self.engine.generate(request_id, prompt, params, priority=priority)) as outputs,
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
                f"the request was not done within {self.config.request_timeout} s (request_timeout)",
                "timeout_error",
            ) from error

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.config.served_model_name:
            raise RefusedError(
                404,
                f"model {model!r} is not served here, only {self.config.served_model_name!r}",
                "not_found_error",
                "model",
            )

    def _check_count(self, count: int) -> None:
        if count > self.config.max_completions:
            raise RefusedError(
                400,
                f"{count} completions were asked for in one request, it may have at most {self.config.max_completions}",
            )

    def _params(
        self, body: CompletionRequest | ChatCompletionRequest, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        try:
            return body.sampling_params(self.defaults, max_tokens=max_tokens, logprobs=logprobs)
        except ValueError as error:
            raise RefusedError(400, str(error)) from error

    # Text -----------------------------------------------------------------------------------------------------------

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt, found in another thread: long texts take long."""
        if not isinstance(prompt, str):
            return prompt
        return await self._text(lambda tokenizer: tokenizer.encode(prompt))

    async def _render(self, body: ChatCompletionRequest | TokenizeRequest) -> list[int]:
        messages, kwargs = body.messages or [], body.chat_template_kwargs or {}
        # A template of the client's own would be a program of the client's own.
        if taken := sorted(
            {"chat_template", "messages", "tools", "tokenize", "add_generation_prompt"} & set(kwargs)
        ):
            raise RefusedError(
                400,
                f"chat_template_kwargs has {taken[0]!r}, which is no variable of templates",
                param="chat_template_kwargs",
            )
        tools = body.tools
        if isinstance(body, ChatCompletionRequest) and body.tool_choice == "none":
            tools = None
        return await self._text(
            lambda tokenizer: tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=body.add_generation_prompt, **kwargs
            )
        )

    async def _text[T](self, function: Callable[[Any], T]) -> T:
        if self.tokenizer is None:
            raise RefusedError(
                400, "the model has no tokenizer: send prompts as token ids to /v1/completions"
            )
        try:
            return await asyncio.to_thread(function, self.tokenizer)
        except (ValueError, TypeError) as error:
            raise RefusedError(400, str(error)) from error

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids)) if self.tokenizer else ""

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text or of a conversation."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RefusedError(400, "give either prompt or messages")
        if body.prompt is not None:
            text, special = body.prompt, body.add_special_tokens
            ids = await self._text(lambda tokenizer: tokenizer.encode(text, add_special_tokens=special))
        else:
            ids = await self._render(body)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.engine.engine.plan.max_model_len}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """Text of token ids."""
        self._check_model(body.model)
        if wrong := [token for token in body.tokens if not 0 <= token < 2**31]:
            raise RefusedError(400, f"tokens has {wrong[0]}, which is no token id", param="tokens")
        tokens = body.tokens
        return {
            "prompt": await self._text(lambda tokenizer: tokenizer.decode(tokens, skip_special_tokens=False))
        }

    # State ----------------------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """The one model that is served."""
        model = {
            "id": self.config.served_model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "rimuru_jax",
            "max_model_len": self.engine.engine.plan.max_model_len,
        }
        return {"object": "list", "data": [model]}

    async def pool(self, events: int = 100) -> dict[str, Any]:
        """The page pool by kind and level, resident experts, requests, and the newest events."""
        try:
            return await self.engine.run_in_engine(
                lambda engine: pool_state(engine, max(0, min(events, 4096)))
            )
        except EngineFailedError as error:
            raise RefusedError(500, str(error), "server_error") from error

    async def page(self) -> Response:
        """The live view of `/v1/pool`: one file, no other resources."""
        return FileResponse(_PAGE, media_type="text/html; charset=utf-8")

    async def abort(self, body: AbortRequest) -> dict[str, Any]:
        """End requests by the names they were given; unknown names are passed over."""
        for request_id in body.request_ids:
            self.engine.abort(request_id)
        return {"aborted": body.request_ids}

    async def health(self) -> Response:
        """200 while requests can be served."""
        if self.engine.failure is not None:
            return _error(500, f"the engine has failed: {self.engine.failure}", "server_error")
        return JSONResponse({"status": "ok"})

    async def version(self) -> dict[str, str]:
        return {"version": version("rimuru-jax")}

    async def prometheus(self) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _error(
    status: int, message: str, kind: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(responses.error_body(message, kind, status, param), status, headers)


def _client_gone() -> RefusedError:
    return RefusedError(499, "the client went away", "client_closed_request")


def _name(given: str | None, prefix: str) -> str:
    return given if given else f"{prefix}-{uuid.uuid4().hex}"


def _part(name: str, index: int, count: int) -> str:
    """Name of one prompt's request in the engine."""
    return name if count == 1 else f"{name}/{index}"


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
