"""The packed format: a checkpoint whose experts are already host pages, mapped into memory instead of read.

    config.json, tokenizer.json, ...   copies of the source's files
    resident/                          all other parameters, a tree saved by orbax's StandardCheckpointer
    experts.pages                      the host pages one after another, no header
    experts.crc32                      their checksums, little-endian uint32
    manifest.json                      what was converted and checksums of the rest; written last
    conversion.json                    while unfinished, in place of the manifest: what is being converted

A conversion can be killed at any moment. Pages count as done if their checksum is there and agrees, so nothing else
keeps track of progress, and the order in which an OS writes files back does not matter.
"""

import errno
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rimuru_jax.host.page_layout import format_bytes
from rimuru_jax.models.checkpoint import (
    DTYPES,
    Checkpoint,
    Dtype,
    HostPages,
    LoadedModel,
    Progress,
    byte_progress,
    in_threads,
    page_shape,
    parameter_dtype,
    parameter_tree,
)
from rimuru_jax.models.config import ModelConfig
from rimuru_jax.models.durable import canonical_json, is_disk_full, locked, read_json, sync_folder, write_json
from rimuru_jax.models.registry import parse_config, tensor_names
from rimuru_jax.models.weights import resident_sources

VERSION = 2

_FORMAT = "rimuru_jax packed checkpoint"
_MANIFEST = "manifest.json"
_JOURNAL = "conversion.json"
_PAGES = "experts.pages"
_CHECKSUMS = "experts.crc32"
_RESIDENT = "resident"
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
)
_BATCH_BYTES = 256 * 2**20  # read and written at a time: what is lost when a conversion is killed
_CHECK_BYTES = 8 * 2**20  # checked by a thread at a time
_SPARE_BYTES = 2**20  # what the small files take
_REPAIR = "run `rimuru convert` from the original checkpoint to this folder again, which repairs it"

type _Manifest = dict[str, Any]


def is_packed(folder: Path) -> bool:
    """Whether `folder` is a packed checkpoint, be it unfinished or damaged."""
    return any((folder / name).exists() for name in (_PAGES, _CHECKSUMS)) or any(
        _read(folder / name) is not None for name in (_MANIFEST, _JOURNAL)
    )


def load_packed(
    folder: Path, dtype: Dtype, progress: Progress | None = None, verify: bool = True
) -> LoadedModel:
    """Load a packed checkpoint. Its pages are mapped read-only; `verify` compares everything with its checksum.

    Raises:
        ValueError: in one sentence, if it is unfinished, damaged or of another dtype.
    """
    manifest = _read(folder / _MANIFEST)
    if manifest is None:
        if (folder / _MANIFEST).exists():
            raise _damaged(folder, _MANIFEST, "it cannot be read, or was changed after it was written")
        raise ValueError(
            f"the conversion to {folder} is unfinished; run `rimuru convert` again, which resumes it"
        )
    conversion = manifest["conversion"]
    if conversion["version"] != VERSION:
        raise ValueError(
            f"{folder} is of packed format {conversion['version']}, but this rimuru_jax reads {VERSION}; "
            "convert the original checkpoint again to another folder"
        )
    if conversion["dtype"] != dtype:
        raise ValueError(
            f"{folder} holds weights in {conversion['dtype']}, but {dtype} was asked for; "
            f"set dtype to {conversion['dtype']} or convert the original checkpoint to {dtype}"
        )
    config = parse_config(conversion["config"])
    shape = page_shape(config, dtype)
    for name, size in ((_PAGES, shape[0] * shape[1] * 2), (_CHECKSUMS, shape[0] * 4)):
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise _damaged(folder, name, f"it has {found} bytes of {size}")
    host_pages = np.memmap(folder / _PAGES, np.uint16, "r", shape=shape)
    report = byte_progress(progress, manifest["total_bytes"], f"checking {folder.name}")
    if verify:  # before orbax reads: damage makes it fail with many messages, or not at all
        _verify_files(folder, manifest)
        _verify_pages(folder, config, host_pages, report)
    params = _restore_params(folder, config, dtype)
    if progress is not None:
        progress(1.0, f"{folder.name} is loaded")
    return LoadedModel(config=config, raw_config=conversion["config"], params=params, host_pages=host_pages)


