"""Files that stay whole when a program is killed or a disk fills up."""

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` in one step, `content` followed by a checksum that `read_json` checks."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({**content, "crc32": zlib.crc32(canonical_json(content))}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote, or None if it is not there, or was changed since."""
    try:
        content = json.loads(path.read_bytes())
        crc = content.pop("crc32")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return content if crc == zlib.crc32(canonical_json(content)) else None


def canonical_json(content: Any) -> bytes:
    """The same bytes for equal contents."""
    return json.dumps(content, sort_keys=True).encode()


def sync_folder(folder: Path) -> None:
    """Make what was renamed or removed in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep `folder` for this process, to its end at the latest. Raises ValueError if another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to {folder}; wait for it or give another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` says so, in its errno or, as orbax's storage library does, in its text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return os.strerror(errno.ENOSPC) in str(error)
