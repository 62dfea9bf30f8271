"""The few functions of the CUDA driver that JAX does not offer: page-locking, and how large a card is."""

import ctypes
import functools
import threading
import weakref
from typing import Any

import numpy as np

OS_PAGE = 4096
"""Bytes; page-locked memory begins at a multiple."""

_DEVICE_MAP, _READ_ONLY = 2, 8  # flags of cuMemHostRegister


class Driver:
    """The part of the CUDA driver that locks memory, in the context that JAX uses on one device."""

    def __init__(self, ordinal: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuInit", 0)
        self._check("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._ordinal = device
        self._locked: dict[int, int] = {}  # bytes by address
        self._mutex = threading.RLock()  # a collected array is unlocked wherever its thread is

    def total_memory(self) -> int:
        """Bytes of the device's memory, whoever uses them."""
        total = ctypes.c_size_t()
        self._check("cuDeviceTotalMem_v2", ctypes.byref(total), self._ordinal)
        return total.value

    def lock(self, pages: np.ndarray) -> None:
        """Page-lock the memory of `pages` until the array is gone; nothing where that was done before."""
        address, size = pages.ctypes.data, pages.nbytes
        with self._mutex:
            if self._locked.get(address, 0) >= size:
                return
            flags = _DEVICE_MAP | (0 if pages.flags.writeable else _READ_ONLY)
            whole = ctypes.c_size_t(-(-size // OS_PAGE) * OS_PAGE)
            seen = ctypes.c_uint64()
            with self:
                status = self._call(
                    "cuMemHostRegister_v2", ctypes.c_void_p(address), whole, ctypes.c_uint(flags)
                )
                if status == 0:
                    self._check(
                        "cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(address), 0
                    )
            if status != 0:
                raise MemoryError(
                    f"{size} bytes of host memory for weights cannot be page-locked (cuMemHostRegister gave "
                    f"{self._name(status)}): free host memory, or raise its limit (ulimit -l)"
                )
            if seen.value != address:
                raise MemoryError(
                    f"page-locked memory at {address:#x} is seen by the GPU at {seen.value:#x}, but one address is wanted: "
                    "this system does not share addresses between host and GPU"
                )
            self._locked[address] = size
        weakref.finalize(pages, self._unlock, address).atexit = False

    def _unlock(self, address: int) -> None:
        with self._mutex, self:
            del self._locked[address]
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def __enter__(self) -> None:
        self._check("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *_: object) -> None:
        self._check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: Any) -> int:
        return getattr(self._cuda, function)(*arguments)

    def _check(self, function: str, *arguments: Any) -> None:
        if status := self._call(function, *arguments):
            raise MemoryError(f"the CUDA driver's {function} failed with {self._name(status)}")

    def _name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._call("cuGetErrorName", ctypes.c_int(status), ctypes.byref(name))
        return name.value.decode() if name.value else f"error {status}"


cuda_driver = functools.cache(Driver)
"""The driver, for a device by its number."""