def convert_checkpoint(source: Path, target: Path, dtype: Dtype, progress: Progress | None = None) -> bool:
    """Write the Hugging Face folder `source` as a packed checkpoint to `target`; False if it is there already.

    An unfinished conversion of the same source (names, sizes and times of its files, config) to the same dtype is
    resumed, of another started over; a finished one is checked and, where damaged, repaired.

    Raises:
        ValueError: in one sentence, if `source` cannot be served, or `target` is no folder to write to.
        OSError: the disk is full (errno ENOSPC, in one sentence; the conversion can be resumed) or fails.
    """
    source, target = Path(source), Path(target)
    report = progress or (lambda _fraction, _text: None)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but weights are served in one of {', '.join(DTYPES)}")
    if is_packed(source):
        raise ValueError(f"{source} is a packed checkpoint already; convert the original Hugging Face folder")
    checkpoint = Checkpoint.open(source)
    _check_place(source, target)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with locked(target):
            conversion = _describe(checkpoint, dtype)
            if _is_complete(target, conversion, checkpoint, dtype, progress):
                report(1.0, f"{target} already holds this model as {dtype}, checked and complete")
                return False
            _prepare(target, conversion)
            count = byte_progress(progress, checkpoint.num_bytes(dtype), f"converting {source.name}")
            _write_pages(checkpoint, target, dtype, count)
            params = checkpoint.read_params(dtype, count)
            _require_space(checkpoint, target, dtype)  # again: orbax meets a full disk with pages of messages
            _save_params(target, params)
            _copy_files(source, target)
            manifest = {
                "conversion": conversion,
                "page_bytes": page_shape(checkpoint.config, dtype)[1] * 2,
                "pages": len(checkpoint.pages),
                "total_bytes": checkpoint.num_bytes(dtype),
                "files_crc32": _file_checksums(
                    target, [_CHECKSUMS, *_small_files(target), *_files_of_params(target)]
                ),
            }
            write_json(target / _JOURNAL, manifest)
            (target / _JOURNAL).replace(target / _MANIFEST)
            sync_folder(target)
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise _disk_full(checkpoint, target, dtype) from error
    report(1.0, f"{target} is complete")
    return True


