"""Arrays of a device that share memory with others: host memory that kernels read in place, and rows of an array.

On a GPU the pages are page-locked where they lie, and JAX is given a view of the same addresses that says *CUDA device*:
host and device share one address space, so kernels read such memory over PCIe like any other. The view must never be
donated or written. On a CPU there is nothing to do: JAX reads the array in place.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from rimuru_jax.array_types import HostPages
from rimuru_jax.cuda_driver import OS_PAGE, cuda_driver

_COPY_BYTES = 64 * 2**20  # copied by a thread at a time
_ALIGNMENT = 128  # bytes, of arrays as XLA allocates them
_DLPACK_CUDA = 2
_DLPACK_CODES = {"uint16": 1, "int32": 0, "float32": 2, "bfloat16": 4}


def device_view(pages: np.ndarray) -> HostPages:
    """`pages`, or other weights, as an array of the default device that shares their memory; it keeps them alive.

    Pages of a file mapped read-only are locked in the file cache, so that nothing is copied; where the system refuses
    that, they are read once into memory that can be locked. Raises MemoryError when nothing can be locked.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        return jax.device_put(pages)
    driver = cuda_driver(device.local_hardware_id)
    try:
        driver.lock(pages)
    except MemoryError:
        if not isinstance(pages, np.memmap):
            raise
        pages = _copied(pages)
        driver.lock(pages)
    exporter = _Exporter(pages.ctypes.data, pages.shape, pages.dtype, device.id, keep=pages)
    return jax.dlpack.from_dlpack(exporter)


def page_locked_copy(array: np.ndarray) -> jax.Array:
    """A copy of `array` in host memory as an array of the default device, a GPU, which reads it over PCIe.

    As any `device_view` it must never be donated or written.
    """
    rows = len(array)
    copy = empty_pages(rows, array.nbytes // rows // 2).view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return device_view(copy)


def device_rows(array: jax.Array) -> list[jax.Array]:
    """The rows `array[i]` of an array on a GPU as arrays that share its memory; none may be donated or written.

    Rows too small for the alignment of arrays are copies.
    """
    size = array.nbytes // len(array)
    if size % _ALIGNMENT:
        return list(array)
    array.block_until_ready()
    (device,) = array.devices()
    first = array.unsafe_buffer_pointer()
    return [
        jax.dlpack.from_dlpack(
            _Exporter(first + i * size, array.shape[1:], array.dtype, device.id, keep=array)
        )
        for i in range(len(array))
    ]


def empty_pages(num_pages: int, words: int) -> np.ndarray:
    """Uninitialised uint16 pages in memory that starts at a whole OS page, so that it can be page-locked."""
    num_bytes = num_pages * words * 2
    memory = np.empty(num_bytes + OS_PAGE, np.uint8)
    start = -memory.ctypes.data % OS_PAGE
    return memory[start : start + num_bytes].view(np.uint16).reshape(num_pages, words)


def _copied(pages: np.ndarray) -> np.ndarray:
    """The same pages in memory of their own, read by several threads."""
    copy = empty_pages(*pages.shape)
    step = max(1, _COPY_BYTES // (pages.shape[1] * pages.itemsize))

    def read(first: int) -> None:
        copy[first : first + step] = pages[first : first + step]

    with ThreadPoolExecutor() as threads:
        list(threads.map(read, range(0, len(pages), step)))
    return copy


# The structures of DLPack (dlpack.h), which JAX takes an array of another library from.


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_exported: dict[int, Sequence[object]] = {}
"""What a view still uses, by the address of its structure: JAX calls the deleter when the view is gone."""


@_Deleter
def _release(managed: Any, exported: Any = _exported, address_of: Any = ctypes.addressof) -> None:
    # Bound early: when Python ends, names of modules are gone before the last views.
    exported.pop(address_of(managed.contents), None)


class _Exporter:
    """Memory at an address as DLPack's protocol wants it, said to be on a CUDA device; `keep` owns it."""

    def __init__(
        self, address: int, shape: Sequence[int], dtype: np.dtype, device: int, *, keep: object
    ) -> None:
        self._address, self._shape, self._dtype = address, tuple(shape), dtype
        self._device, self._keep = device, keep

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self._device

    def __dlpack__(self, **_: object) -> object:
        shape = (ctypes.c_int64 * len(self._shape))(*self._shape)
        managed = _ManagedTensor()
        managed.tensor = _Tensor(
            self._address,
            _Device(_DLPACK_CUDA, self._device),
            len(self._shape),
            _DataType(_DLPACK_CODES[self._dtype.name], 8 * self._dtype.itemsize, 1),
            shape,
            None,
            0,
        )
        managed.deleter = _release
        _exported[ctypes.addressof(managed)] = (managed, shape, self._keep)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(managed), b"dltensor", None)
