"""What clients do to a server that they should not: generated requests, dropped connections, floods, slow readers, aborts.

    python benchmarks/reliability.py            # all parts at full size against a server process: about ten minutes
    python benchmarks/reliability.py --scale 0.1 --only dropped,random_load

The model is tiny and random, with a page pool that is too small for its requests, so that they are preempted. Each part
checks what it says in its docstring and returns figures; `docs/reliability.md` has those of a run.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tokenizers

from rimuru_jax import Engine, SamplingParams
from rimuru_jax.models.config import Moe
from rimuru_jax.models.hybrid import hybrid, random_model
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.serve import listen, serve

MAX_QUEUED = 64
MAX_MODEL_LEN = 256
VOCAB = 260
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | tojson if tools }}"
_TEXT_LIMIT = MAX_MODEL_LEN // 2  # a token is a byte


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def pool(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/v1/pool", timeout=60).json()

    def check_idle(self, seconds: float = 60.0) -> None:
        """Everything that was given out comes back, and nothing waits."""
        deadline = time.monotonic() + seconds
        while True:
            pool = self.pool()
            used = {name: kind["used"] for name, kind in pool["kinds"].items() if name != "expert"}
            if not pool["requests"] and not any(used.values()):
                return
            assert time.monotonic() < deadline, f"not idle: {pool['requests']} {used}"
            time.sleep(0.05)


def build_engine(folder: Path, **config: Any) -> Engine:
    """A model in memory whose tokens are bytes; equal in every process."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0} | {letter: number + 1 for number, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": _TEMPLATE})
    )
    model = hybrid(
        ("conv", "attn"),
        hidden_size=32,
        vocab_size=VOCAB,
        moe=Moe(num_experts=4, num_experts_per_tok=2, intermediate_size=32, normalize=True),
    )
    settings: dict[str, Any] = {
        "dtype": "float32", "page_pool_bytes": 192 << 10, "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8, "max_num_batched_tokens": 64,
    }  # fmt: skip
    return Engine(random_model(model, "float32"), tokenizer=str(folder), **(settings | config))


def server_settings() -> dict[str, Any]:
    return {"served_model_name": "model", "max_num_queued_reqs": MAX_QUEUED, "tool_call_parser": "hermes"}


@contextmanager
def server_process() -> Iterator[Server]:
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("http"), "the server did not start"
        try:
            yield Server(line.strip(), process.pid)
        finally:
            process.terminate()
            last = process.stdout.read()
        assert process.wait(60) == 0 and last == "cut 0\n", f"the server did not end well: {last!r}"


def run_server() -> None:
    with tempfile.TemporaryDirectory() as folder, listen("127.0.0.1", 0) as server_socket:
        engine = build_engine(Path(folder))
        host, port = server_socket.getsockname()
        cut = serve(
            engine, ServerConfig(**server_settings()), server_socket, shutdown_timeout=5.0,
            ready=lambda: print(f"http://{host}:{port}", flush=True),
        )  # fmt: skip
        print(f"cut {cut}", flush=True)


# Generated requests -------------------------------------------------------------------------------------------------


