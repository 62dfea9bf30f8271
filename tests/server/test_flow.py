"""Queues, clients that leave, faults and the end: nothing hangs, nothing is left over."""

import asyncio
import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import ClassVar

import httpx
import numpy as np
import pytest

from rimuru_jax import Engine, RequestOutput, SamplingParams
from rimuru_jax.cli import main
from rimuru_jax.models.config import Moe
from rimuru_jax.models.hybrid import hybrid, random_model
from rimuru_jax.server import bounded_http
from rimuru_jax.server.async_engine import AsyncEngine, EngineFailedError, QueueFullError, ShuttingDownError
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.delivery import Delivery, Job
from rimuru_jax.server.serve import listen
from tests.models.tiny_checkpoints import write_checkpoint
from tests.server.running import running

VOCAB = 96
MODEL = hybrid(
    ("conv", "attn"),
    hidden_size=32,
    vocab_size=VOCAB,
    moe=Moe(num_experts=4, num_experts_per_tok=2, intermediate_size=32, normalize=True),
)


def engine(**config) -> Engine:
    settings = {"dtype": "float32", "page_pool_bytes": 1 << 19, "max_model_len": 256, "max_num_seqs": 4}
    return Engine(random_model(MODEL, "float32"), **(settings | config))


def params(max_tokens: int, **others) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **others)


def check_idle(one: Engine) -> None:
    assert not one.has_unfinished_requests()
    one.step()
    one.allocator.check_ledger()
    used = {name: counts.used for name, counts in one.allocator.ledger().kinds.items() if name != "expert"}
    assert used == dict.fromkeys(used, 0)


def test_small_packets_are_sent_at_once():
    """Else a first token waits for the acknowledgement of the headers before it, which clients hold back for 40 ms."""

    async def connect() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(note, sock=listen("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await accepted
            finally:
                writer.close()

    assert asyncio.run(connect())


def test_what_was_there_before_is_not_collected_while_serving():
    one, before = engine(), gc.get_freeze_count()  # Python itself freezes some at its start
    with running(one):
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() <= before


async def collect(served: AsyncEngine, name: str, prompt: list[int], max_tokens: int) -> list[int]:
    last = None
    async for output in served.generate(name, prompt, params(max_tokens)):
        last = output
    assert last is not None
    return last.outputs[0].token_ids


def test_many_callers_get_what_each_would_have_alone():
    alone = engine(max_num_seqs=1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 30)).tolist() for _ in range(20)]
    expected = [alone.generate([p], params(12), use_tqdm=False)[0].outputs[0].token_ids for p in prompts]

    async def everybody() -> list[list[int]]:
        served = AsyncEngine(engine())
        served.start()
        results = await asyncio.gather(*(collect(served, str(i), p, 12) for i, p in enumerate(prompts)))
        assert await served.drain(5) == 0
        check_idle(served.engine)
        return results

    assert asyncio.run(everybody()) == expected


def test_a_caller_that_leaves_frees_its_pages():
    async def leave() -> None:
        served = AsyncEngine(engine())
        served.start()
        stream = served.generate("a", [1, 2, 3], params(200))
        await anext(stream)
        assert served.num_unfinished == 1
        await stream.aclose()
        # Another one ends by cancellation.
        task = asyncio.create_task(collect(served, "b", [4, 5], 200))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await served.run_in_engine(lambda one: len(one.scheduler.running)) == 0
        assert await collect(served, "a", [1, 2, 3], 3)  # the name is free again
        assert await served.drain(5) == 0
        check_idle(served.engine)

    asyncio.run(leave())


def test_an_answer_that_nobody_takes_frees_its_pages():
    class Client:
        headers: ClassVar[dict[str, str]] = {}

        async def receive(self) -> None:
            await asyncio.sleep(1000)

    async def leave() -> None:
        served = AsyncEngine(engine())
        served.start()
        delivery = Delivery(served, ServerConfig(served_model_name="x"))
        job = Job(name="a", prompts=[[1, 2, 3], [4]], params=params(200), priority=0)
        answer = await delivery.stream(Client(), job, {}, lambda *_: {}, None)  # type: ignore[arg-type]
        assert served.num_unfinished == 2
        del answer  # as when a client goes away before the first byte
        deadline = time.monotonic() + 10
        while served.num_unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert served.num_unfinished == 0
        assert await served.drain(5) == 0
        check_idle(served.engine)

    asyncio.run(leave())


