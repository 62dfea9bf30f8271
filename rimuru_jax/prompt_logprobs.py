"""Log-probabilities of prompts, made of the hidden states that a step leaves behind."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

from rimuru_jax.host.request import Request
from rimuru_jax.host.scheduler import StepPlan
from rimuru_jax.request_state import Completion, RequestState, token_logprobs
from rimuru_jax.sampling import TokenLogprobs
from rimuru_jax.serving_loop import ServingLoop, StepOutputs
from rimuru_jax.tokenizer import Tokenizer


class PromptPart(NamedTuple):
    """Some prompt log-probabilities of one request, still on the device."""

    state: RequestState
    completion: Completion
    position: int
    """Of the first token they are about, in the prompt."""
    rows: int
    width: int
    """Tokens to report beside each."""
    logprobs: TokenLogprobs

    def deliver(self, tokenizer: Tokenizer | None) -> None:
        """Wait for them, and give them to the request."""
        entries, prompt = self.state.prompt_logprobs, self.state.prompt_token_ids
        assert entries is not None
        part = jax.device_get(self.logprobs)
        for row in range(self.rows):
            token = prompt[self.position + row]
            entries[self.position + row] = token_logprobs(
                row, token, part, self.width, tokenizer if self.completion.params.detokenize else None
            )


def prompt_parts(
    loop: ServingLoop,
    plan: StepPlan,
    outputs: StepOutputs,
    completions: Mapping[Request, tuple[RequestState, Completion]],
) -> Iterator[PromptPart]:
    """Start those that a step's hidden states give, of the first completion of each request that asks for them."""
    vocab_size = loop.spec.config.vocab_size
    first = plan.num_decodes  # of these no prompt is left
    for chunk in plan.chunks[plan.num_decodes :]:
        first, here = first + chunk.num_tokens, first
        if chunk.request not in completions:
            continue
        state, completion = completions[chunk.request]
        targets = state.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
        if state.prompt_logprobs is not None and completion.index == 0 and targets:
            width = min(completion.params.prompt_logprobs or 0, vocab_size)
            position = chunk.start + 1
            for count, part in loop.prompt_logprobs(outputs.hidden, here, targets, width):
                yield PromptPart(state, completion, position, count, width, part)
                position += count
