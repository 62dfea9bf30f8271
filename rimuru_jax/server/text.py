"""Texts and conversations as token ids, and back, without holding up the event loop."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

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
        kwargs = body.chat_template_kwargs or {}
        messages = [_with_parsed_arguments(message) for message in body.messages or []]
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


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Clients send the arguments of earlier calls as JSON text; templates expect objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RefusedError(
                400, f"tool_calls has {call!r:.100}, it must have a 'function'", param="messages"
            )
        if isinstance(arguments := function.get("arguments"), str):
            try:
                function = function | {"arguments": json.loads(arguments or "{}")}
            except (ValueError, RecursionError) as error:
                raise RefusedError(
                    400, f"arguments of a tool call are no JSON: {arguments!r:.100}", param="messages"
                ) from error
        parsed.append(call | {"function": function})
    return message | {"tool_calls": parsed}