def test_waiting_for_a_step_counts_as_waiting():
    async def late() -> None:
        one = engine()
        served = AsyncEngine(one)
        served.start()
        await collect(served, "warm", [1], 2)
        slow_down(one, 0.3)
        first = asyncio.create_task(collect(served, "first", [1], 3))
        await asyncio.sleep(0.15)  # in the middle of a step
        begin, last = time.monotonic(), None
        async for output in served.generate("second", [2], params(1)):
            last = output
        waited = time.monotonic() - begin
        assert last is not None and last.metrics is not None and waited > 0.4
        assert waited - 0.1 < (last.metrics.time_to_first_token or 0) <= waited
        await first
        await served.drain(5)

    asyncio.run(late())


def test_a_name_used_again_gets_nothing_of_its_predecessor():
    async def again() -> None:
        served = AsyncEngine(engine())
        served.start()
        for prompt in range(1, 20):
            stream = served.generate("same", [prompt], params(200))
            await anext(stream)
            await stream.aclose()
            outputs = [output async for output in served.generate("same", [prompt, 9], params(3))]
            assert all(output.prompt_token_ids == [prompt, 9] for output in outputs)
            assert len(outputs[-1].outputs[0].token_ids) == 3
        assert await served.drain(5) == 0
        check_idle(served.engine)

    asyncio.run(again())


def test_a_caller_that_does_not_ask_runs_out_of_time_too():
    async def dawdle() -> None:
        one = engine()
        served = AsyncEngine(one)
        served.start()
        # Whatever it takes to compile is done before the clock runs.
        await collect(served, "warm", [1, 2, 3], 30)
        slow_down(one, 0.02)
        stream = served.generate("a", [1, 2, 3], params(200), timeout=0.5)
        await anext(stream)
        deadline = time.monotonic() + 10
        while await served.run_in_engine(lambda one: bool(one.scheduler.running)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError):
            await anext(stream)
        assert len(await collect(served, "a", [1, 2, 3], 3)) == 3
        assert await served.drain(5) == 0
        check_idle(one)

    asyncio.run(dawdle())


def test_first_and_last_outputs_are_taken_before_others():
    async def compete() -> None:
        served = AsyncEngine(engine())  # not started: what it publishes is made here
        order: list[str] = []

        async def take(name: str) -> None:
            async for output in served.generate(name, [1], params(9)):
                order.append(output.request_id)

        tasks = [asyncio.create_task(take(name)) for name in "abcd"]
        await asyncio.sleep(0)

        def output(name: str, finished: bool = False) -> RequestOutput:
            return RequestOutput(
                request_id=f"{name}#{'abcd'.index(name)}",
                prompt=None,
                prompt_token_ids=[1],
                finished=finished,
            )

        async def publish(*outputs: RequestOutput) -> set[str]:
            order.clear()
            await asyncio.to_thread(served._publish, list(outputs))
            await asyncio.sleep(0.05)
            return {name[0] for name in order[:2]}

        await publish(output("a"), output("b"), output("c"))
        assert await publish(output("a"), output("b"), output("c", finished=True), output("d")) == {"c", "d"}
        await publish(*(output(name, finished=True) for name in "abd"))
        await asyncio.gather(*tasks)

    asyncio.run(compete())


