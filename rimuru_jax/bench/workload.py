"""What a benchmark asks of a server, and when: made up, from conversations, prompts, or traces of real services."""

import csv
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rimuru_jax.tokenizer import Tokenizer

PREFIX_BLOCK_TOKENS = 512
"""Tokens of one of the prefix blocks that Mooncake's traces name."""

# Short, common and different: about one token each for most tokenizers.
_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "body",
    "back",
    "parent",
    "face",
    "level",
    "office",
]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: str | list[int]
    """Text, or token ids."""
    prompt_tokens: int
    """As far as is known here; the server's own count is what is reported."""
    output_tokens: int
    """To generate, at most."""
    arrival: float | None = None
    """Seconds after the start, where the data set says so."""


class PromptMaker:
    """Prompts of given lengths: random token ids if there is a tokenizer, whose vocabulary they need, else words."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_text: bool, seed: int) -> None:
        self._tokenizer = tokenizer
        self._as_text = as_text
        self._seed = seed
        special = tokenizer.special_token_ids if tokenizer else frozenset()
        size = tokenizer.vocab_size if tokenizer else 0
        self._ids = np.array([token for token in range(size) if token not in special], np.int64)

    def make(self, parts: Sequence[tuple[int, int]]) -> str | list[int]:
        """A prompt of several parts (key, tokens): the same key always gives the same tokens."""
        if self._tokenizer is None:
            return " ".join(
                word for key, count in parts for word in self._choose(key, count, np.array(_WORDS))
            )
        ids = [int(token) for key, count in parts for token in self._choose(key, count, self._ids)]
        return self._tokenizer.decode(ids) if self._as_text else ids

    def _choose(self, key: int, count: int, values: np.ndarray) -> np.ndarray:
        return values[np.random.default_rng([self._seed, key]).integers(0, len(values), count)]


def random_requests(
    maker: PromptMaker,
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    seed: int,
) -> list[BenchRequest]:
    """Lengths even within `range_ratio` of the given ones; `prefix_len` more tokens are the same in all prompts."""
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio is {range_ratio:g}, it must be at least 0 and below 1")
    if input_len < 1 or output_len < 1 or prefix_len < 0:
        raise ValueError("--random-input-len and --random-output-len must be positive")
    rng = np.random.default_rng(seed)

    def lengths(middle: int) -> np.ndarray:
        low, high = max(1, int(middle * (1 - range_ratio))), max(1, int(np.ceil(middle * (1 + range_ratio))))
        return rng.integers(low, high + 1, count)

    requests = []
    for number, (inputs, outputs) in enumerate(zip(lengths(input_len), lengths(output_len), strict=True)):
        prompt = maker.make([(0, prefix_len), (number + 1, int(inputs))])
        requests.append(BenchRequest(prompt, prefix_len + int(inputs), int(outputs)))
    return requests


def trace_requests(maker: PromptMaker, path: Path, count: int) -> list[BenchRequest]:
    """The first `count` requests of a trace, with random prompts of its lengths; equal prefix blocks are equal tokens.

    Traces are CSV (`input_tokens`, `output_tokens`, optionally `arrival_s` and `prefix_block_ids`) or Mooncake's JSON
    lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`), plain or gzipped.
    """
    requests: list[BenchRequest] = []
    for number, (arrival, inputs, outputs, blocks) in enumerate(_trace_rows(path, count)):
        left, parts = max(1, inputs), []
        for block in blocks:
            parts.append((block + 1, min(PREFIX_BLOCK_TOKENS, left)))
            left -= parts[-1][1]
        parts.append((-number % 2**32, left))  # what no other request has
        requests.append(BenchRequest(maker.make(parts), max(1, inputs), max(1, outputs), arrival))
    return requests


def trace_lengths(path: Path, count: int) -> list[BenchRequest]:
    """The same without prompts."""
    return [
        BenchRequest([], max(1, inputs), max(1, outputs), arrival)
        for arrival, inputs, outputs, _ in _trace_rows(path, count)
    ]


def _trace_rows(path: Path, count: int) -> list[tuple[float | None, int, int, list[int]]]:
    """Seconds after the first request if the trace says when they came, input and output tokens, prefix blocks."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    opened: Any = gzip.open if path.suffix == ".gz" else open
    names = [suffix for suffix in path.suffixes if suffix != ".gz"]
    parse = _csv_rows if names[-1:] == [".csv"] else _json_rows
    with opened(path, "rt") as text:
        try:
            rows = list(itertools.islice(parse(text), count))
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is no trace: wanted CSV with input_tokens, output_tokens and perhaps arrival_s, or JSON lines "
                f"with timestamp, input_length and output_length ({error!r:.100})"
            ) from error
    if not rows:
        raise ValueError(f"{path} holds no requests")
    first = rows[0][0]
    return [
        (None if time is None else time - (first or 0.0), inputs, outputs, blocks)
        for time, inputs, outputs, blocks in rows
    ]


def _csv_rows(text: Iterable[str]) -> Iterator[tuple[float | None, int, int, list[int]]]:
    for row in csv.DictReader(text):
        blocks = [int(block) for block in (row.get("prefix_block_ids") or "").split()]
        time = float(row["arrival_s"]) if "arrival_s" in row else None
        yield time, int(row["input_tokens"]), int(row["output_tokens"]), blocks


def _json_rows(text: Iterable[str]) -> Iterator[tuple[float | None, int, int, list[int]]]:
    for line in text:
        row = json.loads(line)
        yield row["timestamp"] / 1000, row["input_length"], row["output_length"], row.get("hash_ids", [])


def custom_requests(
    path: Path, count: int, *, output_len: int, tokenizer: Tokenizer | None, seed: int
) -> list[BenchRequest]:
    """Prompts of JSON lines with "prompt", or "turns" of which the first is taken; repeated until there are enough."""
    prompts = []
    for number, line in enumerate(_lines(path), 1):
        entry = _json(path, number, line)
        turns = entry.get("turns") or [None]
        prompt = entry.get("prompt", turns[0])
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"line {number} of {path} has no text as 'prompt' and no 'turns'")
        prompts.append(
            BenchRequest(prompt, _count(prompt, tokenizer), entry.get("output_tokens", output_len))
        )
    return _repeated(prompts, count, path, seed)


def sharegpt_requests(
    path: Path, count: int, *, output_len: int | None, tokenizer: Tokenizer | None, seed: int
) -> list[BenchRequest]:
    """First questions of conversations, with answers as long as they were, within vLLM's limits of length."""
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not ShareGPT's JSON: {error}") from error
    requests = []
    for entry in conversations if isinstance(conversations, list) else []:
        turns = (
            (entry.get("conversations") or entry.get("conversation") or []) if isinstance(entry, dict) else []
        )
        if len(turns) < 2:
            continue
        prompt, answer = str(turns[0].get("value", "")), str(turns[1].get("value", ""))
        inputs, outputs = _count(prompt, tokenizer), output_len or _count(answer, tokenizer)
        if 4 <= inputs <= 1024 and outputs >= 4 and inputs + outputs <= 2048:
            requests.append(BenchRequest(prompt, inputs, outputs))
    return _repeated(requests, count, path, seed)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _json(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of {path} is no JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"line {number} of {path} is no JSON object")
    return entry


def _count(text: str, tokenizer: Tokenizer | None) -> int:
    # Without a tokenizer by the rule of thumb of four characters to a token.
    return max(1, len(text) // 4) if tokenizer is None else len(tokenizer.encode(text))


def _repeated(requests: list[BenchRequest], count: int, path: Path, seed: int) -> list[BenchRequest]:
    if not requests:
        raise ValueError(f"{path} holds no requests of a usable length")
    order = np.random.default_rng(seed).permutation(len(requests))
    return [requests[order[number % len(order)]] for number in range(count)]


def arrivals(requests: Sequence[BenchRequest], rate: float, burstiness: float, seed: int) -> list[float]:
    """When each request is sent, in seconds after the start.

    The data set's own times if it has them; else intervals of a gamma distribution of mean 1 / `rate`, whose shape is
    `burstiness` (1: a Poisson process; less: bursts; more: evenly), scaled to last as long as the rate says.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError("--request-rate and --burstiness must be positive")
    if requests and requests[0].arrival is not None:
        return [request.arrival or 0.0 for request in requests]
    if rate == float("inf"):
        return [0.0] * len(requests)
    intervals = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), len(requests))
    times = np.cumsum(intervals)
    return (times * (len(requests) / rate / times[-1])).tolist() if len(times) else []
