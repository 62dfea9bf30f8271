"""Options that several commands share, under the names of vLLM's engine arguments and sampling parameters.

A *group* is a function whose keyword parameters are options and whose result is what commands want of them:

    @with_options(engine=engine_options)
    def generate(prompt: ..., engine: Mapping[str, Any]) -> None: ...
"""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import typer

from rimuru_jax.config import EngineConfig
from rimuru_jax.generation_config import recommended_sampling
from rimuru_jax.sampling_params import SamplingParams


def with_options(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each group; its parameter of the group's name gets the group's result."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        options = {name: inspect.signature(group).parameters for name, group in groups.items()}

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = group(**{option: values.pop(option) for option in options[name]})
            command(**values)

        merged = {name: parameter for name, parameter in own.items() if name not in groups}
        for parameters in options.values():
            merged |= parameters
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in merged.values()]
        run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in keyword}
        return run

    return decorate


_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}


def parse_bytes(text: str) -> int:
    """Bytes of "134217728", "128MiB", "1.5 GiB" or "2GB"; K, M, G and T alone are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no number of bytes such as 134217728, 128MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def parse_offload_limit(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither 'auto' nor a number of experts")
    return int(text)


Model = Annotated[
    Path | None,
    typer.Option(
        help="Hugging Face or packed model folder. Default: the embedded model.", show_default=False
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option(help="Type of weights, activations, keys and values."),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens of the longest request. Default: the model's limit, or as much as fits.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(help="Tokens of one KV page. Default: 16, or less where 16 would waste pool."),
]
PoolBytes = Annotated[
    Any,
    typer.Option(
        metavar="BYTES",
        parser=parse_bytes,
        help="Size of the page pool: 128MiB, 2GB, ...",
    ),
]
AdjusterChoice = Annotated[
    Literal["watermark", "throughput"],
    typer.Option(help="How far elastic goes: for whoever needs pages, or as far as it pays."),
]
OffloadLimit = Annotated[
    Any,
    typer.Option(
        metavar="N|auto",
        parser=parse_offload_limit,
        help="Experts of a layer that may be away from the pool.",
    ),
]
RecurrentDtype = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="Type of stored recurrent states of hybrids.")
]
LoadingBufferExperts = Annotated[int, typer.Option(help="Experts of one loading-buffer set, at most.")]
MEMORY_POLICIES = (
    "static: all experts resident; fixed: each layer at its floor; elastic: residency moves with the load."
)

DEFAULTS = EngineConfig()


def engine_options(
    *,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the tokenizer, if not the model's."),
    ] = None,
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(help="auto: read the weights; dummy: random ones, from a config.json alone."),
    ] = DEFAULTS.load_format,
    dummy_router_skew: Annotated[
        float,
        typer.Option(help="How unequally often dummy weights choose experts: 0 uniform, 0.3 realistic."),
    ] = DEFAULTS.dummy_router_skew,
    dtype: Dtype = DEFAULTS.dtype,
    seed: Annotated[
        int,
        typer.Option(help="Seed of random choices; the same seed gives the same text."),
    ] = DEFAULTS.seed,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at once, at most.")
    ] = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens of one step, at most.")
    ] = DEFAULTS.max_num_batched_tokens,
    block_size: BlockSize = None,
    mamba_ssm_cache_dtype: RecurrentDtype = DEFAULTS.mamba_ssm_cache_dtype,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], typer.Option(help="Order of admission.")
    ] = DEFAULTS.scheduling_policy,
    memory_policy: Annotated[
        Literal["static", "fixed", "elastic"],
        typer.Option(help=MEMORY_POLICIES),
    ] = DEFAULTS.memory_policy,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that may be used in all.")
    ] = DEFAULTS.gpu_memory_utilization,
    page_pool_bytes: PoolBytes = None,
    expert_offload_limit: OffloadLimit = "auto",
    loading_buffer_experts: LoadingBufferExperts = DEFAULTS.loading_buffer_experts,
    expert_prefetch: Annotated[
        Literal["auto", "all", "none"],
        typer.Option(help="Absent experts to load ahead of their layer; auto: all if most will be chosen."),
    ] = DEFAULTS.expert_prefetch,
    expert_cache_policy: Annotated[
        Literal["online", "hotset", "lru"],
        typer.Option(
            help="Which experts stay: by a profile and what requests choose, by the profile alone, or the last used."
        ),
    ] = DEFAULTS.expert_cache_policy,
    expert_hotset_path: Annotated[
        Path | None,
        typer.Option(help="Profile written by `rimuru hotset record`."),
    ] = None,
    adjuster_policy: AdjusterChoice = DEFAULTS.adjuster_policy,
    expand_patience: Annotated[
        int,
        typer.Option(help="Passes with a surplus of pages before experts are taken back."),
    ] = DEFAULTS.expand_patience,
    compile_ahead: Annotated[
        bool | None,
        typer.Option(help="Compile all shapes of steps before serving. Default: on a GPU."),
    ] = None,
    verify_checkpoint: Annotated[
        bool,
        typer.Option(help="Check a packed checkpoint's checksums while loading."),
    ] = DEFAULTS.verify_checkpoint,
) -> dict[str, Any]:
    """Keyword arguments of `Engine`."""
    options = dict(locals())
    for name in ("tokenizer", "expert_hotset_path"):
        options[name] = None if options[name] is None else str(options[name])
    return options


class Sampling(Protocol):
    def __call__(self, folder: Path, *, n: int = 1) -> SamplingParams:
        """Parameters for a model folder, whose generation_config.json gives what the user did not."""
        ...


def sampling_options(
    *,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 takes the most probable token. Default: of the model's generation_config.json, else 0.",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the fewest tokens that reach this probability."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Keep this many of the most probable tokens; 0 is off."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens this probable relative to the best."),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logits of tokens of the output.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, once for every time a token is there.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divides positive logits of tokens that are there; 1 is off.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.")] = 512,
    min_tokens: Annotated[int, typer.Option(help="Tokens before the output may end.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the output; repeatable."),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
) -> Sampling:
    """The user's sampling parameters, open to what the model's folder says."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}

    def resolve(folder: Path, *, n: int = 1) -> SamplingParams:
        chosen: dict[str, Any] = {"n": n, "temperature": 0.0} | recommended_sampling(folder) | given
        return SamplingParams(**chosen)

    SamplingParams(**given)  # complain before anything is loaded
    return resolve
