"""Bodies of requests, in OpenAI's and vLLM's words, and what they mean to the engine.

Fields of OpenAI that say nothing to a model server (`user`, `metadata`, `store`, ...) are taken and ignored. What would
change the output and is not supported is refused by name.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rimuru_jax.sampling_params import SamplingParams, StructuredOutputsParams

MAX_TOP_LOGPROBS = 20


class StreamOptions(BaseModel):
    """When to say how many tokens were used."""

    include_usage: bool = False
    """In a last chunk of its own."""
    continuous_usage_stats: bool = False
    """In every chunk."""


class _Sampling(BaseModel):
    """What both kinds of requests share. Defaults of None are the model's recommendation, else OpenAI's default."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Lower is served first, if the server schedules by priority."""
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,200}$")
    """Name of the request, for `/abort_requests`; a random one otherwise."""
    response_format: dict[str, Any] | None = None
    """OpenAI's "text", "json_object" or "json_schema", or vLLM's "structural_tag"."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: fields of `StructuredOutputsParams`."""

    def sampling_params(
        self,
        defaults: dict[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        structure: StructuredOutputsParams | None = None,
    ) -> SamplingParams:
        """Raises ValueError in one sentence for values that are impossible or not supported.

        `structure` is what a choice of tools demands of the output.
        """
        self._refuse_unsupported()
        names = (
            "n", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
            "allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None or name in defaults:
                values[name] = defaults[name] if value is None else value
        if self.logit_bias is not None:
            if wrong := [key for key in self.logit_bias if not (key.isascii() and key.isdigit())]:
                raise ValueError(f"logit_bias has the key {wrong[0]!r}, but its keys are token ids")
            values["logit_bias"] = {int(key): value for key, value in self.logit_bias.items()}
        own = self._structure()
        if own is not None and structure is not None:
            raise ValueError(
                "tool_choice demands a call, so that response_format or structured_outputs cannot hold"
            )
        return SamplingParams(
            **values, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=structure or own
        )

    def _structure(self) -> StructuredOutputsParams | None:
        given = self.structured_outputs
        kind = (self.response_format or {}).get("type", "text")
        if given is not None and kind != "text":
            raise ValueError("response_format and structured_outputs both say how the output looks; give one")
        if given is not None:
            known = StructuredOutputsParams.__dataclass_fields__
            if unknown := sorted(set(given) - set(known)):
                raise ValueError(f"structured_outputs has {unknown[0]!r}; there are {', '.join(known)}")
            return StructuredOutputsParams(**given)
        if kind == "text":
            return None
        if kind == "json_object":
            return StructuredOutputsParams(json_object=True)
        if kind == "structural_tag":
            return StructuredOutputsParams(structural_tag=self.response_format)
        if kind != "json_schema":
            raise ValueError(
                f"response_format.type is {kind!r}, it must be 'text', 'json_object', 'json_schema' or 'structural_tag'"
            )
        schema = (self.response_format or {}).get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        if not isinstance(schema, dict):
            raise ValueError(
                f"response_format.json_schema.schema is {schema!r:.100}, it must be a JSON schema"
            )
        return StructuredOutputsParams(json=schema)

    def _refuse_unsupported(self) -> None:
        extra = self.model_extra or {}
        for name, harmless in (
            ("best_of", (None, 1, self.n)),
            ("suffix", (None, "")),
            ("use_beam_search", (None, False)),
        ):
            if extra.get(name) not in harmless:
                raise ValueError(f"{name} is {extra[name]!r}, but this server does not support it")
        for name in ("bad_words", "continue_final_message", "logits_processors"):
            if extra.get(name):
                raise ValueError(f"{name} is not supported")
        if extra.get("chat_template") is not None:
            raise ValueError(
                "chat_template is not taken from requests: templates are programs; it is the model's own"
            )
        for name in ("json", "regex", "choice", "grammar"):
            if extra.get(f"guided_{name}") is not None:
                raise ValueError(f"guided_{name} is called structured_outputs.{name} now, as in vLLM")


class CompletionRequest(_Sampling):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """One prompt or several, as text or token ids."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    """Report this many of the most probable tokens beside each chosen one."""
    echo: bool = False
    """Put the prompt in front of the output."""

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt) and self.prompt:
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatCompletionRequest(_Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    """Passed on to the model's chat template."""
    tool_choice: str | dict[str, Any] | None = None
    """"auto", "required", the name of a function, or "none", which keeps the tools from the template."""
    parallel_tool_calls: bool | None = None
    """False: at most one call, where calls are required."""
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def num_logprobs(self) -> int | None:
        """Raises ValueError for `top_logprobs` without `logprobs`, or for too many."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, but that wants logprobs to be true")
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {top}, it must be from 0 to {MAX_TOP_LOGPROBS}")
        return top if self.logprobs else None


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: text, or messages as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class AbortRequest(BaseModel):
    """`POST /abort_requests`."""

    request_ids: list[str]
