"""`rimuru bench serve`: workloads, times against a server that keeps a known pace, and the whole command."""

import gzip
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import pytest

from rimuru_jax.bench import workload
from rimuru_jax.cli import main
from rimuru_jax.tokenizer import load_tokenizer
from tests.test_tokenizer import byte_level_backend, write_folder

FIRST, EACH, TOKENS = 0.15, 0.03, 5
"""Seconds that the paced server takes, and the tokens of its answers."""


class Paced(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, Any]]] = []
    at_once: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        content = json.dumps({"data": [{"id": "paced"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if body.get("prompt") == "fail":
            self.send_error(418)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.at_once["now"] += 1
        self.at_once["most"] = max(self.at_once["most"], self.at_once["now"])
        chat = "messages" in body
        if chat:  # says who speaks before it has a token
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(TOKENS):
            time.sleep(EACH if number else FIRST)
            self.event({"choices": [{"delta": {"content": "a"}} if chat else {"text": "a"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": TOKENS}})
        self.at_once["now"] -= 1
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, content: dict[str, Any]) -> None:
        line = f"data: {json.dumps(content)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def paced() -> Iterator[str]:
    Paced.bodies.clear()
    Paced.at_once.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Paced) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def bench(tmp_path: Path, url: str, *arguments: object) -> dict[str, Any]:
    always = ["--base-url", url, "--save-detailed", "--result-dir", tmp_path, "--result-filename", "out.json"]
    assert main(["bench", "serve", *map(str, [*always, *arguments])]) == 0
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_times_are_those_of_the_server(paced, tmp_path, capsys, backend):
    figures = bench(
        tmp_path, paced, "--backend", backend, "--num-prompts", 6, "--max-concurrency", 2, "--random-output-len", 7,
        "--temperature", 0, "--ignore-eos", "--goodput", "ttft:10000", "--goodput", "tpot:1", "--num-warmups", 1,
    )  # fmt: skip
    body = Paced.bodies[-1]
    assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == (
        "paced",
        7,
        0,
        True,
    )
    assert len(Paced.bodies) == 7 and Paced.at_once["most"] == 2
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["total_output_tokens"] == 6 * TOKENS and figures["total_input_tokens"] == 66
    assert figures["output_lens"] == [TOKENS] * 6 and all(len(itl) == TOKENS - 1 for itl in figures["itls"])
    # A busy machine may be late, never early.
    whole = FIRST + (TOKENS - 1) * EACH
    for name, seconds in (("ttft", FIRST), ("itl", EACH), ("tpot", EACH), ("e2el", whole)):
        assert 0.9 * seconds < figures[f"median_{name}_ms"] / 1000 < seconds + 0.3
    assert figures["duration"] >= 3 * whole * 0.9
    assert figures["request_throughput"] == pytest.approx(6 / figures["duration"])
    assert figures["request_goodput"] == 0 and figures["max_concurrent_requests"] == 2
    assert "P99 TTFT (ms)" in capsys.readouterr().out


def test_failures_are_counted_and_named(paced, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fail"}\n{"turns": ["fine", "and then"], "output_tokens": 3}\n')
    figures = bench(
        tmp_path, paced, "--dataset-name", "custom", "--dataset-path", prompts, "--num-prompts", 4
    )
    assert (figures["completed"], figures["failed"]) == (2, 2)
    assert "failed requests: status 418" in capsys.readouterr().err
    assert sorted(body["max_tokens"] for body in Paced.bodies) == [3, 3, 256, 256]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], "gives no model"),
        (["--dataset-name", "trace"], "--dataset-name trace needs a --dataset-path"),
        (["--dataset-path", "x"], "--dataset-name random takes no --dataset-path"),
        (["--dataset-name", "trace", "--dataset-path", "/no/such"], "/no/such is no file"),
        (["--goodput", "ttft"], "--goodput is 'ttft'"),
        (["--metric-percentiles", "200"], "--metric-percentiles is '200'"),
        (["--percentile-metrics", "x"], "--percentile-metrics has 'x'"),
        (["--request-rate", "0"], "--request-rate and --burstiness must be positive"),
        (["--random-range-ratio", "1"], "--random-range-ratio is 1"),
        (["--num-prompts", "0"], "--num-prompts"),
    ],
)
def test_errors_are_one_sentence(capsys, arguments, message):
    assert main(["bench", "serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rimuru: error: ") and message in line


def test_arrivals_follow_rate_and_burstiness():
    requests = [workload.BenchRequest("x", 1, 1)] * 20_000
    for burstiness in (0.25, 1.0, 4.0):
        times = np.array(workload.arrivals(requests, 5.0, burstiness, seed=1))
        intervals = np.diff(times)
        assert times[-1] == pytest.approx(4000) and (intervals >= 0).all()
        # Of a gamma distribution of shape k the deviation over the mean is 1 / sqrt(k).
        assert intervals.std() / intervals.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert workload.arrivals(requests[:3], math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_traces_in_both_formats(tmp_path):
    folder = write_folder(tmp_path, byte_level_backend(), eos_token="<|im_end|>")
    maker = workload.PromptMaker(load_tokenizer(folder), as_text=False, seed=0)
    rows = [(10.0, 1100, 5, [7, 8]), (12.5, 700, 6, [7, 9]), (13.0, 3, 1, [])]
    table = "arrival_s,input_tokens,output_tokens,prefix_block_ids\n" + "".join(
        f"{at},{inputs},{outputs},{' '.join(map(str, blocks))}\n" for at, inputs, outputs, blocks in rows
    )
    with gzip.open(tmp_path / "trace.csv.gz", "wt") as file:
        file.write(table)
    lines = [
        json.dumps({"timestamp": 1000 * at, "input_length": i, "output_length": o, "hash_ids": blocks})
        for at, i, o, blocks in rows
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    for name in ("trace.csv.gz", "trace.jsonl"):
        one, two, three = workload.trace_requests(maker, tmp_path / name, 10)
        assert [len(request.prompt) for request in (one, two, three)] == [1100, 700, 3]
        assert [request.arrival for request in (one, two, three)] == [0.0, 2.5, 3.0]
        assert [request.output_tokens for request in (one, two, three)] == [5, 6, 1]
        assert one.prompt[:512] == two.prompt[:512] and one.prompt[512:600] != two.prompt[512:600]
        assert len(workload.trace_requests(maker, tmp_path / name, 2)) == 2
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n5,3\n9,0\n")
    lengths = workload.trace_lengths(tmp_path / "lengths.csv", 10)
    assert [(r.prompt_tokens, r.output_tokens, r.arrival) for r in lengths] == [(5, 3, None), (9, 1, None)]
    assert workload.arrivals(lengths, math.inf, 1.0, 0) == [0.0, 0.0]
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"bad.csv is no trace: wanted CSV with input_tokens"):
        workload.trace_requests(maker, tmp_path / "bad.csv", 1)


def test_random_prompts_share_only_their_prefix(tmp_path):
    folder = write_folder(tmp_path, byte_level_backend(), eos_token="<|im_end|>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    maker = workload.PromptMaker(tokenizer, as_text=False, seed=0)
    options = {"input_len": 100, "output_len": 10, "range_ratio": 0.5, "prefix_len": 20, "seed": 3}
    requests = workload.random_requests(maker, 50, **options)
    assert requests == workload.random_requests(maker, 50, **options)
    assert len({tuple(request.prompt[:20]) for request in requests}) == 1
    assert len({tuple(request.prompt[20:60]) for request in requests}) == 50
    lengths = [request.prompt_tokens - 20 for request in requests]
    assert all(len(request.prompt) == request.prompt_tokens for request in requests)
    assert 50 <= min(lengths) < 70 and 130 < max(lengths) <= 150
    ids = {token for request in requests for token in request.prompt}
    assert not ids & tokenizer.special_token_ids
    words = workload.PromptMaker(None, as_text=True, seed=0).make([(1, 30)])
    assert isinstance(words, str) and len(words.split()) == 30


def test_sharegpt(tmp_path):
    def conversation(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    path = tmp_path / "sharegpt.json"
    entries = [conversation("q" * 40, "a" * 80, "more"), conversation("alone"), conversation("q", "a" * 80)]
    path.write_text(json.dumps([*entries, conversation("q" * 40, "a" * 40_000)]))
    requests = workload.sharegpt_requests(path, 3, output_len=None, tokenizer=None, seed=0)
    assert requests == [workload.BenchRequest("q" * 40, 10, 20)] * 3
