"""A server in a thread of the test, on a free port."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rimuru_jax import Engine
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.serve import listen, serve_until


@contextmanager
def running(engine: Engine, **config: Any) -> Iterator[str]:
    """Serve `engine`; gives the base URL. Everything is over at the end, the engine's thread too."""
    values: dict[str, Any] = {"served_model_name": "model"}
    settings = ServerConfig(**(values | config))
    socket = listen("127.0.0.1", 0)
    port = socket.getsockname()[1]
    ready, stops = threading.Event(), []

    async def main() -> None:
        stop = asyncio.Event()
        stops.append((asyncio.get_running_loop(), stop))
        await serve_until(stop, engine, settings, socket, 0.0, ready.set)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop, stop = stops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()
