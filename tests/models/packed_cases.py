"""What the tests of packed checkpoints share: comparisons, and conversions that are killed at a given step."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rimuru_jax.models import durable, packed
from rimuru_jax.models.checkpoint import Checkpoint, LoadedModel, load_checkpoint
from rimuru_jax.models.packed import convert_checkpoint

TOKENIZER = b'{"version": "1.0", "model": {}}'
PAGE_BYTES = 16 * 32 * 2  # of the tiny Qwen3-MoE in bfloat16: width 16, hidden size 32
NUM_PAGES = 3 * 6 * 3


class Killed(BaseException):
    """Stands for the process being killed: nothing in the package catches it."""


def files_of(folder: Path) -> dict[str, Any]:
    """Contents of a packed folder, but for orbax's own files, whose names are random and stand in the manifest."""
    paths = [f for f in folder.rglob("*") if f.is_file()]
    files: dict[str, Any] = {str(f.relative_to(folder)): f.read_bytes() for f in paths}
    files = {name: content for name, content in files.items() if not name.startswith("resident/")}
    manifest = durable.read_json(folder / "manifest.json")
    if manifest is not None:
        checksums = manifest["files_crc32"].items()
        manifest["files_crc32"] = {n: crc for n, crc in checksums if not n.startswith("resident/")}
        files["manifest.json"] = manifest
    return files


def assert_same_model(got: LoadedModel, want: LoadedModel) -> None:
    assert got.config == want.config
    assert got.raw_config == want.raw_config
    np.testing.assert_array_equal(got.host_pages, want.host_pages, strict=True)
    got_leaves, got_tree = jax.tree.flatten(got.params)
    want_leaves, want_tree = jax.tree.flatten(want.params)
    assert got_tree == want_tree
    for g, w in zip(got_leaves, want_leaves, strict=True):
        assert isinstance(g, np.ndarray)
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g.view(np.uint8), w.view(np.uint8), strict=True)


def refusal(folder: Path, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        load_checkpoint(folder, kwargs.pop("dtype", "bfloat16"), **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def count_steps(patch: pytest.MonkeyPatch, stop_at: int | None) -> list[str]:
    """Log every step that changes the disk, and kill the conversion right before number `stop_at`."""
    log: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            if len(log) == stop_at:
                raise Killed
            log.append(name)
            return original(*args, **kwargs)

        patch.setattr(owner, name, step)

    for owner, name in (
        (os, "fsync"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "touch"),
        (shutil, "rmtree"),
        (shutil, "copyfile"),
        (Checkpoint, "read_pages"),
        (packed, "page_checksums"),
        (packed, "_save_params"),
    ):
        watch(owner, name)
    return log


def convert_until(source: Path, target: Path, stop_at: int | None) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        log = count_steps(patch, stop_at)
        try:
            convert_checkpoint(source, target, "bfloat16")
        except Killed:
            assert len(log) == stop_at
        else:
            assert stop_at is None
    return log
