"""Logs and spans of requests, as those who collect them see them."""

import io
import json
import logging
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rimuru_jax.server import request_log
from tests.server.running import running
from tests.server.test_flow import engine, post


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(request_log.JsonFormatter())
    package = logging.getLogger("rimuru_jax")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    yield stream
    package.removeHandler(handler)
    package.setLevel(level)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        server.shutdown()


def test_requests_are_logged_and_traced(lines, collector, monkeypatch):
    monkeypatch.setattr(request_log.log_stats, "__defaults__", (0.05,))
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_HEADERS", raising=False)
    endpoint, received = collector
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    begin = time.time()
    with running(engine(), log_format="json", otlp_traces_endpoint=endpoint) as url:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "request_id": "mine"}
        headers = {"traceparent": parent}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
        assert post(url, prompt=[10**6], request_id="wrong").status_code == 400
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True, "request_id": "left", "max_tokens": 250}) as answer:  # fmt: skip
            next(answer.iter_lines())
        time.sleep(0.2)
    entries = [json.loads(line) for line in lines.getvalue().splitlines()]
    ended = {entry["request_id"]: entry for entry in entries if entry["message"] == "request ended"}
    assert (
        ended["mine"].items()
        >= {"reason": "length", "prompt_tokens": 3, "output_tokens": 4, "level": "info"}.items()
    )
    assert 0 <= ended["mine"]["queue_s"] <= ended["mine"]["ttft_s"] <= ended["mine"]["e2e_s"]
    assert ended["wrong"]["reason"] == "invalid_request_error"
    assert ended["left"]["reason"] == "client_closed_request" and ended["left"]["output_tokens"] < 250
    stats = [entry for entry in entries if entry["message"] == "stats"]
    assert stats and sum(entry["generation_tokens_per_s"] for entry in stats) > 0

    spans = {}
    for message in received:
        for resource in ExportTraceServiceRequest.FromString(message).resource_spans:
            assert any(
                a.key == "service.name" and a.value.string_value == "rimuru_jax"
                for a in resource.resource.attributes
            )
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                attributes = {attribute.key: attribute.value for attribute in span.attributes}
                spans[attributes["gen_ai.request.id"].string_value] = (span, attributes)
    assert set(spans) == {"mine", "wrong", "left"}
    span, attributes = spans["mine"]
    assert (
        span.name == "llm_request"
        and span.trace_id.hex() == parent[3:35]
        and span.parent_span_id.hex() == parent[36:52]
    )
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 4
    assert begin - 1 < span.start_time_unix_nano / 1e9 <= span.end_time_unix_nano / 1e9 < time.time() + 1
    assert spans["wrong"][0].status.code == 2 and span.status.code == 0
