"""The `rimuru` command. Commands import the engine, and with it JAX, only when they run."""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rimuru_jax.cli.bench import bench
from rimuru_jax.cli.chat import chat
from rimuru_jax.cli.convert import convert
from rimuru_jax.cli.generate import generate
from rimuru_jax.cli.hotset import hotset
from rimuru_jax.cli.plan import plan
from rimuru_jax.cli.serve import serve
from rimuru_jax.cli.simulate import simulate

USER_ERROR = 2
INTERRUPTED = 128 + 2
BROKEN_PIPE = 1  # as typer exits when a command meets it

# Of all errors in the command line; its place differs between versions of typer, which only exports a subclass.
_CommandLineError: type[Exception] = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)  # type: ignore[assignment]

app = typer.Typer(
    name="rimuru",
    help="Serve Mixture-of-Experts models from one page pool that experts, KV cache and states share.",
    add_completion=False,
    rich_markup_mode=None,  # its panels cut the names of long options
    invoke_without_command=True,
)
for command in (generate, chat, serve, plan, simulate, convert):
    app.command()(command)
app.add_typer(hotset, name="hotset")
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"rimuru_jax {version('rimuru-jax')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for what the user can mend, 130 for Ctrl-C.

    Errors that the user can mend are one sentence on stderr. RIMURU_TRACEBACK=1 shows where they come from.
    """
    _pass_over_a_plugin_that_only_compiles()
    try:
        status = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more, and what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (_CommandLineError, ValueError, OSError, ModuleNotFoundError, MemoryError) as error:
        if os.environ.get("RIMURU_TRACEBACK"):
            raise
        print(f"rimuru: error: {_sentence(error)}", file=sys.stderr)
        return USER_ERROR


def _pass_over_a_plugin_that_only_compiles() -> None:
    """Keep JAX from complaining at length of a CUDA plugin that has neither a driver nor CUDA's libraries here.

    The dependency group `h200` installs one, to compile for a GPU without having any.
    """
    if "JAX_PLATFORMS" in os.environ or not importlib.util.find_spec("jax_cuda13_plugin"):
        return
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"):
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ["JAX_PLATFORMS"] = "cpu"


def _sentence(error: Exception) -> str:
    if isinstance(error, _CommandLineError):
        text: str = error.format_message()  # type: ignore[attr-defined]
    elif isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, MemoryError):
        text = f"not enough memory: {error}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())
