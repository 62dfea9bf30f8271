"""What is asked of every request before its body is read: a key, and a bearable size."""

import hmac
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.responses import error_body

_OPEN_PATHS = ("/", "/health", "/version", "/metrics")


class Guard:
    """Answers requests without the key (401) or with too large a body (413) itself.

    A plain ASGI middleware: those of Starlette buffer answers and hide that a client has gone away.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        key = self._config.api_key
        if key is not None and scope["path"] not in _OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                text = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
                await _answer(send, 401, text, "authentication_error")
                return
        limit = self._config.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        # Of a number with many digits nothing is asked but that it is too large.
        if not declared.isdigit() or len(declared) > 18 or int(declared) > limit:
            await _answer(send, 413, f"the body has more than {limit} bytes", "invalid_request_error")
            return
        body = bytearray()
        while True:  # bodies are small: read the whole, then hand it on in one piece
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > limit:
                await _answer(send, 413, f"the body has more than {limit} bytes", "invalid_request_error")
                return
            if not message.get("more_body", False):
                break
        handed = False

        async def replay() -> Message:
            nonlocal handed
            if handed:
                return await receive()
            handed = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, replay, send)


async def _answer(send: Send, status: int, text: str, kind: str) -> None:
    body = json.dumps(error_body(text, kind, status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