def page_checksums(pages: HostPages, report: Callable[[int], None]) -> npt.NDArray[np.uint32]:
    """CRC-32 of every page, computed in threads; `report` is told of bytes as they are done."""
    checksums = np.empty(len(pages), np.uint32)
    step = max(1, _CHECK_BYTES // (pages.shape[1] * pages.itemsize))

    def check(first: int) -> int:
        batch = pages[first : first + step]
        checksums[first : first + step] = [zlib.crc32(page) for page in batch]
        return batch.nbytes

    in_threads(check, range(0, len(pages), step), report)
    return checksums


def _check_place(source: Path, target: Path) -> None:
    """Refuse targets in which a conversion could destroy or clutter something."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is not a folder; give a new or empty folder to convert to")
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(f"{target} lies inside the checkpoint {source}; give a folder outside it")
    if target.is_dir() and not is_packed(target):
        # Of a conversion killed in its first moment there is nothing but the journal, perhaps half of it.
        others = [entry.name for entry in target.iterdir() if not entry.name.startswith(_JOURNAL)]
        if others:
            raise ValueError(
                f"{target} holds other files ({', '.join(sorted(others)[:3])}); give a new or empty folder to convert to"
            )


def _describe(checkpoint: Checkpoint, dtype: Dtype) -> dict[str, Any]:
    """What is converted: two conversions of equal descriptions write the same pages."""
    stats = {file.name: file.stat() for file in checkpoint.files}
    return {
        "format": _FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "config": dict(checkpoint.raw_config),
        "weights": {name: {"bytes": s.st_size, "mtime_ns": s.st_mtime_ns} for name, s in stats.items()},
    }


def _is_complete(
    target: Path,
    conversion: Mapping[str, Any],
    checkpoint: Checkpoint,
    dtype: Dtype,
    progress: Progress | None,
) -> bool:
    """Whether a finished, undamaged conversion is there; a damaged one is made an unfinished one."""
    manifest = _read(target / _MANIFEST)
    if manifest is None:
        return False
    if canonical_json(manifest["conversion"]) != canonical_json(conversion):
        raise ValueError(
            f"{target} holds a finished conversion of another checkpoint or to another dtype "
            f"({manifest['conversion']['dtype']}); give another folder or delete this one"
        )
    small = _small_files(checkpoint.folder)
    try:
        load_packed(target, dtype, progress)
        if _file_checksums(checkpoint.folder, small) == _file_checksums(target, _small_files(target)):
            return True
    except ValueError:
        pass
    (target / _MANIFEST).replace(target / _JOURNAL)
    return False


def _prepare(target: Path, conversion: Mapping[str, Any]) -> None:
    """Make `target` an unfinished folder of this conversion, whose pages may be kept if it was one."""
    journal = _read(target / _JOURNAL)
    if journal is None or canonical_json(journal["conversion"]) != canonical_json(conversion):
        # In this order: pages of another conversion must never meet this journal and their checksums.
        (target / _CHECKSUMS).unlink(missing_ok=True)
        sync_folder(target)
        write_json(target / _JOURNAL, {"conversion": conversion})
    (target / _MANIFEST).unlink(missing_ok=True)
    for resident in target.glob(f"{_RESIDENT}*"):  # orbax's temporary folder too
        shutil.rmtree(resident)


def _write_pages(checkpoint: Checkpoint, target: Path, dtype: Dtype, report: Callable[[int], None]) -> None:
    """Write the pages and checksums that are not there yet."""
    num_pages, words = page_shape(checkpoint.config, dtype)
    page_bytes = words * 2
    for name in (_PAGES, _CHECKSUMS):
        (target / name).touch()
    with open(target / _PAGES, "r+b") as pages, open(target / _CHECKSUMS, "r+b") as checksums:
        page = _num_good_pages(target, num_pages, words)
        report(page * page_bytes)
        for file, size in ((pages, page * page_bytes), (checksums, page * 4)):
            file.truncate(size)
            file.seek(size)
        _require_space(checkpoint, target, dtype)
        batch = np.empty((min(num_pages, max(1, _BATCH_BYTES // page_bytes)), words), np.uint16)
        while page < num_pages:
            rows = batch[: num_pages - page]
            checkpoint.read_pages(rows, page, dtype, report)
            pages.write(rows.data)
            checksums.write(page_checksums(rows, lambda _num_bytes: None).astype("<u4").data)
            pages.flush()
            checksums.flush()
            page += len(rows)
        for file in (pages, checksums):
            os.fsync(file.fileno())


def _num_good_pages(target: Path, num_pages: int, words: int) -> int:
    """Length of the run of pages, from the first, that agree with their checksums."""
    expected = np.fromfile(target / _CHECKSUMS, "<u4")
    count = min(num_pages, len(expected), (target / _PAGES).stat().st_size // (words * 2))
    if count == 0:
        return 0
    pages = np.memmap(target / _PAGES, np.uint16, "r", shape=(count, words))
    good = page_checksums(pages, lambda _num_bytes: None) == expected[:count]
    return count if good.all() else int(good.argmin())


def _missing_bytes(checkpoint: Checkpoint, target: Path, dtype: Dtype) -> int:
    """Bytes that must be free to finish the conversion."""
    present = [target / name for name in (_PAGES, *_files_of_params(target)) if (target / name).exists()]
    done = sum(file.stat().st_size for file in present)
    return max(0, checkpoint.num_bytes(dtype) - done) + _SPARE_BYTES


def _require_space(checkpoint: Checkpoint, target: Path, dtype: Dtype) -> None:
    if shutil.disk_usage(target).free < _missing_bytes(checkpoint, target, dtype):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _disk_full(checkpoint: Checkpoint, target: Path, dtype: Dtype) -> OSError:
    missing, free = _missing_bytes(checkpoint, target, dtype), shutil.disk_usage(target).free
    error = OSError(
        f"the disk of {target} is full: finishing the conversion needs {format_bytes(missing)} ({missing} bytes), "
        f"{format_bytes(free)} ({free} bytes) are free; make room and run `rimuru convert` again, which resumes it"
    )
    error.errno = errno.ENOSPC  # set afterwards, so that the message stays a sentence without "[Errno 28]"
    return error


def _verify_files(folder: Path, manifest: _Manifest) -> None:
    wanted: dict[str, int] = manifest["files_crc32"]
    for name in wanted:
        if not (folder / name).is_file():
            raise _damaged(folder, name, "it is missing")
    for name, checksum in _file_checksums(folder, wanted).items():
        if checksum != wanted[name]:
            raise _damaged(folder, name, "its checksum differs from the manifest's")


def _verify_pages(folder: Path, config: ModelConfig, pages: HostPages, report: Callable[[int], None]) -> None:
    wrong = np.flatnonzero(page_checksums(pages, report) != np.fromfile(folder / _CHECKSUMS, "<u4"))
    if len(wrong):
        moe = config.moe
        layer, expert, matrix = np.unravel_index(
            wrong[0], (len(config.moe_layers), moe.num_experts, moe.matrices)
        )
        raise _damaged(
            folder,
            _PAGES,
            f"checksums of {len(wrong)} pages differ, first of page {wrong[0]} "
            f"(layer {config.moe_layers[layer]}, expert {expert}, matrix {matrix})",
        )


def _damaged(folder: Path, name: str, what: str) -> ValueError:
    return ValueError(f"{folder / name} is damaged ({what}); {_REPAIR}")


def _save_params(target: Path, params: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp  # here and not above: it takes seconds and brings jax

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target.resolve() / _RESIDENT, params)


def _restore_params(folder: Path, config: ModelConfig, dtype: Dtype) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    sources = resident_sources(config, tensor_names(config.model_type)[0])
    wanted = parameter_tree(
        config, {path: np.empty(s.shape, parameter_dtype(s, dtype)) for path, s in sources.items()}
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder.resolve() / _RESIDENT, wanted)
    except Exception as error:  # of many types, by where the damage lies
        raise _damaged(folder, _RESIDENT, str(error).partition("\n")[0][:200]) from error


def _copy_files(source: Path, target: Path) -> None:
    """Make the small files of `target` those of `source`."""
    names = _small_files(source)
    for name in set(_small_files(target)) - set(names):
        (target / name).unlink()
    for name in names:
        shutil.copyfile(source / name, target / name)


def _small_files(folder: Path) -> list[str]:
    """Names of the files beside the weights that belong to the model."""
    return sorted({file.name for pattern in _COPIED for file in folder.glob(pattern) if file.is_file()})


def _files_of_params(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in (folder / _RESIDENT).rglob("*") if file.is_file())


def _file_checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """CRC-32 of files, by name."""
    checksums = {}
    for name in names:
        checksum = 0
        with open(folder / name, "rb") as file:
            while chunk := file.read(_CHECK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
        checksums[name] = checksum
    return checksums


def _read(path: Path) -> _Manifest | None:
    """A manifest or journal of this format, or None."""
    content = read_json(path)
    ours = content is not None and content.get("conversion", {}).get("format") == _FORMAT
    return content if ours else None
