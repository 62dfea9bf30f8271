"""Reading a model: a Hugging Face folder of safetensors files, or a packed folder (`rimuru_jax.models.packed`).

Routed experts go into *host pages*, one row per matrix in (MoE layer, expert, matrix) order; everything else into a
tree of parameters. Each tensor is read once and straight to its place, so that the experts, by far the most of a
model, are never in memory twice.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from rimuru_jax.host_memory import empty_pages
from rimuru_jax.models.config import ModelConfig
from rimuru_jax.models.registry import parse_config, read_config, tensor_names
from rimuru_jax.models.weights import (
    PageSource,
    ParameterPath,
    TensorNames,
    TensorSource,
    expert_sources,
    resident_sources,
)

type Dtype = Literal["float32", "bfloat16"]
"""What weights are served in."""

type Progress = Callable[[float, str], None]
"""Called in the caller's thread with the fraction done, 0 to 1, and what is being done."""

type HostPages = npt.NDArray[np.uint16]
"""[moe_layers * experts * matrices, words]: the bits of each expert matrix, row-major, in 16-bit words."""

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
STORED_DTYPES = ("F32", "F16", "BF16")
"""Types of checkpoint tensors, in the words of safetensors, that are converted to the served one."""

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_THREADS = (
    4  # reading is bound by page faults: on a cold disk four threads are about three times as fast as one
)
_PART_BYTES = 32 * 2**20  # read by a thread at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in host memory."""

    config: ModelConfig
    raw_config: Mapping[str, Any]
    """The contents of its config.json."""
    params: dict[str, Any]
    """{"embedding": [V, d], "final_norm": [d], "head": [V, d] unless tied, "layers": [{name: array}, ...]}."""
    host_pages: HostPages
    """Row ((l * experts) + e) * matrices + j is matrix j of expert e in MoE layer l; starts at a whole OS page."""


