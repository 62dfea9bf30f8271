"""Compiled steps kept between runs. One that is found takes neither tracing nor compiling, which together take seconds for each.

JAX's own cache is asked with the traced program; this one with what the program follows from: the sources of this package,
the versions of JAX and of the device's software, and the shapes. Files are pickles, as JAX's serialised executables are:
the folder must be the user's own.
"""

import dataclasses
import functools
import hashlib
import inspect
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

MODELS_KEPT = 8
"""Folders, each of one model under one set of arguments, of which the longest unused go first."""

_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_debug_nans")
"""Of JAX's settings, those that change a program."""


_DATA = (bool, int, float, str, bytes, np.dtype)
"""Of such values the `repr` says all."""


class CompiledSteps:
    """The compiled programs of one model under one set of arguments, in a folder of their own under `root`.

    Args:
        root: folder of all; made when first written to.
        what: everything that the programs follow from beside sources, versions and device; its `repr` counts.
    """

    def __init__(self, root: Path, what: Any):
        self._root = root
        self._folder = root / _digest(repr(what), *_environment())

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The program of this name, or None where there is none that works."""
        path = self._folder / name
        if not path.is_file():
            return None
        try:
            compiled = serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
            os.utime(self._folder)
        except Exception as error:  # whatever a file of another writer, or half of one, may raise
            logger.warning("the compiled step %s cannot be used and is made anew: %s", path, error)
            return None
        return compiled

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Keep a program, whole or not at all; nothing where the disk refuses."""
        half: Path | None = None
        try:
            data = pickle.dumps(serialize_executable.serialize(compiled))
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                half = Path(file.name)
                file.write(data)
            half.replace(self._folder / name)
            by_use = sorted(self._root.iterdir(), key=lambda folder: -folder.stat().st_mtime)
        except (OSError, ValueError, NotImplementedError) as error:
            logger.warning("the compiled step %s is not kept: %s", name, error)
            if half is not None:
                half.unlink(missing_ok=True)
            return
        for old in by_use[MODELS_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def made_here(*what: Any) -> bool:
    """Whether all code that `what` names comes from this package, so that its sources say what it does.

    Looks into mappings, sequences and dataclasses, and asks each function, class and object where it is from.
    """
    return all(_is_made_here(part) for part in what)


def _is_made_here(what: Any) -> bool:
    if what is None or isinstance(what, _DATA):
        return True
    if isinstance(what, Mapping):
        return made_here(*what.keys(), *what.values())
    if type(what) in (tuple, list, set, frozenset):
        return made_here(*what)
    has_name = isinstance(what, type) or inspect.isroutine(what)
    module = (what if has_name else type(what)).__module__ or ""
    if module.partition(".")[0] != __name__.partition(".")[0]:
        return False
    if dataclasses.is_dataclass(what) and not has_name:
        return made_here(*(getattr(what, field.name) for field in dataclasses.fields(what)))
    return made_here(*what) if isinstance(what, tuple) else True


def _environment() -> tuple[str, ...]:
    device = jax.devices()[0]
    settings = [f"{name}={getattr(jax.config, name)}" for name in _SETTINGS]
    versions = (jax.__version__, version("jaxlib"), device.client.platform_version, device.device_kind)
    return (*versions, os.environ.get("XLA_FLAGS", ""), *settings, _sources())


@functools.cache
def _sources() -> str:
    """Digest of the package: its programs and the data that these read."""
    root = Path(__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json"))
    return _digest(*(f"{path.relative_to(root)}\0{path.read_text('utf-8')}" for path in files))


def _digest(*parts: str) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(f"{len(part)}:{part}".encode())
    return total.hexdigest()[:32]
