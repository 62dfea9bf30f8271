"""The packed format: contents, damage, and targets that are refused."""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from rimuru_jax.models import durable
from rimuru_jax.models.checkpoint import Dtype, load_checkpoint
from rimuru_jax.models.packed import convert_checkpoint
from tests.models.packed_cases import (
    NUM_PAGES,
    PAGE_BYTES,
    TOKENIZER,
    assert_same_model,
    convert_until,
    files_of,
    refusal,
)
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint, write_weights


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
    assert manifest["conversion"]["version"] == 2
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


def test_pages_are_mapped_read_only(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16")
    pages = load_checkpoint(target, "bfloat16").host_pages
    assert isinstance(pages, np.memmap)
    assert pages.ctypes.data % 4096 == 0
    assert not pages.flags.writeable


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
    manifest["conversion"]["version"] = 1
    durable.write_json(target / "manifest.json", manifest)
    assert "is of packed format 1, but this rimuru_jax reads 2" in refusal(target)
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
