"""What a request gives back: the names and meanings of vLLM's `RequestOutput` and its parts.

Outputs are made for hundreds of requests in a step, and frozen dataclasses take three times as long to make: these are
not, yet nobody but the engine should write to them.
"""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model itself, before penalties, temperature and filters."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int | None = None
    """1 for the most probable token: one more than the number of tokens with a larger logit."""
    decoded_token: str | None = None
    """The token's text; None when not detokenized."""


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Moments in the life of a request, in seconds of one monotonic clock; None until they have come.

    All outputs of a request have the same one, which goes on until the request has finished.
    """

    arrival_time: float
    """The engine took the request in."""
    first_scheduled_time: float | None = None
    """The first step that computes a token of it was planned."""
    first_token_time: float | None = None
    """The first output token reached the host."""
    last_token_time: float | None = None
    """The newest output token reached the host."""
    finished_time: float | None = None
    """The request finished, for whatever reason."""
    num_preemptions: int = 0
    """Times it lost its pages and was put back into the queue."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first planned step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` completions of a request, up to now."""

    index: int
    """Which of the n it is, from 0."""
    text: str
    """Text so far; empty with `detokenize=False`."""
    token_ids: list[int]
    """Output token ids so far."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of `token_ids`; None unless `logprobs` was asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each output token: the chosen token and the `logprobs` most probable ones, by id."""
    finish_reason: FinishReason | None = None
    """Why it ended: an end-of-sequence token or a stop ("stop"), `max_tokens` or `max_model_len` ("length"),
    the user ("abort"), a failure of this request alone ("error"); None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string, or the id from `stop_token_ids`, that ended it; None for an end-of-sequence token."""

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request and its completions, up to now."""

    request_id: str
    prompt: str | None
    """Prompt text; None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, as `CompletionOutput.logprobs`; the first token has None."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    """The n completions, by index."""
    finished: bool = False
    """Whether all completions have ended."""
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens whose cached pages were reused; None without a prefix cache."""