def load_checkpoint(
    folder: Path, dtype: Dtype, progress: Progress | None = None, verify: bool = True
) -> LoadedModel:
    """Load a Hugging Face or packed `folder` with all weights in `dtype`.

    A packed folder is mapped rather than read: its `host_pages` cannot be written. `verify` compares everything in it with its checksums; safetensors files have none.

    Raises:
        ValueError: in one sentence, if the folder holds no model, an unsupported or unfinished one, or is damaged.
    """
    from rimuru_jax.models import packed  # here and not above: it builds on this module

    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but weights are served in one of {', '.join(DTYPES)}")
    folder = Path(folder)
    if packed.is_packed(folder):
        return packed.load_packed(folder, dtype, progress, verify)
    checkpoint = Checkpoint.open(folder)
    report = byte_progress(progress, checkpoint.num_bytes(dtype), f"reading {folder.name}")
    host_pages = empty_pages(*page_shape(checkpoint.config, dtype))
    params = checkpoint.read_params(dtype, report)
    checkpoint.read_pages(host_pages, 0, dtype, report)
    return LoadedModel(
        config=checkpoint.config, raw_config=checkpoint.raw_config, params=params, host_pages=host_pages
    )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, as the header of its file says."""

    file: Path
    position: int
    """Rank of its data in the file: reading in this order is reading forward."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A Hugging Face folder whose tensors are known to be those its config.json asks for."""

    folder: Path
    raw_config: Mapping[str, Any]
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    resident: Mapping[ParameterPath, TensorSource]
    pages: tuple[PageSource, ...]
    """Of every expert matrix, in page order."""

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read the headers of all files and compare names and shapes. Raises ValueError in one sentence."""
        raw = read_config(folder)
        if quantization := raw.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ValueError(
                f"{folder} holds weights quantised by {method!r} (quantization_config in config.json), which is not "
                "supported yet; give the bfloat16 version of the model"
            )
        config = parse_config(raw)
        tensors = _read_headers(folder)
        layouts = []
        for names in tensor_names(config.model_type):
            resident, pages = resident_sources(config, names), expert_sources(config, names)
            wanted = {
                n: s for source in resident.values() for n, s in zip(source.names, source.shapes, strict=True)
            }
            wanted |= {page.name: page.stored for page in pages}
            layouts.append((names, resident, tuple(pages), wanted))
        # The layout that the files are in, or come nearest to.
        names, resident, pages, wanted = min(
            layouts, key=lambda layout: len(layout[3].keys() - tensors.keys())
        )
        _compare(folder, tensors, wanted, names)
        return cls(
            folder=folder, raw_config=raw, config=config, tensors=tensors, resident=resident, pages=pages
        )

    @property
    def files(self) -> list[Path]:
        """The weights' files, in order."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def num_bytes(self, dtype: Dtype) -> int:
        """Bytes of all weights in `dtype`."""
        return self.resident_bytes(dtype) + math.prod(page_shape(self.config, dtype)) * 2

    def resident_bytes(self, dtype: Dtype) -> int:
        """Bytes of all weights but the routed experts."""
        return sum(
            math.prod(source.shape) * parameter_dtype(source, dtype).itemsize
            for source in self.resident.values()
        )

    def read_params(self, dtype: Dtype, report: Callable[[int], None]) -> dict[str, Any]:
        """The tree of resident parameters. `report` is told of bytes as they arrive."""
        pieces: dict[str, np.ndarray] = {}
        wanted = {
            name: parameter_dtype(source, dtype) for source in self.resident.values() for name in source.names
        }

        def read(file: Any, name: str) -> int:
            pieces[name] = file.get_tensor(name).astype(wanted[name], copy=False)
            return pieces[name].nbytes

        sizes = {name: math.prod(self.tensors[name].shape) * dtype.itemsize for name, dtype in wanted.items()}
        self._read([(name, name, sizes[name]) for name in wanted], read, report)
        leaves: dict[ParameterPath, np.ndarray] = {}
        for path, source in self.resident.items():
            parts = [pieces.pop(name) for name in source.names]
            leaf = parts[0] if len(parts) == 1 else np.concatenate(parts)
            leaves[path] = leaf if source.convert is None else np.ascontiguousarray(source.convert(leaf))
        return parameter_tree(self.config, leaves)

    def read_pages(
        self, out: HostPages, first_page: int, dtype: Dtype, report: Callable[[int], None]
    ) -> None:
        """Fill `out` [n, words] with pages `first_page` to `first_page + n - 1`."""

        def read(file: Any, row: int) -> int:
            page = self.pages[first_page + row]
            if page.expert is None:
                matrix = file.get_tensor(page.name)
            elif page.transposed:
                matrix = file.get_slice(page.name)[page.expert].T[page.rows]
            else:
                matrix = file.get_slice(page.name)[page.expert, page.rows]
            # In one go from the file's memory to the page, converted on the way.
            out[row].view(DTYPES[dtype]).reshape(matrix.shape)[...] = matrix
            return out[row].nbytes

        self._read(
            [(self.pages[first_page + row].name, row, out[row].nbytes) for row in range(len(out))],
            read,
            report,
        )

    def _read[Item](
        self,
        items: Iterable[tuple[str, Item, int]],
        read: Callable[[Any, Item], int],
        report: Callable[[int], None],
    ) -> None:
        """Call `read(file, item)`, which returns the bytes it has made, in several threads.

        An item is a (tensor, item, bytes); those of one file are read together up to `_PART_BYTES`.
        """
        ordered = sorted(
            items, key=lambda entry: (self.tensors[entry[0]].file, self.tensors[entry[0]].position)
        )
        parts: list[list[tuple[str, Item]]] = []
        size = 0
        for name, item, num_bytes in ordered:
            tensor = self.tensors[name]
            if not parts or size >= _PART_BYTES or tensor.file != self.tensors[parts[-1][0][0]].file:
                parts.append([])
                size = 0
            parts[-1].append((name, item))
            size += num_bytes

        def read_part(part: list[tuple[str, Item]]) -> int:
            with _open(self.tensors[part[0][0]].file) as file:
                return sum(read(file, item) for _, item in part)

        in_threads(read_part, parts, report)


def parameter_dtype(source: TensorSource, dtype: Dtype) -> np.dtype:
    """What a resident parameter is kept in when the model is served in `dtype`."""
    return DTYPES["float32" if source.float32 else dtype]


def page_shape(config: ModelConfig, dtype: Dtype) -> tuple[int, int]:
    """Shape of the host pages: (moe_layers * experts * matrices, 16-bit words of one matrix)."""
    moe = config.moe
    words = moe.intermediate_size * config.hidden_size * DTYPES[dtype].itemsize // 2
    return len(config.moe_layers) * moe.num_experts * moe.matrices, words


