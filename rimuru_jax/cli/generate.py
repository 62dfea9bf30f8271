"""`rimuru generate`: completes prompts."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rimuru_jax.cli.console import note, waiting
from rimuru_jax.cli.options import Model, Sampling, engine_options, sampling_options, with_options
from rimuru_jax.cli.prompts import Prompt, complete, load_engine, parse_token_ids, prepare, read_prompts
from rimuru_jax.outputs import CompletionOutput, RequestOutput
from rimuru_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rimuru_jax.engine import Engine


@with_options(sampling=sampling_options, engine=engine_options)
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Texts to complete; - reads them from stdin."),
    ] = None,
    model: Model = None,
    file: Annotated[
        Path | None,
        typer.Option(help="File of prompts, one a line (.jsonl: strings or objects); - is stdin."),
    ] = None,
    prompt_token_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,3", help="A prompt as token ids; repeatable. Needs no tokenizer."),
    ] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Ask as in a chat, or complete the bare text. Default: a chat if the model has a template.",
            show_default=False,
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Completions per prompt.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt and nothing else.")
    ] = False,
    *,
    sampling: Sampling,
    engine: Mapping[str, Any],
) -> None:
    """Complete one prompt, streamed, or several together."""
    if n < 1:
        raise ValueError(f"n is {n}, but at least 1 completion per prompt is wanted")
    asked = _gather(prompts or [], file, prompt_token_ids or [])
    loaded, folder = load_engine(model, engine)
    params = sampling(folder, n=n)
    prepared = prepare(loaded, asked, chat_template)
    if len(asked) == 1 and n == 1 and not as_json:
        with waiting("computing the first token") as arrived:
            outputs = [print_stream(loaded, prepared[0], params, arrived=arrived)]
    else:
        outputs = complete(loaded, prepared, params, f"completing {len(asked)} prompts")
        for prompt, output in zip(asked, outputs, strict=True):
            if as_json:
                print(json.dumps(_json(prompt, output, loaded), ensure_ascii=False), flush=True)
            else:
                _print(prompt, output, loaded, headed=len(asked) > 1)
    if not as_json:
        note(summary(outputs, loaded))


def _gather(texts: list[str], file: Path | None, token_ids: list[str]) -> list[Prompt]:
    prompts: list[Prompt] = []
    for text in texts:
        prompts += read_prompts(Path("-")) if text == "-" else [{"prompt": text}]
    prompts += [{"prompt_token_ids": parse_token_ids(text)} for text in token_ids]
    if file is not None:
        prompts += read_prompts(file)
    if not prompts:
        raise ValueError("there is no prompt: give one as an argument, a --file of them, or - to read stdin")
    return prompts


def print_stream(
    engine: "Engine",
    prompt: Prompt,
    params: SamplingParams,
    *,
    arrived: Callable[[], None],
    stop: Callable[[], bool] = lambda: False,
) -> RequestOutput:
    """Print one completion as it comes, until `stop` says so; `arrived` is called before the first print."""
    printed, output = 0, None
    with contextlib.closing(engine.stream(prompt, params)) as stream:
        for output in stream:
            arrived()
            text = _text(output.outputs[0], engine)
            print(text[printed:], end="", flush=True)
            printed = len(text)
            if stop():
                break
    print(flush=True)
    assert output is not None
    return output


def _text(completion: CompletionOutput, engine: "Engine") -> str:
    """The completion for people: token ids of models without a tokenizer."""
    return completion.text if engine.tokenizer else ",".join(map(str, completion.token_ids))


def _print(prompt: Prompt, output: RequestOutput, engine: "Engine", *, headed: bool) -> None:
    if headed:
        print(f"> {next(iter(prompt.values()))}")
    for completion in output.outputs:
        if len(output.outputs) > 1:
            print(f"[{completion.index + 1}]", end=" ")
        print(_text(completion, engine))
    if headed:
        print()


def _json(prompt: Prompt, output: RequestOutput, engine: "Engine") -> dict[str, Any]:
    metrics = output.metrics
    assert metrics is not None
    return {
        **prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
        "metrics": {
            "time_in_queue": metrics.time_in_queue,
            "time_to_first_token": metrics.time_to_first_token,
            "tokens_per_second": _rate([output]),
            "num_preemptions": metrics.num_preemptions,
            **_residency(engine),
        },
    }


def _residency(engine: "Engine") -> dict[str, int]:
    """Of the whole engine since its start."""
    counters = engine.get_metrics()
    return {
        "resident_experts": int(engine.experts.resident.sum()),
        "experts": engine.experts.resident.size,
        "expert_shrinks": int(counters["expert_shrinks"]),
        "expert_expansions": int(counters["expert_expansions"]),
    }


def _rate(outputs: list[RequestOutput]) -> float | None:
    """Tokens per second after the first token of all; None when no later one came."""
    times = [
        (output.metrics.first_token_time, output.metrics.last_token_time)
        for output in outputs
        if output.metrics and output.metrics.first_token_time is not None
    ]
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    if not times:
        return None
    seconds = max(last for _, last in times if last is not None) - min(
        first for first, _ in times if first is not None
    )
    return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None


def summary(outputs: list[RequestOutput], engine: "Engine") -> str:
    """One line: tokens, speed, and where the experts are."""
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    parts = [f"{tokens} tokens"]
    metrics = outputs[0].metrics
    if len(outputs) == 1 and metrics and metrics.time_to_first_token is not None:
        parts.append(f"the first after {metrics.time_to_first_token:.2f} s")
    if (rate := _rate(outputs)) is not None:
        parts.append(f"{rate:.1f} tokens/s after the first")
    now = _residency(engine)
    return (
        f"{', '.join(parts)}; {now['resident_experts']} of {now['experts']} experts resident, "
        f"{now['expert_shrinks']} shrunk, {now['expert_expansions']} expanded"
    )
