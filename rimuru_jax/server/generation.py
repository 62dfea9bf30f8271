"""The routes that generate: OpenAI's completions and chats."""

import uuid
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from rimuru_jax.outputs import CompletionOutput
from rimuru_jax.sampling_params import SamplingParams
from rimuru_jax.server import responses
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.delivery import Delivery, Job
from rimuru_jax.server.grammar_check import GrammarCheck
from rimuru_jax.server.protocol import ChatCompletionRequest, CompletionRequest
from rimuru_jax.server.refusals import RefusedError, check_model
from rimuru_jax.server.text import ServedText
from rimuru_jax.server.tools import ToolDeltas, ToolUse


class Generation:
    """Completions and chats of the one model that is served.

    Args:
        defaults: sampling parameters that the model recommends, for requests that bring none.
    """

    def __init__(
        self,
        delivery: Delivery,
        text: ServedText,
        check_grammar: GrammarCheck,
        config: ServerConfig,
        defaults: dict[str, Any],
    ) -> None:
        self._delivery = delivery
        self._text = text
        self._check_grammar = check_grammar
        self._config = config
        self._defaults = defaults

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Complete one or several prompts."""
        check_model(body.model, self._config.served_model_name)
        prompts = body.prompts()
        if not prompts:
            raise RefusedError(
                400, "prompt is empty, it must be a text, token ids, or a list of those", param="prompt"
            )
        self._check_count(len(prompts) * max(1, body.n))
        if body.logprobs is not None and not 0 <= body.logprobs <= 20:
            raise RefusedError(400, f"logprobs is {body.logprobs}, it must be from 0 to 20", param="logprobs")
        params = self._params(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
        if body.echo and (body.stream or body.logprobs is not None):
            other = "stream" if body.stream else "logprobs"
            raise RefusedError(400, f"echo is not supported together with {other}", param="echo")
        await self._check_grammar(params.structured_outputs)
        ids = [await self._text.encode(prompt) for prompt in prompts]
        name = _name(body.request_id, "cmpl")
        job = Job(name=name, prompts=ids, params=params, priority=body.priority)
        if body.stream:

            def chunk(index: int, part: CompletionOutput, before: CompletionOutput | None) -> dict[str, Any]:
                seen, tokens = (len(before.text), len(before.token_ids)) if before else (0, 0)
                logprobs = None
                if part.logprobs is not None:
                    logprobs = responses.completion_logprobs(
                        part.token_ids[tokens:], part.logprobs[tokens:], body.logprobs or 0, seen
                    )
                return {
                    "index": index,
                    "text": part.text[seen:],
                    "logprobs": logprobs,
                    "finish_reason": part.finish_reason,
                    "stop_reason": part.stop_reason,
                }

            head = responses.header(name, "text_completion", self._config.served_model_name)
            return await self._delivery.stream(http, job, head, chunk, body.stream_options)
        outputs = await self._delivery.whole(http, job)
        choices = []
        for prompt, output in zip(prompts, outputs, strict=True):
            shown = ""
            if body.echo:
                shown = prompt if isinstance(prompt, str) else self._text.decode(prompt)
            for part in output.outputs:
                logprobs = None
                if part.logprobs is not None:
                    logprobs = responses.completion_logprobs(
                        part.token_ids, part.logprobs, body.logprobs or 0, len(shown)
                    )
                choices.append({
                    "index": len(choices),
                    "text": shown + part.text,
                    "logprobs": logprobs,
                    "finish_reason": part.finish_reason,
                    "stop_reason": part.stop_reason,
                })  # fmt: skip
        head = responses.header(name, "text_completion", self._config.served_model_name)
        return JSONResponse({**head, "choices": choices, "usage": responses.usage(outputs)})

    async def chat(self, body: ChatCompletionRequest, http: Request) -> Response:
        """Answer a conversation."""
        check_model(body.model, self._config.served_model_name)
        self._check_count(max(1, body.n))
        try:
            top = body.num_logprobs()
        except ValueError as error:
            raise RefusedError(400, str(error), param="top_logprobs") from error
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        try:
            use = ToolUse(body, self._config.tool_parser())
        except ValueError as error:
            raise RefusedError(400, str(error), param="tools") from error
        params = self._params(body, max_tokens=limit, logprobs=top, structure=use.structure)
        await self._check_grammar(params.structured_outputs)
        ids = [await self._text.render(body)]
        name = _name(body.request_id, "chatcmpl")
        job = Job(name=name, prompts=ids, params=params, priority=body.priority)
        if body.stream:
            streams = [ToolDeltas(use) for _ in range(params.n)]

            def chunk(
                index: int, part: CompletionOutput, before: CompletionOutput | None
            ) -> dict[str, Any] | None:
                delta, parsed = streams[index].next(part.text, part.finished())
                if before is None:
                    delta = {"role": "assistant", "content": "", **delta}
                elif not delta and not part.finished() and top is None:
                    return None
                return {
                    "index": index,
                    "delta": delta,
                    "logprobs": responses.chat_logprobs(
                        part, len(before.token_ids) if before else 0, top or 0
                    ),
                    "finish_reason": use.finish_reason(parsed, part.finish_reason),
                }

            head = responses.header(name, "chat.completion.chunk", self._config.served_model_name)
            return await self._delivery.stream(http, job, head, chunk, body.stream_options)
        (output,) = await self._delivery.whole(http, job)
        choices = []
        for part in output.outputs:
            message, parsed = use.message(part.text)
            choices.append({
                "index": part.index,
                "message": message,
                "logprobs": responses.chat_logprobs(part, 0, top or 0),
                "finish_reason": use.finish_reason(parsed, part.finish_reason),
                "stop_reason": part.stop_reason,
            })  # fmt: skip
        head = responses.header(name, "chat.completion", self._config.served_model_name)
        return JSONResponse({**head, "choices": choices, "usage": responses.usage([output])})

    def _check_count(self, count: int) -> None:
        if count > self._config.max_completions:
            raise RefusedError(
                400,
                f"{count} completions were asked for in one request, it may have at most {self._config.max_completions}",
            )

    def _params(self, body: CompletionRequest | ChatCompletionRequest, **others: Any) -> SamplingParams:
        try:
            return body.sampling_params(self._defaults, **others)
        except ValueError as error:
            raise RefusedError(400, str(error)) from error


def _name(given: str | None, prefix: str) -> str:
    return given if given else f"{prefix}-{uuid.uuid4().hex}"
