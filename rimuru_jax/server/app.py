"""The application: its routes, its errors, and everything it answers that is not generated."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException

from rimuru_jax import __version__
from rimuru_jax.engine import Engine
from rimuru_jax.generation_config import recommended_sampling
from rimuru_jax.server.async_engine import AsyncEngine, EngineFailedError
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.delivery import Delivery
from rimuru_jax.server.generation import Generation
from rimuru_jax.server.grammar_check import GrammarCheck
from rimuru_jax.server.guard import Guard
from rimuru_jax.server.metrics import ServerMetrics
from rimuru_jax.server.pool_state import pool_state
from rimuru_jax.server.protocol import AbortRequest, DetokenizeRequest, TokenizeRequest
from rimuru_jax.server.refusals import RefusedError, check_model, error_response
from rimuru_jax.server.request_log import EndObserver
from rimuru_jax.server.text import ServedText

_PAGE = Path(__file__).with_name("pool.html")


def build_app(engine: Engine, config: ServerConfig, observers: Sequence[EndObserver] = ()) -> FastAPI:
    """The application around one engine, which it owns from now on. `app.state.engine` is its `AsyncEngine`.

    `observers` are told of every request that has ended.
    """
    metrics = ServerMetrics(engine, config.served_model_name)
    async_engine = AsyncEngine(
        engine, max_num_queued_reqs=config.max_num_queued_reqs, listener=metrics.observe
    )
    async_engine.start()
    app = FastAPI(title="rimuru_jax", version=__version__, docs_url=None, redoc_url=None)
    app.state.engine = async_engine
    _Routes(async_engine, config, metrics, observers).register(app)
    return app


class _Routes:
    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        metrics: ServerMetrics,
        observers: Sequence[EndObserver],
    ) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.started = int(time.time())
        self.text = ServedText(engine.engine.tokenizer)
        defaults = recommended_sampling(engine.engine.tokenizer_folder)
        self.generation = Generation(
            Delivery(engine, config, observers),
            self.text,
            GrammarCheck(engine.engine.grammars),
            config,
            defaults,
        )

    def register(self, app: FastAPI) -> None:
        app.add_middleware(Guard, config=self.config)
        app.exception_handler(RefusedError)(self.refused)
        app.exception_handler(RequestValidationError)(self.malformed)
        app.exception_handler(HTTPException)(self.not_found)
        app.post("/v1/completions")(self.generation.completions)
        app.post("/v1/chat/completions")(self.generation.chat)
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
        return error_response(error.status, str(error), error.kind, error.param, headers)

    async def malformed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        kind = request.headers.get("content-type", "")
        if "json" not in kind:
            return error_response(
                400, f"the Content-Type is {kind!r}, it must be application/json", "invalid_request_error"
            )
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return error_response(
            400, f"{place or 'the body'}: {first['msg']}", "invalid_request_error", place or None
        )

    async def not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}", "invalid_request_error"
        )

    # Text -----------------------------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text or of a conversation."""
        check_model(body.model, self.config.served_model_name)
        if (body.prompt is None) == (body.messages is None):
            raise RefusedError(400, "give either prompt or messages")
        if body.prompt is not None:
            text, special = body.prompt, body.add_special_tokens
            ids = await self.text.run(lambda tokenizer: tokenizer.encode(text, add_special_tokens=special))
        else:
            ids = await self.text.render(body)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.engine.engine.plan.max_model_len}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """Text of token ids."""
        check_model(body.model, self.config.served_model_name)
        if wrong := [token for token in body.tokens if not 0 <= token < 2**31]:
            raise RefusedError(400, f"tokens has {wrong[0]}, which is no token id", param="tokens")
        tokens = body.tokens
        return {
            "prompt": await self.text.run(
                lambda tokenizer: tokenizer.decode(tokens, skip_special_tokens=False)
            )
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
            return error_response(500, f"the engine has failed: {self.engine.failure}", "server_error")
        return JSONResponse({"status": "ok"})

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def prometheus(self) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
