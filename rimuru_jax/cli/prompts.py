"""Prompts from the command line and from files, and the engine that answers them."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rimuru_jax.cli.console import progress
from rimuru_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rimuru_jax.engine import Engine
    from rimuru_jax.outputs import RequestOutput

type Prompt = dict[str, Any]
"""{"prompt": text}, {"prompt_token_ids": ids} or {"messages": chat}."""

_KEYS = ("prompt", "prompt_token_ids", "messages")


def load_engine(model: Path | None, options: Mapping[str, Any]) -> tuple["Engine", Path]:
    """The engine of a model folder, or of the embedded model, and the folder."""
    with progress(f"loading {model or 'the embedded model'}") as report:
        from rimuru_jax.engine import Engine  # here and not above: it brings JAX
        from rimuru_jax.models.default_model import default_model_path

        engine = Engine(model, progress=report, **options)
    return engine, model or default_model_path()


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file, one a line; of a .jsonl file strings or objects with one of `_KEYS`. "-" is stdin.

    Raises ValueError when there is none, or a line is none.
    """
    if str(path) == "-":
        lines = sys.stdin.read().splitlines()
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text ({error}); prompts are read from text files"
            ) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{'stdin' if str(path) == '-' else path} holds no prompt, but one a line is wanted")
    if path.suffix != ".jsonl":
        return [{"prompt": line} for _, line in numbered]
    return [_parse_line(line, f"{path}, line {number}") for number, line in numbered]


def _parse_line(line: str, where: str) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if isinstance(content, str):
        content = {"prompt": content}
    found = [key for key in _KEYS if isinstance(content, dict) and key in content]
    if len(found) != 1:
        raise ValueError(f"{where} must be a string or an object with one of {', '.join(_KEYS)}")
    if not isinstance(content[found[0]], str if found[0] == "prompt" else list):
        raise ValueError(f"{where}: {found[0]} must be a {'string' if found[0] == 'prompt' else 'list'}")
    return {found[0]: content[found[0]]}


def parse_token_ids(text: str) -> list[int]:
    """Token ids of "1,2,3"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"prompt-token-ids is {text!r}, but numbers with commas between them are wanted"
        ) from None


def prepare(engine: "Engine", prompts: Iterable[Prompt], chat_template: bool | None) -> list[Prompt]:
    """Put texts into the model's chat template: if told so, or (None) if it has one."""
    tokenizer = engine.tokenizer
    if chat_template is None:
        chat_template = tokenizer is not None and bool(tokenizer.chat_templates)
    prepared = []
    for prompt in prompts:
        messages = prompt.get("messages")
        if messages is None and chat_template and "prompt" in prompt:
            messages = [{"role": "user", "content": prompt["prompt"]}]
        if messages is not None:
            prompt = {"prompt_token_ids": engine.get_tokenizer().apply_chat_template(messages)}
        prepared.append(prompt)
    return prepared


def complete(
    engine: "Engine", prompts: list[Prompt], params: SamplingParams, text: str
) -> list["RequestOutput"]:
    """Complete prompts together under a progress bar; outputs in the order of the prompts."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    done: dict[str, RequestOutput] = {}
    with progress(text) as report:
        while len(done) < len(prompts):
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
                    report(len(done) / len(prompts), f"{len(done)} of {len(prompts)} prompts")
    return [done[str(number)] for number in range(len(prompts))]
