"""OpenTelemetry spans of requests, for `--otlp-traces-endpoint` (extra `otel`). Attributes have vLLM's names."""

import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode

from rimuru_jax.server.request_log import EndedRequest

_GOOD = ("stop", "length", "abort", "client_closed_request")


class Tracing:
    """Sends a span for every request that has ended, under the span its client named, if it did.

    Args:
        endpoint: URL of a collector, for OTLP over HTTP: http://localhost:4318/v1/traces.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "rimuru_jax"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("rimuru_jax")

    def __call__(self, ended: EndedRequest) -> None:
        output = ended.output
        metrics = output.metrics if output else None
        end = time.time()
        start = end
        if metrics is not None:
            now = time.monotonic()
            start, end = (
                end - (now - moment) for moment in (metrics.arrival_time, metrics.finished_time or now)
            )
        span = self._tracer.start_span(
            "llm_request",
            context=extract(dict(ended.trace_headers)),
            kind=SpanKind.SERVER,
            start_time=int(start * 1e9),
        )
        span.set_attribute("gen_ai.request.id", ended.name)
        span.set_attribute("gen_ai.response.model", self._model)
        span.set_attribute("gen_ai.response.finish_reasons", [ended.reason])
        if output is not None:
            tokens = sum(len(part.token_ids) for part in output.outputs)
            span.set_attribute("gen_ai.usage.prompt_tokens", len(output.prompt_token_ids))
            span.set_attribute("gen_ai.usage.completion_tokens", tokens)
        if metrics is not None:
            for name, value in (
                ("time_in_queue", metrics.time_in_queue),
                ("time_to_first_token", metrics.time_to_first_token),
                ("e2e", end - start),
            ):
                if value is not None:
                    span.set_attribute(f"gen_ai.latency.{name}", value)
            span.set_attribute("rimuru.preemptions", metrics.num_preemptions)
        if ended.reason not in _GOOD:
            span.set_status(Status(StatusCode.ERROR, ended.reason))
        span.end(int(end * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
