"""The packed format: contents, killed and resumed conversions, full disks, damage."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from rimuru_jax.models import durable, packed
from rimuru_jax.models.checkpoint import Checkpoint, Dtype, LoadedModel, load_checkpoint
from rimuru_jax.models.packed import convert_checkpoint, is_packed
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint, write_weights

TOKENIZER = b'{"version": "1.0", "model": {}}'
PAGE_BYTES = 16 * 32 * 2  # of the tiny Qwen3-MoE in bfloat16: width 16, hidden size 32
NUM_PAGES = 3 * 6 * 3


class Killed(BaseException):
    """Stands for the process being killed: nothing in the package catches it."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny sharded Qwen3-MoE with tokenizer files."""
    folder = tmp_path / "source"
    write_checkpoint(folder, "qwen3_moe", shards=2)
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("not part of the model")
    return folder


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where to convert to, in batches of ten pages instead of all at once."""
    monkeypatch.setattr(packed, "_BATCH_BYTES", 10 * PAGE_BYTES)
    return tmp_path / "target"


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_packed_model_equals_its_source(tmp_path: Path, model_type: str, dtype: Dtype) -> None:
    write_checkpoint(tmp_path / "source", model_type)
    assert convert_checkpoint(tmp_path / "source", tmp_path / "packed", dtype)
    want = load_checkpoint(tmp_path / "source", dtype)
    assert_same_model(load_checkpoint(tmp_path / "packed", dtype), want)
    assert_same_model(load_checkpoint(tmp_path / "packed", dtype, verify=False), want)


def test_tied_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", "qwen3_moe", tie_word_embeddings=True)
    convert_checkpoint(tmp_path / "source", tmp_path / "packed", "bfloat16")
    assert "head" not in load_checkpoint(tmp_path / "packed", "bfloat16").params


def test_format_read_without_our_code(source: Path, target: Path) -> None:
    """Pages, checksums and manifest as the README describes them."""
    convert_checkpoint(source, target, "bfloat16")
    assert sorted(p.name for p in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "experts.crc32",
        "experts.pages",
        "generation_config.json",
        "manifest.json",
        "resident",
        "tokenizer.json",
    ]
    assert (target / "tokenizer.json").read_bytes() == TOKENIZER
    pages = (target / "experts.pages").read_bytes()
    checksums = np.frombuffer((target / "experts.crc32").read_bytes(), "<u4")
    assert len(pages) == NUM_PAGES * PAGE_BYTES
    tensors: dict[str, np.ndarray] = {}
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="np") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    page = 0
    for layer in range(3):
        for expert in range(6):
            for matrix in ("gate", "up", "down"):
                content = tensors[f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"].tobytes()
                assert pages[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] == content
                assert checksums[page] == zlib.crc32(content)
                page += 1
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["conversion"]["version"] == 1
    assert manifest["conversion"]["dtype"] == "bfloat16"
    assert manifest["conversion"]["config"] == json.loads((source / "config.json").read_text())
    assert (manifest["pages"], manifest["page_bytes"]) == (NUM_PAGES, PAGE_BYTES)
    assert manifest["total_bytes"] == sum(t.nbytes for t in tensors.values())
    others = {str(f.relative_to(target)) for f in target.rglob("*") if f.is_file()}
    assert set(manifest["files_crc32"]) == others - {"experts.pages", "manifest.json"}
    for name, checksum in manifest["files_crc32"].items():
        assert checksum == zlib.crc32((target / name).read_bytes())


def test_nan_payloads_survive(tmp_path: Path) -> None:
    """Bits are moved, not numbers: a quieted NaN or a flushed subnormal would change a page."""
    tensors = write_checkpoint(tmp_path / "source", "mixtral")
    bits = np.resize(np.array([0x7F81, 0xFFA5, 0x0001, 0x8000, 0x7F80], np.uint16), 96 * 32)
    for name in ("lm_head.weight", "model.layers.1.block_sparse_moe.experts.2.w2.weight"):
        shape = tensors[name].shape
        tensors[name] = bits[: shape[0] * shape[1]].view(ml_dtypes.bfloat16).reshape(shape)
    write_weights(tmp_path / "source", tensors)
    convert_checkpoint(tmp_path / "source", tmp_path / "packed", "bfloat16")
    model = load_checkpoint(tmp_path / "packed", "bfloat16")
    np.testing.assert_array_equal(model.params["head"].view(np.uint16).reshape(-1), bits)
    np.testing.assert_array_equal(model.host_pages[(1 * 4 + 2) * 3 + 2], bits[: 24 * 32])


def test_pages_are_mapped_and_private(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    before = files_of(target)
    pages = load_checkpoint(target, "bfloat16").host_pages
    assert isinstance(pages, np.memmap)
    assert pages.ctypes.data % 4096 == 0
    assert pages.flags.writeable
    pages[:] = 0
    assert files_of(target) == before


def test_converting_again_does_nothing(source: Path, target: Path) -> None:
    assert convert_checkpoint(source, target, "bfloat16")
    stats = {f: f.stat() for f in target.rglob("*")}
    said: list[str] = []
    assert not convert_checkpoint(source, target, "bfloat16", progress=lambda _f, text: said.append(text))
    assert "already holds this model as bfloat16" in said[-1]
    after = {f: f.stat() for f in target.rglob("*")}
    assert {f: (s.st_ino, s.st_mtime_ns) for f, s in after.items()} == {
        f: (s.st_ino, s.st_mtime_ns) for f, s in stats.items()
    }


def test_progress_grows_to_one(source: Path, target: Path) -> None:
    seen: list[float] = []
    convert_checkpoint(source, target, "bfloat16", progress=lambda fraction, _text: seen.append(fraction))
    assert seen == sorted(seen)
    assert len(seen) > NUM_PAGES // 10
    assert seen[-1] == 1.0


# --- killed at any moment ---------------------------------------------------------------------------------------


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


# --- damage -----------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "experts.crc32", "manifest.json"])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.999])
def test_flipped_bit_in_any_file_is_found_and_repaired(
    source: Path, target: Path, name: str, where: float
) -> None:
    convert_checkpoint(source, target, "bfloat16")
    want = files_of(target)
    flip(target / name, int((target / name).stat().st_size * where))
    message = refusal(target)
    assert str(target / name) in message
    assert "run `rimuru convert`" in message
    assert convert_checkpoint(source, target, "bfloat16")
    assert files_of(target) == want
    load_checkpoint(target, "bfloat16")


def test_flipped_bit_in_a_page_names_the_expert(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    want = files_of(target)
    page = (1 * 6 + 4) * 3 + 2
    flip(target / "experts.pages", page * PAGE_BYTES + 77)
    message = refusal(target)
    assert str(target / "experts.pages") in message
    assert "checksums of 1 pages differ, first of page 32 (layer 1, expert 4, matrix 2)" in message
    assert load_checkpoint(target, "bfloat16", verify=False).host_pages.shape == (NUM_PAGES, PAGE_BYTES // 2)
    assert convert_until(source, target, None).count("read_pages") == 3  # pages 32 to 53
    assert files_of(target) == want


def test_damage_to_resident_weights_is_found_and_repaired(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    want = load_checkpoint(target, "bfloat16")
    files = sorted(f for f in (target / "resident").rglob("*") if f.stat().st_size and f.is_file())
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        flip(file, len(content) // 2)
        assert f"{file} is damaged (its checksum differs" in refusal(target)
        file.write_bytes(content[:-1])
        assert f"{file} is damaged" in refusal(target)
        file.write_bytes(content)
    files[-1].unlink()
    assert f"{files[-1]} is damaged (it is missing)" in refusal(target)
    assert convert_checkpoint(source, target, "bfloat16")
    assert_same_model(load_checkpoint(target, "bfloat16"), want)


def test_lost_resident_weights_are_found_and_repaired(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    want = load_checkpoint(target, "bfloat16")
    shutil.rmtree(target / "resident")
    assert str(target / "resident") in refusal(target, verify=False)
    assert convert_checkpoint(source, target, "bfloat16")
    assert_same_model(load_checkpoint(target, "bfloat16"), want)


@pytest.mark.parametrize("name", ["experts.pages", "experts.crc32"])
@pytest.mark.parametrize("change", [-1, 1, None])
def test_wrong_size_is_found_even_unverified(
    source: Path, target: Path, name: str, change: int | None
) -> None:
    convert_checkpoint(source, target, "bfloat16")
    want = files_of(target)
    size = len(want[name])
    if change is None:
        (target / name).unlink()
    else:
        os.truncate(target / name, size + change)
    has = 0 if change is None else size + change
    assert f"{target / name} is damaged (it has {has} bytes of {size})" in refusal(target, verify=False)
    assert convert_checkpoint(source, target, "bfloat16")
    assert files_of(target) == want


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_lost_file_is_found(source: Path, target: Path, name: str) -> None:
    convert_checkpoint(source, target, "bfloat16")
    (target / name).unlink()
    assert f"{target / name} is damaged (it is missing)" in refusal(target)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"crc32": 1}', "null"])
def test_manifest_that_is_none(source: Path, target: Path, content: str) -> None:
    convert_checkpoint(source, target, "bfloat16")
    (target / "manifest.json").write_text(content)
    assert f"{target / 'manifest.json'} is damaged" in refusal(target)


def test_unfinished_and_other_dtype_and_version(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    assert "holds weights in bfloat16, but float32 was asked for" in refusal(target, dtype="float32")
    manifest = durable.read_json(target / "manifest.json")
    assert manifest is not None
    manifest["conversion"]["version"] = 2
    durable.write_json(target / "manifest.json", manifest)
    assert "is of packed format 2, but this rimuru_jax reads 1" in refusal(target)
    (target / "manifest.json").unlink()
    assert "unfinished; run `rimuru convert` again" in refusal(target)


# --- targets that are refused -----------------------------------------------------------------------------------


def conversion_refusal(source: Path, target: Path, dtype: Any = "bfloat16") -> str:
    with pytest.raises(ValueError) as caught:
        convert_checkpoint(source, target, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refused_places(source: Path, tmp_path: Path) -> None:
    before = files_of(source)
    for inside in (
        source,
        source / "packed",
        source / "a" / "b",
        tmp_path / "x" / ".." / "source" / "packed",
    ):
        assert "lies inside the checkpoint" in conversion_refusal(source, inside)
    (tmp_path / "link").symlink_to(source)
    assert "lies inside the checkpoint" in conversion_refusal(source, tmp_path / "link" / "packed")
    assert files_of(source) == before
    assert "is not a folder" in conversion_refusal(source, source / "config.json")
    assert "holds other files (source" in conversion_refusal(source, tmp_path).replace("link, ", "")


@pytest.mark.parametrize("name", ["manifest.json", "letter.txt", "config.json"])
def test_foreign_folder_is_refused_and_left_alone(source: Path, target: Path, name: str) -> None:
    target.mkdir()
    (target / name).write_text('{"name": "web app"}')
    assert f"holds other files ({name})" in conversion_refusal(source, target)
    assert files_of(target) == {name: b'{"name": "web app"}'}


def test_finished_conversion_of_another_source_is_kept(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    before = files_of(target)
    assert "another checkpoint or to another dtype (bfloat16)" in conversion_refusal(
        source, target, "float32"
    )
    write_checkpoint(source, "qwen3_moe", shards=2, seed=1)
    assert "another checkpoint" in conversion_refusal(source, target)
    assert files_of(target) == before


def test_refused_sources(source: Path, target: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    assert "is a packed checkpoint already" in conversion_refusal(target, tmp_path / "other")
    assert "no config.json" in conversion_refusal(tmp_path / "nowhere", tmp_path / "other")
    assert "dtype is 'int8'" in conversion_refusal(source, tmp_path / "other", "int8")
    assert not (tmp_path / "other").exists()


def test_two_conversions_to_one_folder(source: Path, target: Path) -> None:
    target.mkdir()
    with durable.locked(target):
        assert "another process is writing" in conversion_refusal(source, target)
    assert convert_checkpoint(source, target, "bfloat16")
