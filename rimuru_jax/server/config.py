"""How the server behaves."""

from dataclasses import dataclass
from typing import Literal

from rimuru_jax.server.tool_parsers import PARSERS, ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Names are vLLM's where it has them."""

    served_model_name: str
    api_key: str | None = None
    """Asked for by everything but `/health`, `/version`, `/metrics` and the page at `/`, which asks its user."""
    max_num_queued_reqs: int | None = None
    """Requests that may wait for admission; more get status 429. None: no limit."""
    request_timeout: float | None = None
    """Seconds after which a request is ended. None: never."""
    max_body_bytes: int = 8 << 20
    """Larger requests get status 413."""
    max_completions: int = 128
    """Completions of one HTTP request, prompts times `n`."""
    tool_call_parser: str | None = None
    """How the model writes calls of tools, for `tool_choice` "auto"; see `tool_parsers.PARSERS`. None: that is refused."""

    log_format: Literal["text", "json"] = "text"
    """"json": a line for every request that has ended, and how the engine does every ten seconds."""
    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry spans of requests go, over HTTP."""

    def tool_parser(self) -> ToolParser | None:
        return PARSERS[self.tool_call_parser] if self.tool_call_parser else None
