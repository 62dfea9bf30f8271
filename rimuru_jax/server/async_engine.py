"""An engine whose steps run in a thread of their own, for any number of asynchronous callers.

    engine thread        as late as it can: commands (add, abort) -> Engine.step -> newest output of each request
    event loop           each caller awaits its own stream; only the newest output is kept for it

So a client that reads slowly costs nothing but its own delay: what it misses is in the next output it takes.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from rimuru_jax.engine import Engine
from rimuru_jax.outputs import RequestOutput
from rimuru_jax.request_state import Prompt
from rimuru_jax.sampling_params import SamplingParams
from rimuru_jax.server.late_start import LateStart

logger = logging.getLogger(__name__)

type OutputListener = Callable[[list[RequestOutput], float], None]
"""Called in the engine thread after every step with what changed and the step's duration in seconds."""


class QueueFullError(Exception):
    """So many requests wait already that another one is refused."""


class ShuttingDownError(Exception):
    """The server finishes what it has and takes nothing new."""


class EngineFailedError(Exception):
    """The engine met an error of its own; requests in flight are lost and no others can be served."""


@dataclass(eq=False)
class _Stream:
    """What one caller has not seen yet."""

    name: str
    """What the caller calls its request."""
    loop: asyncio.AbstractEventLoop
    ready: asyncio.Event
    latest: RequestOutput | None = None
    error: Exception | None = None


