"""Texts and conversations as token ids, and back, without holding up the event loop."""

import asyncio
from collections.abc import Callable, Sequence

from rimuru_jax.server.protocol import ChatCompletionRequest, TokenizeRequest
from rimuru_jax.server.refusals import RefusedError
from rimuru_jax.tokenizer import Tokenizer


class ServedText:
    """The tokenizer of the served model. Raises RefusedError for texts it cannot take, and when there is none."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    async def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            return prompt
        return await self.run(lambda tokenizer: tokenizer.encode(prompt))

    async def render(self, body: ChatCompletionRequest | TokenizeRequest) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        messages, kwargs = body.messages or [], body.chat_template_kwargs or {}
        # A template of the client's own would be a program of the client's own.
        if taken := sorted(
            {"chat_template", "messages", "tools", "tokenize", "add_generation_prompt"} & set(kwargs)
        ):
            raise RefusedError(
                400,
                f"chat_template_kwargs has {taken[0]!r}, which is no variable of templates",
                param="chat_template_kwargs",
            )
        tools = body.tools
        if isinstance(body, ChatCompletionRequest) and body.tool_choice == "none":
            tools = None
        return await self.run(
            lambda tokenizer: tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=body.add_generation_prompt, **kwargs
            )
        )

    async def run[T](self, function: Callable[[Tokenizer], T]) -> T:
        """`function` of the tokenizer, in another thread: long texts take long."""
        if self.tokenizer is None:
            raise RefusedError(
                400, "the model has no tokenizer: send prompts as token ids to /v1/completions"
            )
        try:
            return await asyncio.to_thread(function, self.tokenizer)
        except (ValueError, TypeError) as error:
            raise RefusedError(400, str(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids)) if self.tokenizer else ""
