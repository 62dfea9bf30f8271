"""What the engine keeps of a request beside its scheduling: text, log-probabilities, times, and when to stop."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rimuru_jax.host.request import Request
from rimuru_jax.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from rimuru_jax.sampling import SamplingRow, TokenLogprobs
from rimuru_jax.sampling_params import SamplingParams
from rimuru_jax.structured_output import Grammar
from rimuru_jax.tokenizer import IncrementalDetokenizer, Tokenizer

type Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt_token_ids": ids} or {"prompt": text}."""


def token_logprobs(
    row: int, token_id: int, logprobs: TokenLogprobs, num_logprobs: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """The chosen token and the `num_logprobs` most probable ones of one row, most probable first after the chosen."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        text = tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None
        return Logprob(float(logprob), int(rank), text)

    result = {token_id: entry(token_id, logprobs.logprob[row], logprobs.rank[row])}  # type: ignore[arg-type]
    for i in range(num_logprobs):
        top = int(logprobs.top_ids[row, i])
        result.setdefault(top, entry(top, logprobs.top_logprobs[row, i], i + 1))  # type: ignore[arg-type]
    return result


@dataclass(eq=False)
class Completion:
    """One of the n samples of a request: a sequence of the scheduler and what came out of it."""

    index: int
    request: Request
    seed: int
    params: SamplingParams
    stop_token_ids: Collection[int]
    """End-of-sequence ids (unless ignored) and the user's stop ids."""
    detokenizer: IncrementalDetokenizer | None
    prompt_array: np.ndarray
    most_tokens: int
    """Output tokens with which it ends at the latest."""
    grammar: Grammar | None = None
    """What the output must follow. Its next mask wants all tokens before it."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    stop_reason: int | str | None = None
    _num_detokenized: int = 0
    """Output tokens whose text is known. Nobody may ask for it before the end, and all at once take a fraction of the time."""
    _silent_end: bool = False
    """The last token has no place in the text: it ends the output, and the user has not named it."""

    def sampling_row(self) -> SamplingRow:
        stops, mask = self.stop_token_ids, None
        if self.grammar is not None:
            # A grammar that leaves nothing but a stop token is right, and `min_tokens` is not.
            early = len(self.request.output_token_ids) < self.params.min_tokens
            mask = self.grammar.mask(stops if early else ())
            stops = ()
        return SamplingRow(
            params=self.params,
            seed=self.seed,
            prompt_token_ids=self.prompt_array,
            output_token_ids=self.request.output_token_ids,
            num_output_tokens=len(self.request.output_token_ids),
            stop_token_ids=stops,
            token_mask=mask,
        )

    def accept(self, token_id: int) -> FinishReason | None:
        """Take in the newest output token; return why the completion ends with it, if it does."""
        request, params = self.request, self.params
        full = len(request.output_token_ids) >= self.most_tokens
        ends = token_id in self.stop_token_ids
        # In nearly every step of nearly every request there is nothing else to look at.
        if not (ends or full or self.grammar is not None or params.stop):
            return None
        if self.grammar is not None:
            self.grammar.accept(token_id)
            if self.grammar.error is not None:
                self._silent_end = True
                self.stop_reason = f"structured_outputs: {self.grammar.error}"
                return "error"
        named = ends and token_id in (params.stop_token_ids or ())
        self._silent_end = ends and not named
        if params.stop and self.detokenizer is not None:
            self._detokenize()
            if self.detokenizer.stop_reason is not None:
                self.stop_reason = self.detokenizer.stop_reason
                return "stop"
        if ends:
            self.stop_reason = token_id if named else None
            return "stop"
        if self.grammar is not None and self.grammar.done:
            return "stop"
        return "length" if full else None

    def close(self) -> None:
        """Release text that was held back; call it once, when the completion has ended."""
        if self.detokenizer is not None:
            self._detokenize()
            self.detokenizer.finish()

    def _detokenize(self) -> str:
        """The text of all tokens so far, but what is held back."""
        if self.detokenizer is None:
            return ""
        known, ids = self._num_detokenized, self.request.output_token_ids
        self._num_detokenized = len(ids) - self._silent_end
        if self._num_detokenized > known:
            self.detokenizer.extend(ids[known : self._num_detokenized])
        return self.detokenizer.text

    def output(self) -> CompletionOutput:
        with_logprobs = self.params.logprobs is not None
        ids = self.request.output_token_ids
        return CompletionOutput(
            index=self.index,
            text=self._detokenize(),
            token_ids=list(ids),
            cumulative_logprob=(
                sum(entry[token].logprob for entry, token in zip(self.logprobs, ids, strict=True))
                if with_logprobs
                else None
            ),
            logprobs=list(self.logprobs) if with_logprobs else None,
            finish_reason=self.request.finish_reason,  # type: ignore[arg-type]
            stop_reason=self.stop_reason,
        )


@dataclass(eq=False)
class RequestState:
    """A request as the user sees it: n completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.monotonic()))

    @property
    def finished(self) -> bool:
        for completion in self.completions:  # noqa: SIM110 - asked for all requests in all steps; a generator takes twice as long
            if not completion.request.finished:
                return False
        return True

    def scheduled(self) -> None:
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = time.monotonic()

    def progressed(self, now: float) -> None:
        """A token came at `now`, in seconds of the monotonic clock."""
        metrics = self.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now

    def output(self) -> RequestOutput:
        finished, metrics = self.finished, self.metrics
        if finished and metrics.finished_time is None:
            metrics.finished_time = time.monotonic()
        metrics.num_preemptions = sum([completion.request.num_preemptions for completion in self.completions])
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[completion.output() for completion in self.completions],
            finished=finished,
            metrics=metrics,
        )