class AsyncEngine:
    """Serves asynchronous callers from one engine.

    Args:
        engine: belongs to the engine thread from `start` on; nobody else may call it.
        max_num_queued_reqs: requests that may wait for admission; None is no limit.
        listener: told of every step.

    Attributes:
        failure: why the engine stopped serving; None while it is well.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_num_queued_reqs: int | None = None,
        listener: OutputListener | None = None,
    ) -> None:
        self.engine = engine
        self.failure: Exception | None = None
        self._max_queued = max_num_queued_reqs
        self._listener = listener
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        # By the engine's name of a request, which is never used twice: an output that comes late, of a request whose
        # caller has left, must not reach the next one of the same name.
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count()
        self._arriving: set[str] = set()  # added by callers, not yet taken in by the engine thread
        self._accepting = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Requests that wait for admission."""
        return len(self._arriving) + len(self.engine.scheduler.waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Serve one request, yielding it as it stands whenever it has changed since the last time.

        `request_id` is the caller's name for it, of which the outputs' `request_id` is made. Leaving the iterator early, by whatever way, aborts the request and frees its pages at once.

        Raises:
            ValueError: in one sentence, if it cannot be served.
            QueueFullError, ShuttingDownError, EngineFailedError: it was not taken in, or is lost.
            TimeoutError: it was not done within `timeout` seconds, and has been aborted.
        """
        if self.failure is not None:
            raise EngineFailedError(f"the engine has failed and serves no more requests: {self.failure}")
        if not self._accepting:
            raise ShuttingDownError("the server is shutting down and takes no new requests")
        if self._max_queued is not None and self.num_queued >= self._max_queued:
            raise QueueFullError(
                f"{self.num_queued} requests wait already, which is the limit (max_num_queued_reqs); try again later"
            )
        if any(stream.name == request_id for stream in self._streams.values()):
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request")
        stream = _Stream(request_id, asyncio.get_running_loop(), asyncio.Event())
        internal = f"{request_id}#{next(self._numbers)}"
        self._streams[internal] = stream
        self._arriving.add(internal)
        arrival = time.monotonic()  # it may have to wait for a step before the engine takes it in
        self._command(lambda: self._add(internal, prompt, params, priority, arrival))
        timer = stream.loop.call_later(timeout, self._expire, internal, stream) if timeout else None
        finished = False
        try:
            while not finished:
                await stream.ready.wait()
                stream.ready.clear()
                if stream.error is not None:
                    finished = True
                    raise stream.error
                output = stream.latest
                assert output is not None
                finished = output.finished
                yield output
        finally:
            if timer is not None:
                timer.cancel()
            del self._streams[internal]
            if not finished:
                self._command(lambda: self._abort(internal))

    def _expire(self, internal: str, stream: _Stream) -> None:
        """Whether or not its caller asks for the next output just now."""
        if stream.latest is not None and stream.latest.finished:
            return
        stream.error = TimeoutError()
        stream.ready.set()
        self._command(lambda: self._abort(internal))

    def abort(self, request_id: str) -> None:
        """End a request, or all called `request_id`/...; callers get the output so far, finished with "abort"."""
        for internal, stream in list(self._streams.items()):
            if request_id in (stream.name, stream.name.rsplit("/", 1)[0]):
                self._command(lambda internal=internal: self._abort(internal))

    async def drain(self, timeout: float) -> int:
        """Take nothing new, wait up to `timeout` seconds for what runs, end the rest; returns how many were cut."""
        self._accepting = False
        deadline = time.monotonic() + timeout
        while self._streams and self.failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        cut = [stream.name for stream in self._streams.values()]
        for request_id in cut:
            self.abort(request_id)
        while self._streams and self.failure is None and time.monotonic() < deadline + 5:
            await asyncio.sleep(0.02)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 5)
        return len(cut)

    def run_in_engine[T](self, function: Callable[[Engine], T]) -> "asyncio.Future[T]":
        """Call `function(engine)` between two steps; await the result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if not future.cancelled():
                future.set_exception(error) if error else future.set_result(result)  # type: ignore[arg-type]

        def call() -> None:
            try:
                result, error = function(self.engine), None
            except Exception as caught:
                result, error = None, caught
            loop.call_soon_threadsafe(settle, result, error)

        if self.failure is not None:
            future.set_exception(EngineFailedError(f"the engine has failed: {self.failure}"))
        else:
            self._command(call)
        return future

    # The engine thread ----------------------------------------------------------------------------------------------

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self.failure is None:
                self._commands.append(command)
                self._wake.notify()
                return
        command()  # the thread has ended, and nobody else uses the engine

    def _run(self) -> None:
        engine, late_start = self.engine, LateStart()
        try:
            while True:
                # Requests that wait for a place already would only wait longer.
                held = 0.0 if engine.scheduler.waiting else late_start.hold(engine.device_busy)
                with self._wake:
                    while not (self._commands or engine.has_unfinished_requests() or self._stopping):
                        self._wake.wait()
                    commands, self._commands = self._commands, deque()
                    if self._stopping and not commands and not engine.has_unfinished_requests():
                        return
                for command in commands:
                    command()
                if engine.has_unfinished_requests():
                    begin = time.monotonic()
                    outputs = engine.step()
                    self._publish(outputs)
                    late_start.observe(engine.seconds_waited)
                    if self._listener is not None:
                        self._listener(outputs, held + time.monotonic() - begin)
        except Exception as error:
            logger.exception("the engine has failed")
            self._fail(error)

    def _add(
        self, internal: str, prompt: Prompt, params: SamplingParams, priority: int, arrival: float
    ) -> None:
        self._arriving.discard(internal)
        stream = self._streams.get(internal)
        if stream is None:  # its caller has left already
            return
        if self.failure is not None:
            self._refuse(stream, EngineFailedError(f"the engine has failed: {self.failure}"))
            return
        try:
            self.engine.add_request(internal, prompt, params, priority=priority, arrival_time=arrival)
        except ValueError as error:
            self._refuse(stream, error)

    def _abort(self, internal: str) -> None:
        self.engine.abort(internal)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        changed: dict[asyncio.AbstractEventLoop, deque[_Stream]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                streams = changed.setdefault(stream.loop, deque())
                # Callers get their outputs one after another: those first who wait for their first tokens, or have
                # their last, whereupon they may send the next request.
                if stream.latest is None or output.finished:
                    streams.appendleft(stream)
                else:
                    streams.append(stream)
                stream.latest = output
        for loop, streams in changed.items():
            self._wake_up(loop, streams)

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self.failure = error
            commands, self._commands = self._commands, deque()
        self._accepting = False
        for command in commands:
            command()
        for stream in list(self._streams.values()):
            self._refuse(stream, EngineFailedError(f"the engine has failed: {error}"))

    def _refuse(self, stream: _Stream, error: Exception) -> None:
        stream.error = error
        self._wake_up(stream.loop, [stream])

    def _wake_up(self, loop: asyncio.AbstractEventLoop, streams: Iterable[_Stream]) -> None:
        """Once for all of a loop: each call from another thread is a system call."""

        def wake() -> None:
            for stream in streams:
                stream.ready.set()

        with contextlib.suppress(RuntimeError):  # the loop of these callers is closed
            loop.call_soon_threadsafe(wake)
