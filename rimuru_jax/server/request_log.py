"""What a server says of its requests: one JSON object per line on stderr, for `--log-format json`."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rimuru_jax.engine import Engine
from rimuru_jax.outputs import RequestOutput

logger = logging.getLogger(__name__)

STATS_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request that is over, for whatever reason."""

    name: str
    trace_headers: Mapping[str, str]
    """`traceparent` and `tracestate` of the client, if it sent them."""
    output: RequestOutput | None
    """The last that was seen; None when it was refused before it gave anything."""
    reason: str
    """Finish reason of the first completion, or the kind of error."""


type EndObserver = Callable[[EndedRequest], None]


def log_ended(ended: EndedRequest) -> None:
    fields: dict[str, Any] = {"request_id": ended.name, "reason": ended.reason}
    output = ended.output
    if output is not None:
        fields["prompt_tokens"] = len(output.prompt_token_ids)
        fields["output_tokens"] = sum(len(part.token_ids) for part in output.outputs)
    if output is not None and (metrics := output.metrics) is not None:
        end = metrics.finished_time or time.monotonic()
        seconds = {
            "queue_s": metrics.time_in_queue,
            "ttft_s": metrics.time_to_first_token,
            "e2e_s": end - metrics.arrival_time,
        }
        fields |= {name: round(value, 6) for name, value in seconds.items() if value is not None}
        fields["preemptions"] = metrics.num_preemptions
    logger.info("request ended", extra={"fields": fields})


async def log_stats(engine: Engine, seconds: float = STATS_SECONDS) -> None:
    """Say every so often how the engine does, until cancelled; nothing while it is idle."""
    before, since = dict(engine.metrics.counters), time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        counters, now = dict(engine.metrics.counters), time.monotonic()
        if counters["scheduler_passes"] != before["scheduler_passes"]:
            rates = {
                f"{name}_per_s": round((counters[name] - before[name]) / (now - since), 1)
                for name in ("prompt_tokens", "generation_tokens")
            }
            gauges = (
                "num_requests_running",
                "num_requests_waiting",
                "resident_experts",
                "adjuster_r_b",
                "adjuster_f_b",
            )
            fields = rates | {name: engine.metrics.gauges[name] for name in gauges}
            logger.info("stats", extra={"fields": fields})
        before, since = counters, now


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | getattr(record, "fields", {}), ensure_ascii=False)


def use_json_logs() -> None:
    """Everything that this process logs from now on is JSON on stderr; of this package from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("rimuru_jax").setLevel(logging.INFO)
