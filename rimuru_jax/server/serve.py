"""Running the server: a socket, an engine, and a clean end."""

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from rimuru_jax.engine import Engine
from rimuru_jax.server.app import build_app
from rimuru_jax.server.bounded_http import BoundedHttp
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.request_log import EndObserver, log_ended, log_stats


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; taken before a model is loaded, so that a port in use is known at once.

    Raises ValueError, in one sentence, when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, which connections inherit: only then does asyncio send small packets at once (TCP_NODELAY).
    # Else a first token would wait, behind the headers of its answer, 40 ms for the client's acknowledgement.
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen(2048)
    except (OSError, OverflowError) as error:
        server.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(
            f"cannot listen on {host}:{port} ({reason}); choose another --host or --port"
        ) from error
    return server


def serve(
    engine: Engine,
    config: ServerConfig,
    server_socket: socket.socket,
    *,
    shutdown_timeout: float,
    ready: Callable[[], None],
) -> int:
    """Serve until SIGINT or SIGTERM, then finish what runs; see `serve_until`."""

    async def until_signal() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        return await serve_until(stop, engine, config, server_socket, shutdown_timeout, ready)

    return asyncio.run(until_signal())


async def serve_until(
    stop: asyncio.Event,
    engine: Engine,
    config: ServerConfig,
    server_socket: socket.socket,
    shutdown_timeout: float,
    ready: Callable[[], None],
) -> int:
    """Serve until `stop` is set, then take nothing new and finish what runs for up to `shutdown_timeout` seconds.

    `ready` is called once requests are answered. Returns how many requests were cut off at the end.
    """
    observers: list[EndObserver] = [log_ended] if config.log_format == "json" else []
    tracing = None
    if config.otlp_traces_endpoint is not None:
        from rimuru_jax.server.tracing import Tracing

        tracing = Tracing(config.otlp_traces_endpoint, config.served_model_name)
        observers.append(tracing)
    app = build_app(engine, config, observers)
    settings = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(settings)
    running = asyncio.ensure_future(server._serve([server_socket]))  # `serve` without its own signal handlers
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    with _frozen_objects():
        ready()
        stopping = asyncio.ensure_future(stop.wait())
        stats = asyncio.ensure_future(log_stats(engine)) if config.log_format == "json" else None
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stats is not None:
            stats.cancel()
        cut = await app.state.engine.drain(shutdown_timeout)
        server.should_exit = True
        await running
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    return cut


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Leave what there is now to stay: Python's collector would walk all of it from time to time, and every stream wait 0.3 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
