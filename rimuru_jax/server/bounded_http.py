"""HTTP whose heads have an end: httptools and uvicorn would keep whatever a client sends as its headers, and wait for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of a request line and its headers; many times what clients send."""

HEAD_SECONDS = 60.0
"""For the whole of a head, from its first byte; of a new connection from its beginning."""


class BoundedHttp(HttpToolsProtocol):
    """Answers a longer head with 400, and closes the connection; for one that takes longer, it closes it."""

    _unfinished: int | None = None
    """Bytes of a head that has not ended so far."""

    _too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._too_late = self.loop.call_later(HEAD_SECONDS, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._unfinished = 0
        if self._too_late is None:
            self._too_late = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unfinished = None
        self._head_is_here()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")  # which the parser makes its own error, and that a 400
        super().on_headers_complete()

    def _head_is_here(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._unfinished is not None and not self.transport.is_closing():
            self._unfinished += len(data)
            if self._unfinished > MAX_HEAD_BYTES:
                self.send_400_response(
                    f"the request line and headers have more than {MAX_HEAD_BYTES} bytes; send fewer"
                )
