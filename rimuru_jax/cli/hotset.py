"""`rimuru hotset`: profiles of which experts a model uses."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rimuru_jax.cli.console import note
from rimuru_jax.cli.options import Model, Sampling, engine_options, sampling_options, with_options
from rimuru_jax.cli.prompts import Prompt, complete, load_engine, prepare, read_prompts
from rimuru_jax.host.hotset import HotsetProfile

hotset = typer.Typer(help="Profiles of which experts a model uses.", rich_markup_mode=None)

NEUTRAL_PROMPTS = (
    "Describe how a bicycle stays upright.",
    "Write a short letter to a landlord about a broken heater.",
    "Explain the difference between weather and climate.",
    "Give a recipe for vegetable soup.",
    "Write a Python function that returns the median of a list.",
    "Summarise the causes of the First World War.",
    "What is the derivative of x squared times the sine of x?",
    "Tell a story about a lighthouse keeper.",
    "Translate into French: the train leaves at noon from platform three.",
    "List five ways to save water at home.",
    "How does a vaccine protect the body?",
    "Explain supply and demand with an example.",
    "Write an SQL query for the ten customers with the most orders.",
    "Compare living in a city with living in the country.",
    "A shop sells pens at 3 for 2 euros; what do 12 pens cost?",
    "Describe the water cycle for a ten-year-old.",
)


@hotset.callback()
def root() -> None:
    """Profiles of which experts a model uses."""  # with one command only, typer would leave the group out


@hotset.command()
@with_options(sampling=functools.partial(sampling_options, max_tokens=128), engine=engine_options)
def record(
    output: Annotated[Path, typer.Option(help="Profile to write, JSON.", show_default=False)],
    model: Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, one a line (.jsonl: strings or objects). Default: a few neutral ones.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        bool | None, typer.Option("--chat-template/--no-chat-template", show_default=False)
    ] = None,
    *,
    sampling: Sampling,
    engine: Mapping[str, Any],
) -> None:
    """Run prompts and write down how often each expert was chosen, for --expert-hotset-path.

    A profile fits the data it was recorded on: use prompts like those to be served.
    """
    asked: list[Prompt] = [{"prompt": text} for text in NEUTRAL_PROMPTS]
    if prompts is not None:
        asked = read_prompts(prompts)
    if not output.absolute().parent.is_dir():
        raise ValueError(f"the folder of {output} does not exist; make it or give another output")
    loaded, folder = load_engine(model, engine)
    params = sampling(folder)
    complete(loaded, prepare(loaded, asked, chat_template), params, f"running {len(asked)} prompts")
    from rimuru_jax.controller import fingerprint

    profile = HotsetProfile(
        model=fingerprint(loaded.model_config),
        counts=loaded.router_counts,
        tokens=loaded.num_routed_tokens,
        data=f"{len(asked)} neutral prompts" if prompts is None else prompts.name,
    )
    profile.save(output)
    note(f"{output} holds {profile.tokens} tokens of {profile.model}; {describe_skew(profile.counts)}")


def describe_skew(counts: np.ndarray) -> str:
    """How much of a layer's routing its hottest quarter of experts gets, from counts int[L, E]."""
    quarter = -(-counts.shape[1] // 4)
    hottest = np.sort(counts, axis=1)[:, -quarter:].sum(axis=1) / np.maximum(1, counts.sum(axis=1))
    return (
        f"the hottest {quarter} of {counts.shape[1]} experts get {hottest.mean():.1%} of a layer's tokens "
        f"({hottest.min():.1%} to {hottest.max():.1%}; uniform: {quarter / counts.shape[1]:.1%})"
    )
