"""Answers in OpenAI's format, from the engine's outputs."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rimuru_jax.outputs import CompletionOutput, Logprob, RequestOutput


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {_encode(body)}\n\n".encode()


class ChunkFormat:
    """Events with one choice each, whose other fields, `head`, are written once for a whole stream."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._begin = f"data: {_encode({**head, 'choices': []})[:-2]}"

    def __call__(self, choice: Mapping[str, Any], **others: Any) -> bytes:
        end = _encode(others)[1:] if others else "}"
        return f"{self._begin}{_encode(choice)}]{',' if others else ''}{end}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def header(request_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def chat_logprobs(part: CompletionOutput, first: int, top: int) -> dict[str, Any] | None:
    """Log-probabilities of the output tokens from `first` on, as chats give them."""
    if part.logprobs is None:
        return None

    def entry(logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {
            "token": text,
            "logprob": _finite(logprob.logprob),
            "bytes": list(text.encode("utf-8", "replace")),
        }

    content = []
    for token, entries in zip(part.token_ids[first:], part.logprobs[first:], strict=True):
        best = sorted(entries.values(), key=lambda entry: -entry.logprob)[:top]
        content.append({**entry(entries[token]), "top_logprobs": [entry(other) for other in best]})
    return {"content": content}


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]],
    top: int,
    offset: int,
) -> dict[str, Any]:
    """Log-probabilities as completions give them; `offset` is where the text of the first token begins."""
    tokens, logprobs, tops, offsets = [], [], [], []
    for token, candidates in zip(token_ids, entries, strict=True):
        offsets.append(offset)
        chosen = candidates[token]
        text = chosen.decoded_token or ""
        offset += len(text)
        best = sorted(candidates.values(), key=lambda entry: -entry.logprob)[:top]
        tokens.append(text)
        logprobs.append(_finite(chosen.logprob))
        tops.append({entry.decoded_token or "": _finite(entry.logprob) for entry in best})
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _finite(logprob: float) -> float:
    """JSON knows no infinity: tokens that cannot be get a very small probability."""
    return max(logprob, -9999.0)