def parameter_tree[Leaf](config: ModelConfig, leaves: Mapping[ParameterPath, Leaf]) -> dict[str, Any]:
    """`leaves` as nested dictionaries, with a list of layers."""
    tree: dict[str, Any] = {"layers": [{} for _ in config.layers]}
    for path, leaf in leaves.items():
        match path:
            case ("layers", int(layer), str(name)):
                tree["layers"][layer][name] = leaf
            case (str(name),):
                tree[name] = leaf
            case _:
                raise ValueError(
                    f"{path} is no path of a parameter tree: want (name,) or ('layers', i, name)"
                )
    return tree


def byte_progress(progress: Progress | None, total: int, text: str) -> Callable[[int], None]:
    """A function that adds up bytes and passes their share of `total` on to `progress`."""
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(min(1.0, done / total), text)

    return report


def in_threads[T, R](
    work: Callable[[T], R], items: Sequence[T], done: Callable[[R], None], threads: int | None = _THREADS
) -> None:
    """Run `work` on every item in a few threads and pass each result to `done` in this one, in order of arrival.

    The first error, an interrupt too, cancels what has not begun and is raised.
    """
    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in as_completed([pool.submit(work, item) for item in items]):
                done(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files."""
    if (single := folder / _SINGLE_FILE).is_file():
        return _read_header(single)
    index = folder / _INDEX
    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {_SINGLE_FILE} nor {_INDEX}; give a folder with weights as safetensors"
        )
    try:
        listed: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        files = {name: folder / name for name in sorted(set(listed.values()))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} holds no weight_map that can be read ({error}); download it again"
        ) from error
    if absent := [name for name, file in files.items() if not file.is_file()]:
        raise ValueError(
            f"{folder} lacks {len(absent)} of the {len(files)} files that {_INDEX} names ({_first(absent)}); "
            "download them"
        )
    headers = {name: _read_header(file) for name, file in files.items()}
    if absent := [f"{tensor} in {name}" for tensor, name in listed.items() if tensor not in headers[name]]:
        raise ValueError(
            f"{index} names {_count(absent, 'tensor')} that the files do not hold ({_first(absent)}); "
            "download index and files of one version"
        )
    found = {tensor: stored for header in headers.values() for tensor, stored in header.items()}
    return found | {tensor: headers[name][tensor] for tensor, name in listed.items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    with _open(path) as file:
        for position, name in enumerate(file.offset_keys()):
            piece = file.get_slice(name)
            tensors[name] = StoredTensor(path, position, piece.get_dtype(), tuple(piece.get_shape()))
    return tensors


def _open(path: Path) -> Any:
    """The safetensors file as a context manager."""
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); download it again") from error


def _compare(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    names: TensorNames,
) -> None:
    """Raise ValueError, in one sentence, unless the files hold tensors of the `shapes` the configuration asks for."""
    present = {name: tensors[name] for name in shapes if name in tensors}
    missing = [name for name in shapes if name not in tensors]
    misshaped = [
        f"{name}: got {list(tensor.shape)}, wanted {list(shapes[name])}"
        for name, tensor in present.items()
        if tensor.shape != shapes[name]
    ]
    # Files of models with tied embeddings may repeat them as the head.
    extra = [n for n in tensors if n not in shapes and n != names.head and not names.ignored(n)]
    problems = [
        f"{_count(found, 'tensor')} {what} ({_first(found)})"
        for found, what in (
            (missing, "missing"),
            (misshaped, "of another shape"),
            (extra, "that this architecture does not have"),
        )
        if found
    ]
    if problems:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: {', '.join(problems)}; "
            "download weights and config of one version"
        )
    if foreign := [f"{n}: {t.dtype}" for n, t in present.items() if t.dtype not in STORED_DTYPES]:
        raise ValueError(
            f"{folder} stores {_count(foreign, 'tensor')} in a type that is not supported yet ({_first(foreign)}); "
            f"give a version of the model in one of {', '.join(STORED_DTYPES)}"
        )


def _count(items: Sequence[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _first(items: Sequence[str]) -> str:
    return ", ".join(items[:3]) + (", ..." if len(items) > 3 else "")
