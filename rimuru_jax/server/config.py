"""How the server behaves."""

from dataclasses import dataclass


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
