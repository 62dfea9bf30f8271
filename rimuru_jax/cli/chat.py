"""`rimuru chat`: a conversation."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rimuru_jax.cli.console import interruptible, note, waiting
from rimuru_jax.cli.generate import print_stream, summary
from rimuru_jax.cli.options import Model, Sampling, engine_options, sampling_options, with_options
from rimuru_jax.cli.prompts import load_engine
from rimuru_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rimuru_jax.engine import Engine

HELP = "/reset starts over, /exit or Ctrl-D leaves; Ctrl-C ends an answer"


@with_options(sampling=sampling_options, engine=engine_options)
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    *,
    sampling: Sampling,
    engine: Mapping[str, Any],
) -> None:
    """Talk with a model. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C ends an answer.

    Lines that are piped in are turns of one conversation.
    """
    loaded, folder = load_engine(model, engine)
    params = sampling(folder)
    if not loaded.get_tokenizer().chat_templates:
        raise ValueError(f"{folder} has no chat template, so it cannot chat; use `rimuru generate`")
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - line editing for input()

        note(HELP)
    while (line := _read(interactive)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                messages = list(start)
                note("starting over")
                continue
            case command if command.startswith("/") and " " not in command:
                note(f"there is no {command}; {HELP}")
                continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer(loaded, messages, params)})
        except ValueError as error:
            # The turn does not count, and the conversation can go on.
            messages.pop()
            note(f"error: {error}")


def _read(interactive: bool) -> str | None:
    """The user's next line; None at the end of the input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
            note(HELP)
        except EOFError:
            print()
            return None


def _answer(engine: "Engine", messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer as it comes and return it; what there is of it after Ctrl-C."""
    prompt = {"prompt_token_ids": engine.get_tokenizer().apply_chat_template(messages)}
    with interruptible() as interrupted, waiting("thinking") as arrived:
        output = print_stream(engine, prompt, params, arrived=arrived, stop=interrupted)
    if sys.stdin.isatty():
        note(summary([output], engine))
    return output.outputs[0].text
