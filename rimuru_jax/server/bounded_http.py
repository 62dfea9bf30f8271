"""HTTP whose heads have an end: httptools and uvicorn would keep whatever a client sends as its headers."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of a request line and its headers; many times what clients send."""


class BoundedHttp(HttpToolsProtocol):
    """Answers a longer head with 400, and closes the connection."""

    _unfinished: int | None = None
    """Bytes of a head that has not ended so far."""

    def on_message_begin(self) -> None:
        self._unfinished = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unfinished = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")  # which the parser makes its own error, and that a 400
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._unfinished is not None and not self.transport.is_closing():
            self._unfinished += len(data)
            if self._unfinished > MAX_HEAD_BYTES:
                self.send_400_response(
                    f"the request line and headers have more than {MAX_HEAD_BYTES} bytes; send fewer"
                )
