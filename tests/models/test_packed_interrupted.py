"""Conversions that are killed, or meet a full disk: what is left is known to be unfinished, and is resumed."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rimuru_jax.models import packed
from rimuru_jax.models.checkpoint import Checkpoint, Dtype, load_checkpoint
from rimuru_jax.models.packed import convert_checkpoint, is_packed
from tests.models.packed_cases import (
    NUM_PAGES,
    PAGE_BYTES,
    Killed,
    assert_same_model,
    convert_until,
    count_steps,
    files_of,
    refusal,
)
from tests.models.tiny_checkpoints import write_checkpoint


def test_killed_before_any_step_and_resumed(source: Path, target: Path) -> None:
    steps = convert_until(source, target, None)
    want, model = files_of(target), load_checkpoint(target, "bfloat16")
    assert {"fsync", "replace", "read_pages", "copyfile", "_save_params"} <= set(steps)
    assert steps.count("read_pages") == 6  # of 54 pages, ten at a time
    for stop_at in range(len(steps)):
        shutil.rmtree(target)
        convert_until(source, target, stop_at)
        if "manifest.json" not in files_of(target):
            assert stop_at == 0 or not is_packed(target) or "unfinished" in refusal(target)
        convert_checkpoint(source, target, "bfloat16")
        assert files_of(target) == want, f"killed before step {stop_at}: {steps[stop_at]}"
    assert_same_model(load_checkpoint(target, "bfloat16"), model)


def test_killed_again_and_again(source: Path, target: Path, tmp_path: Path) -> None:
    """Each attempt gets a bit further, killed at its third batch of pages or later."""
    convert_checkpoint(source, tmp_path / "whole", "bfloat16")
    batches: list[int] = []
    while "manifest.json" not in (files_of(target) if target.exists() else ()):
        with pytest.MonkeyPatch.context() as patch:
            original = Checkpoint.read_pages
            calls: list[int] = []

            def read_pages(
                self: Checkpoint,
                out: Any,
                first_page: int,
                *rest: Any,
                calls: Any = calls,
                original: Any = original,
            ) -> None:
                if len(calls) == 2:
                    raise Killed
                calls.append(first_page)
                original(self, out, first_page, *rest)

            patch.setattr(Checkpoint, "read_pages", read_pages)
            try:
                convert_checkpoint(source, target, "bfloat16")
            except Killed:
                batches += calls
            else:
                batches += calls
    assert batches == [0, 10, 20, 30, 40, 50]  # nothing was read twice
    assert files_of(target) == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "tear", ["half a page", "a page without checksum", "a checksum without page", "zeros"]
)
def test_torn_writes_are_found(source: Path, target: Path, tear: str) -> None:
    steps = convert_until(source, target, None)
    want = files_of(target)
    shutil.rmtree(target)
    third_batch = [i for i, name in enumerate(steps) if name == "read_pages"][3]
    convert_until(source, target, third_batch)
    pages, checksums = target / "experts.pages", target / "experts.crc32"
    assert pages.stat().st_size == 30 * PAGE_BYTES
    with open(pages, "ab") as page_file, open(checksums, "ab") as checksum_file:
        if tear == "half a page":
            page_file.write(b"x" * (PAGE_BYTES // 2 + 1))
        elif tear == "a page without checksum":
            page_file.write(b"x" * PAGE_BYTES)
        elif tear == "a checksum without page":
            checksum_file.write(b"abcdef")
    if tear == "zeros":  # what a crash of the machine may leave of written pages
        content = bytearray(pages.read_bytes())
        content[17 * PAGE_BYTES : 19 * PAGE_BYTES] = bytes(2 * PAGE_BYTES)
        pages.write_bytes(content)
    resumed = convert_until(source, target, None)
    assert resumed.count("read_pages") == (4 if tear == "zeros" else 3)  # pages 17 to 53, or 30 to 53
    assert files_of(target) == want


def test_killed_by_a_signal(source: Path, target: Path, tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from rimuru_jax.models import packed
packed._BATCH_BYTES = {10 * PAGE_BYTES}
def progress(fraction, text):
    if fraction > 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
packed.convert_checkpoint(Path({str(source)!r}), Path({str(target)!r}), "bfloat16", progress)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert "unfinished" in refusal(target)
    assert 0 < len(files_of(target)["experts.pages"]) < NUM_PAGES * PAGE_BYTES
    convert_checkpoint(source, target, "bfloat16")
    convert_checkpoint(source, tmp_path / "whole", "bfloat16")
    assert files_of(target) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("change", ["weights", "dtype", "config"])
def test_unfinished_conversion_of_another_source_starts_over(source: Path, target: Path, change: str) -> None:
    steps = convert_until(source, target, None)
    dtype: Dtype = "float32" if change == "dtype" else "bfloat16"
    last_batch = [i for i, name in enumerate(steps) if name == "read_pages"][-1]
    for stop_at in range(6):  # killed again while starting over
        shutil.rmtree(target)
        convert_until(source, target, last_batch)
        if change == "weights":
            write_checkpoint(source, "qwen3_moe", shards=2, seed=stop_at + 1)
        elif change == "config":
            write_checkpoint(source, "qwen3_moe", shards=2, rope_theta=50000.0 + stop_at)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            count_steps(patch, stop_at)
            convert_checkpoint(source, target, dtype)
        assert convert_checkpoint(source, target, dtype)
        assert_same_model(load_checkpoint(target, dtype), load_checkpoint(source, dtype))


def test_changed_tokenizer_is_copied_again(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    (source / "tokenizer.json").write_bytes(b"{}")
    (source / "generation_config.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        steps = count_steps(patch, None)
        assert convert_checkpoint(source, target, "bfloat16")
    assert "read_pages" not in steps
    assert (target / "tokenizer.json").read_bytes() == b"{}"
    assert not (target / "generation_config.json").exists()
    load_checkpoint(target, "bfloat16")


# --- full disk --------------------------------------------------------------------------------------------------


def assert_disk_full(source: Path, target: Path, needed: int, free: int) -> None:
    with pytest.raises(OSError) as caught:
        convert_checkpoint(source, target, "bfloat16")
    message = str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert message.startswith(f"the disk of {target} is full")
    assert f"({needed} bytes)" in message
    assert f"({free} bytes) are free" in message
    assert "resumes" in message
    assert "\n" not in message
    assert "unfinished" in refusal(target)


def disk_with(free: int) -> Callable[[Any], Any]:
    return lambda _path: shutil._ntuple_diskusage(10**9, 10**9 - free, free)  # pyright: ignore


def model_bytes(source: Path) -> int:
    return sum(f.stat().st_size for f in source.glob("*.safetensors")) - sum(
        8 + int.from_bytes(f.read_bytes()[:8], "little") for f in source.glob("*.safetensors")
    )


def test_full_disk_is_seen_beforehand(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = model_bytes(source) + 2**20
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", disk_with(needed - 1))
        assert_disk_full(source, target, needed, needed - 1)
        assert len(files_of(target)["experts.pages"]) == 0
    monkeypatch.setattr(shutil, "disk_usage", disk_with(needed))
    assert convert_checkpoint(source, target, "bfloat16")


def test_disk_that_fills_up_in_the_middle(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = convert_until(source, target, None)
    want = files_of(target)
    shutil.rmtree(target)
    monkeypatch.setattr(shutil, "disk_usage", disk_with(10**8))
    original = Checkpoint.read_pages

    def read_pages(self: Checkpoint, out: Any, first_page: int, *rest: Any) -> None:
        if first_page == 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, out, first_page, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read_pages", read_pages)
        assert_disk_full(source, target, model_bytes(source) - 20 * PAGE_BYTES + 2**20, 10**8)
    resumed = convert_until(source, target, None)
    assert (steps.count("read_pages"), resumed.count("read_pages")) == (6, 4)
    assert files_of(target) == want


def test_disk_that_is_full_before_orbax(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another program took the space while the pages were written."""
    free = iter([10**8, 1000, 1000])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: disk_with(next(free))(path))
        steps = count_steps(patch, None)
        assert_disk_full(source, target, model_bytes(source) - NUM_PAGES * PAGE_BYTES + 2**20, 1000)
    assert "_save_params" not in steps
    assert convert_checkpoint(source, target, "bfloat16")


def test_leftovers_of_orbax_are_removed_before_space_is_counted(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_until(source, target, 8)
    leftover = target / "resident.orbax-checkpoint-tmp"
    leftover.mkdir()
    (leftover / "x").write_bytes(b"x")
    real = disk_with(10**8)

    def disk_usage(path: Path) -> Any:
        assert not leftover.exists()
        return real(path)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert convert_checkpoint(source, target, "bfloat16")


def test_disk_that_orbax_finds_full(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(_target: Path, _params: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Error writing d/0: No space left on device")

    monkeypatch.setattr(shutil, "disk_usage", disk_with(10**8))
    with monkeypatch.context() as patch:
        patch.setattr(packed, "_save_params", save)
        assert_disk_full(source, target, model_bytes(source) - NUM_PAGES * PAGE_BYTES + 2**20, 10**8)
    assert convert_checkpoint(source, target, "bfloat16")


def test_other_errors_of_the_disk_pass_through(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Checkpoint, "read_pages", fail)
    with pytest.raises(OSError, match="Input/output error"):
        convert_checkpoint(source, target, "bfloat16")