def test_only_so_many_wait_and_refusals_reach_their_caller():
    async def flood() -> None:
        served = AsyncEngine(engine(max_num_seqs=1), max_num_queued_reqs=2)
        served.start()
        results = await asyncio.gather(
            *(collect(served, str(i), [i + 1], 20) for i in range(8)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, QueueFullError)]
        assert len(refused) >= 5 and "which is the limit (max_num_queued_reqs)" in str(refused[0])
        assert all(len(result) == 20 for result in results if not isinstance(result, BaseException))
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await collect(served, "x", [10**6], 1)
        await served.drain(5)
        with pytest.raises(ShuttingDownError):
            await collect(served, "y", [1], 1)
        check_idle(served.engine)

    asyncio.run(flood())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_fails_everybody_at_once():
    async def fail() -> None:
        one = engine()
        step, steps = one.step, iter(range(5))

        def breaking() -> list[RequestOutput]:
            if next(steps, None) is None:
                raise RuntimeError("the device is gone")
            return step()

        one.step = breaking  # type: ignore[method-assign]
        served = AsyncEngine(one)
        served.start()
        results = await asyncio.gather(
            *(collect(served, str(i), [i + 1], 200) for i in range(3)), return_exceptions=True
        )
        assert all(
            isinstance(result, EngineFailedError) and "the device is gone" in str(result)
            for result in results
        )
        with pytest.raises(EngineFailedError):
            await collect(served, "late", [1], 1)
        with pytest.raises(EngineFailedError):
            await served.run_in_engine(lambda one: None)
        assert await served.drain(1) == 0

    asyncio.run(fail())


def slow_down(one: Engine, seconds: float) -> None:
    step = one.step
    one.step = lambda: (time.sleep(seconds), step())[1]  # type: ignore[method-assign]


def post(url: str, **body) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_heads_have_an_end():
    def begin(url: str) -> socket.socket:
        host, port = url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=20)

    def status(url: str, *pieces: bytes) -> int:
        with begin(url) as connection:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)  # so that it comes by itself
            return int(connection.recv(4096).split()[1])

    line, some = b"GET /health HTTP/1.1\r\n", b"x" * 30_000
    with running(engine()) as url:
        assert status(url, line + b"A: " + some + b"\r\nB: " + some + b"\r\n\r\n") == 200
        assert status(url, line + b"A: " + some, some + b"\r\n\r\n") == 200
        assert status(url, line + b"A: " + some * 3 + b"\r\n\r\n") == 400
        assert status(url, line + b"A: " + some, some, some) == 400, "however long it would become"
        assert status(url, line + b"".join(b"A%d: 1\r\n" % i for i in range(20_000)) + b"\r\n") == 400
        assert status(url, b"GET /" + some * 3 + b" HTTP/1.1\r\n\r\n") == 400
        with httpx.Client(base_url=url, timeout=60) as client:  # one connection
            for _ in range(3):
                assert client.post("/tokenize", content=b" " * 100_000).status_code == 400, "no JSON"
                assert client.get("/health", headers={"A": "x" * 30_000}).status_code == 200


def test_heads_come_in_time(monkeypatch):
    monkeypatch.setattr(bounded_http, "HEAD_SECONDS", 0.4)
    one = engine()
    slow_down(one, 0.02)
    with running(one) as url:
        host, port = url.removeprefix("http://").split(":")
        for start in (b"", b"GET /health HTTP/1.1\r\nA: "):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(start)
                assert connection.recv(4096) == b"", "closed"
        # Answers may take longer, and the next request may come later.
        with httpx.Client(base_url=url, timeout=60) as client:
            for _ in range(2):
                body = {"prompt": [1], "max_tokens": 40, "ignore_eos": True, "stream": True}
                assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
                time.sleep(0.5)