def generated(server: Server, count: int, seed: int = 0) -> dict[str, Any]:
    """`count` requests of schemathesis, right and wrong ones by the OpenAPI description: none gets 5xx, none hangs."""
    import hypothesis
    import schemathesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    posts = [operation for operation in operations if operation.method.upper() == "POST"]
    statuses: Counter[str] = Counter()
    slowest = 0.0
    begin = time.perf_counter()
    # A GET has no body to vary.
    plan = [(operation, 5) for operation in operations if operation not in posts]
    left = count - sum(number for _, number in plan)
    plan += [(operation, -(-left // len(posts))) for operation in posts]
    for operation, number in plan:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation in posts else (None,):
            examples = -(-number // 2) if mode else number
            strategy = operation.as_strategy(generation_mode=mode) if mode else operation.as_strategy()

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=examples, deadline=None, database=None,
                suppress_health_check=[*hypothesis.HealthCheck],  # type: ignore[arg-type]
                phases=[hypothesis.Phase.generate],
            )  # fmt: skip
            @hypothesis.given(case=strategy)
            def check(case: Any) -> None:
                nonlocal slowest
                sent = time.perf_counter()
                answer = case.call(base_url=server.url, timeout=120)
                slowest = max(slowest, time.perf_counter() - sent)
                statuses[f"{answer.status_code // 100}xx"] += 1
                assert answer.status_code < 500, (case.method, case.path, case.body, answer.text[:500])

            check()
    seconds = time.perf_counter() - begin
    server.check_idle()
    return {
        "requests": sum(statuses.values()), "statuses": dict(statuses), "slowest_s": round(slowest, 2),
        "seconds": round(seconds, 1),
    }  # fmt: skip


# Raw connections ----------------------------------------------------------------------------------------------------


def _raw(server: Server, content: bytes, seconds: float = 10.0) -> int | None:
    """Send bytes as they are; the status of the answer, None when the server just closes or waits for more."""
    with socket.create_connection(server.address, timeout=seconds) as connection:
        try:
            connection.sendall(content)
            answer = connection.recv(4096)
        except OSError:
            return None
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.") else None


def malformed(server: Server, count: int, seed: int = 0) -> dict[str, Any]:
    """Bytes that are no request, or one with a body that is no JSON or no UTF-8, or too large: 4xx, or closed."""
    rng = random.Random(seed)

    def post(body: bytes, length: int | bytes | None = None, path: bytes = b"/v1/completions") -> bytes:
        size = (
            str(len(body)).encode()
            if length is None
            else str(length).encode()
            if isinstance(length, int)
            else length
        )
        return (
            b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
            + size + b"\r\nConnection: close\r\n\r\n" + body
        )  # fmt: skip

    makers = [
        lambda: rng.randbytes(rng.randrange(1, 2000)) + b"\r\n\r\n",
        lambda: post(rng.randbytes(rng.randrange(1, 500))),
        lambda: post(b'{"prompt": "' + rng.randbytes(rng.randrange(1, 50)) + b'\xff"}'),
        lambda: post(b'{"prompt": "a\xc3"}'),
        lambda: post(b'{"prompt": "\\ud800\\udc"}'),
        lambda: post(b"[" * rng.randrange(1, 50_000)),
        lambda: post(b'{"a":' * rng.randrange(1, 20_000)),
        lambda: post(b"", length=10**12),
        lambda: post(b"", length=b"-5"),
        lambda: post(b"", length=b"9" * 5000),
        lambda: post(b"{}", path=b"/v1/" + rng.randbytes(20).hex().encode()),
        lambda: b"GET /" + b"a" * rng.randrange(1, 200_000) + b" HTTP/1.1\r\n\r\n",
        lambda: b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * rng.randrange(70_000, 200_000) + b"\r\n\r\n",
        lambda: b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx\r\n",
        lambda: post(b" " * (9 << 20)),
    ]
    statuses: Counter[str] = Counter()
    for number in range(count):
        status = _raw(server, makers[number % len(makers)]())
        statuses[str(status)] += 1
        assert status is None or 400 <= status < 500, status
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.check_idle()
    return {"requests": count, "statuses": dict(sorted(statuses.items()))}


def dropped(server: Server, count: int, seed: int = 0) -> dict[str, Any]:
    """Connections opened and dropped at any point: no file, page or request of theirs is left."""
    rng = random.Random(seed)
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    whole = head % len(body) + body
    server.check_idle()
    files, memory = server.open_files(), server.rss_mib()
    kinds: Counter[str] = Counter()
    slots = asyncio.Semaphore(100)

    async def one() -> None:
        kind = rng.choice(["nothing", "half a head", "half a body", "a request", "a stream", "reset"])
        async with slots:
            reader, writer = await asyncio.open_connection(*server.address)
            kinds[kind] += 1
            try:
                if kind == "half a head":
                    writer.write(whole[: rng.randrange(1, len(head))])
                elif kind == "half a body":
                    writer.write(whole[: -rng.randrange(1, len(body))])
                elif kind != "nothing":
                    writer.write(whole)
                    if kind == "a stream":
                        await asyncio.wait_for(reader.readline(), 60)
                    elif kind == "reset":
                        await asyncio.sleep(rng.random() * 0.05)
                        writer.transport.abort()
                await asyncio.wait_for(writer.drain(), 60)
            except OSError:
                pass
            finally:
                writer.close()

    async def everybody() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    begin = time.perf_counter()
    asyncio.run(everybody())
    seconds = time.perf_counter() - begin
    server.check_idle()
    deadline = time.monotonic() + 20
    while server.open_files() > files + 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.open_files() <= files + 5, (files, server.open_files())
    return {
        "connections": count, "kinds": dict(kinds), "seconds": round(seconds, 1),
        "open_files": [files, server.open_files()], "rss_mib": [round(memory), round(server.rss_mib())],
    }  # fmt: skip


def slow_readers(server: Server, count: int, seconds: float) -> dict[str, Any]:
    """Streams read by one byte a second hold up nobody else, and their pages come back when they are dropped."""
    body = {"prompt": [7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}

    def latency() -> float:
        begin = time.perf_counter()
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        return time.perf_counter() - begin

    latency()
    alone = sorted(latency() for _ in range(10))[5]
    content = json.dumps(body | {"stream": True, "max_tokens": 200}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(content), content)
    )
    stop = threading.Event()

    def read() -> None:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(server.address)
            connection.sendall(request)
            while not stop.wait(1.0) and connection.recv(1):
                pass

    readers = [threading.Thread(target=read) for _ in range(count)]
    for reader in readers:
        reader.start()
    time.sleep(1.0)
    server.check_idle()  # the engine has done what they asked for, whether they read it or not
    beside = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        beside.append(latency())
    stop.set()
    for reader in readers:
        reader.join()
    server.check_idle()
    middle = sorted(beside)[len(beside) // 2]
    return {"readers": count, "latency_alone_s": round(alone, 3), "latency_beside_s": round(middle, 3)}


def flood(server: Server, count: int) -> dict[str, Any]:
    """Far more requests at once than may wait: each gets its answer or 429, and the answers are right."""

    async def everybody() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            posts = (
                client.post(
                    "/v1/completions",
                    json={"prompt": [number % 7 + 1], "max_tokens": 20, "temperature": 0, "ignore_eos": True},
                )
                for number in range(count)
            )
            return await asyncio.gather(*posts)

    begin = time.perf_counter()
    answers = asyncio.run(everybody())
    seconds = time.perf_counter() - begin
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) <= {200, 429} and statuses[200] >= min(count, MAX_QUEUED)
    texts: dict[int, set[str]] = {}
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            texts.setdefault(number % 7, set()).add(answer.json()["choices"][0]["text"])
        else:
            assert answer.headers["retry-after"] == "1"
    assert all(len(found) == 1 for found in texts.values())
    server.check_idle()
    return {"requests": count, "statuses": dict(statuses), "seconds": round(seconds, 1)}


# Random load --------------------------------------------------------------------------------------------------------


def random_load(server: Server, count: int, kinds: int = 60, seed: int = 0) -> dict[str, Any]:
    """Random requests, of which many are aborted or left: each ends with a reason and says what it says alone.

    Memory must be flat: the second half of the requests may not add to what the first half took.
    """
    rng = random.Random(seed)
    bodies = [
        {
            "prompt": [rng.randrange(1, VOCAB - 3) for _ in range(rng.randrange(1, 60))],
            "max_tokens": rng.randrange(1, 150),
            "temperature": rng.choice([0.0, 0.0, 1.0]),
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(kinds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        alone = build_engine(Path(folder), max_num_seqs=1, max_num_batched_tokens=16, page_pool_bytes=2 << 20)
        expected = []
        for body in bodies:
            params = SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})
            expected.append(alone.generate([body["prompt"]], params, use_tqdm=False)[0].outputs[0].text)
    reasons: Counter[str] = Counter()

    async def one(client: httpx.AsyncClient, slots: asyncio.Semaphore, name: str) -> None:
        index = rng.randrange(kinds)
        body = bodies[index] | {"stream": True, "request_id": name}
        what = rng.choice(["stay", "stay", "stay", "abort", "leave"])
        patience = rng.randrange(1, 30)
        text, reason, events = "", None, 0
        async with slots, client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.status_code
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                choice = json.loads(data)["choices"][0]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                events += 1
                if events == patience and what == "abort":
                    await client.post("/abort_requests", json={"request_ids": [name]})
                if events == patience and what == "leave":
                    reasons["left"] += 1
                    assert expected[index].startswith(text.rstrip("\ufffd"))
                    return
        assert reason is not None, "a stream ended without a reason"
        reasons[reason] += 1
        if reason == "abort":
            assert expected[index].startswith(text.rstrip("\ufffd"))
        else:
            assert reason == "length" and text == expected[index], (index, text, expected[index])

    async def everybody(first: int, number: int) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            slots = asyncio.Semaphore(MAX_QUEUED // 2)
            await asyncio.gather(*(one(client, slots, f"r{first + i}") for i in range(number)))

    before = server.pool()["metrics"].get("num_preemptions", 0)
    begin = time.perf_counter()
    asyncio.run(everybody(0, count // 2))
    server.check_idle()
    half = server.rss_mib()
    asyncio.run(everybody(count // 2, count - count // 2))
    server.check_idle()
    end = server.rss_mib()
    preemptions = server.pool()["metrics"].get("num_preemptions", 0) - before
    assert end < half * 1.1 + 50, f"memory grows: {half:.0f} then {end:.0f} MiB"
    return {
        "requests": count, "reasons": dict(reasons), "preemptions": preemptions,
        "rss_mib": [round(half), round(end)], "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="", help="parts, by commas")
    options = parser.parse_args(arguments)
    if options.serve:
        run_server()
        return

    def scaled(number: int) -> int:
        return max(1, round(number * options.scale))

    parts = {
        # hypothesis leaves out what it has tried: 5,000 are left.
        "generated": lambda server: generated(server, scaled(5250)),
        "malformed": lambda server: malformed(server, scaled(300)),
        "dropped": lambda server: dropped(server, scaled(10_000)),
        "slow_readers": lambda server: slow_readers(server, scaled(50), 20 * options.scale),
        "flood": lambda server: flood(server, scaled(1000)),
        "random_load": lambda server: random_load(server, scaled(1000)),
    }
    chosen = [name for name in options.only.split(",") if name] or list(parts)
    with server_process() as server:
        for name in chosen:
            print(json.dumps({name: parts[name](server), "rss_mib": round(server.rss_mib())}), flush=True)


if __name__ == "__main__":
    main()
