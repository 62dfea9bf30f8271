"""`rimuru convert`: writes a checkpoint in the form that loads fastest."""

from pathlib import Path
from typing import Annotated

import typer

from rimuru_jax.cli.console import note, progress
from rimuru_jax.cli.options import Dtype


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(help="Folder to write to, new or of a conversion to go on with.")],
    dtype: Dtype = "bfloat16",
) -> None:
    """Convert a model to packed form, which is mapped into memory instead of read.

    A conversion that was stopped goes on where it was; a finished one is checked and, where damaged, repaired.
    """
    with progress(f"converting {source}") as report:
        from rimuru_jax.models.packed import convert_checkpoint  # here and not above: it brings JAX

        written = convert_checkpoint(source, target, dtype, report)
    if written:
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        from rimuru_jax.host.page_layout import format_bytes

        note(f"{target} holds {source} as {dtype}, {format_bytes(size)}")
    else:
        note(f"{target} already held {source} as {dtype}; it was checked and is complete")