def test_over_http():
    one = engine(max_num_seqs=1)
    slow_down(one, 0.02)  # so that the long requests below are still running when they are looked at
    with running(
        one, max_num_queued_reqs=1, request_timeout=20.0, max_body_bytes=4096, api_key="secret"
    ) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        client = httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=60)
        body = {"prompt": [1, 2], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        assert client.post("/v1/completions", content=b"x" * 5000).status_code == 413
        chunked = client.post("/v1/completions", content=(b"x" * 1000 for _ in range(9)))
        assert chunked.status_code == 413

        # A stream holds the only slot and another waits: the third is refused, and told when to come again.
        with client.stream(
            "POST", "/v1/completions", json=body | {"stream": True, "request_id": "first"}
        ) as first:
            lines = first.iter_lines()
            assert next(lines).startswith("data: {")
            waiting = threading.Thread(
                target=lambda: client.post("/v1/completions", json=body | {"max_tokens": 2})
            )
            waiting.start()
            deadline = time.monotonic() + 10
            while len(one.scheduler.waiting) < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert (
                client.post("/abort_requests", json={"request_ids": ["first", "unknown"]}).status_code == 200
            )
            events = [line.removeprefix("data: ") for line in lines if line]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
        waiting.join()

        # Clients that drop the connection, before and after the first token.
        for seconds in (0.0, 0.3):
            with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:  # type: ignore[arg-type]
                content = json.dumps(body | {"stream": seconds > 0}).encode()
                raw.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
                    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                    % (len(content), content)
                )
                time.sleep(seconds)
        deadline = time.monotonic() + 10
        while one.has_unfinished_requests() and time.monotonic() < deadline:
            time.sleep(0.01)
        answer = client.post("/v1/completions", json=body | {"max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        client.close()
    check_idle(one)


def test_a_request_that_takes_too_long_is_ended():
    one = engine()
    for count in (1, 20):  # whatever it takes to compile is done before the clock runs
        one.generate(
            [1],
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
    slow_down(one, 0.05)
    with running(one, request_timeout=1.0) as url:
        answer = post(url, prompt=[1], max_tokens=200, temperature=0, ignore_eos=True)
        assert answer.status_code == 504 and "request_timeout" in answer.json()["error"]["message"]
        assert post(url, prompt=[1], max_tokens=1, temperature=0).status_code == 200
    check_idle(one)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_turns_red():
    one = engine()
    with running(one) as url:
        assert post(url, prompt=[1], max_tokens=1).status_code == 200

        def broken() -> None:
            raise RuntimeError("the device is gone")

        one.step = broken  # type: ignore[method-assign,assignment]
        for _ in range(2):
            answer = post(url, prompt=[1], max_tokens=1)
            assert answer.status_code == 500 and "the device is gone" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 500
        assert httpx.get(f"{url}/metrics").status_code == 200
        assert httpx.get(f"{url}/v1/pool").status_code == 500


def command(*arguments: str) -> list[str]:
    code = f"import sys; from rimuru_jax.cli import main; sys.exit(main({list(arguments)!r}))"
    return [sys.executable, "-c", code]


def test_sigterm_finishes_what_it_can_and_says_what_it_cut(tmp_path):
    write_checkpoint(tmp_path / "model", "mixtral", max_position_embeddings=65536)
    arguments = (
        "serve",
        str(tmp_path / "model"),
        "--port",
        "0",
        "--page-pool-bytes",
        "64MiB",
        "--shutdown-timeout",
        "0.3",
    )
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = ""
        while "serving" not in line:
            line = process.stderr.readline()
            assert line, "the server did not start"
        url = line.split(" on ")[1].split()[0]
        body = {"prompt": [1, 2], "max_tokens": 60000, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
        assert "1 requests were cut off after 0.3 s" in process.stderr.read()
        assert process.wait(20) == 0


def test_refusals_before_anything_is_loaded(capsys, tmp_path, monkeypatch):
    def refusal(*arguments: str) -> str:
        assert main(["serve", *arguments]) == 2
        *notes, error = capsys.readouterr().err.splitlines()
        assert error.startswith("rimuru: error: ") and all(
            note.startswith("rimuru: loading") for note in notes
        )
        return error

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --host or --port" in refusal("--port", str(taken.getsockname()[1]))
    assert "--host" in refusal("--host", "256.1.1.1", "--port", "0")
    assert "No such option" in refusal("--prot", "1")
    assert "--max-num-queued-reqs is 0" in refusal("--max-num-queued-reqs", "0", "--port", "0")
    assert "needs a --tool-call-parser" in refusal("--enable-auto-tool-choice", "--port", "0")
    assert "it must be one of hermes, qwen3_coder" in refusal("--tool-call-parser", "x", "--port", "0")
    assert "no config.json" in refusal(str(tmp_path), "--port", "0")
    write_checkpoint(tmp_path / "model", "mixtral")
    assert "page_pool_bytes" in refusal(str(tmp_path / "model"), "--page-pool-bytes", "1KiB", "--port", "0")
    for name in [name for name in sys.modules if name.startswith(("rimuru_jax.server", "fastapi"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "install rimuru-jax[server]" in refusal("--port", "0")
