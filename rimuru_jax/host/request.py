"""One sequence on its way through the scheduler."""

import enum
from dataclasses import dataclass, field


class RequestStatus(enum.Enum):
    """Where a request is. PREEMPTED waits again, with its tokens so far as a longer prompt."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: what the user asked for, and how far it has come. Several samples of one prompt are
    several of these.

    Only the scheduler changes the fields below `arrival`.

    Attributes:
      request_id: the name under which callers know it; unique among unfinished requests.
      prompt_token_ids: the prompt, at least one token.
      max_tokens: tokens to generate, at most.
      priority: lower is more important (as in vLLM); 0 is the default.
      arrival: unique and increasing; also the owner of its pages in the allocator.
      output_token_ids: generated tokens whose values the host knows.
      num_computed_tokens: tokens whose keys, values and states are in the pool or will be after the planned
        steps.
      num_in_flight: sampled tokens whose values the host does not know yet.
      slot: row of the page tables; -1 while it has none.
      finish_reason: "stop", "length", "abort" or "error" once finished.
      num_preemptions: how often its pages were taken away.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    priority: int = 0
    arrival: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    slot: int = -1
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    num_preemptions: int = 0

    @property
    def handle(self) -> int:
        """Owner of the request's pages in the allocator."""
        return self.arrival

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, the output and those in flight."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def length_limit(self, max_model_len: int) -> int:
        """Tokens after which nothing more is sampled: prompt + `max_tokens`, or the model's length."""
        return min(len(self.prompt_token_ids) + self.max_tokens, max_model_len)
