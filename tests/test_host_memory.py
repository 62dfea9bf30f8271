"""Host pages as arrays of the device: the same memory, right to the bit, and given back."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax import host_memory
from rimuru_jax.cuda_driver import OS_PAGE
from rimuru_jax.host_memory import device_rows, device_view, empty_pages, page_locked_copy

on_gpu = pytest.mark.gpu


def random_pages(num_pages: int = 24, words: int = 4096) -> np.ndarray:
    pages = empty_pages(num_pages, words)
    pages[:] = np.random.default_rng(0).integers(0, 1 << 16, pages.shape)
    return pages


def test_pages_start_at_an_os_page():
    for words in (1, 7, 4096):
        pages = empty_pages(5, words)
        assert pages.shape == (5, words) and pages.dtype == np.uint16
        assert pages.ctypes.data % OS_PAGE == 0 and pages.flags.c_contiguous


def test_a_copy_is_equal():
    pages = random_pages(num_pages=33)
    copy = host_memory._copied(pages)
    assert copy.ctypes.data % OS_PAGE == 0 and copy.ctypes.data != pages.ctypes.data
    np.testing.assert_array_equal(copy, pages)


def test_a_view_has_every_bit_and_outlives_the_caller():
    pages = random_pages()
    view, want = device_view(pages), pages.copy()
    del pages
    gc.collect()
    np.testing.assert_array_equal(view, want)
    gathered = jax.jit(lambda x, i: x[i])(view, jnp.array([7, 0, 23]))
    np.testing.assert_array_equal(gathered, want[[7, 0, 23]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_rows_of_a_page_locked_copy(dtype):
    table = np.random.default_rng(1).standard_normal((300, 96)).astype(dtype)
    copy = page_locked_copy(table)
    assert copy.dtype == dtype
    rows = jax.jit(lambda table, ids: 2 * table[ids])(copy, jnp.array([299, 0, 7, 7]))
    np.testing.assert_array_equal(rows, 2 * table[[299, 0, 7, 7]])


@on_gpu
def test_the_view_is_the_memory_itself():
    pages = random_pages()
    view = device_view(pages)
    assert view.unsafe_buffer_pointer() == pages.ctypes.data
    assert device_view(pages).unsafe_buffer_pointer() == pages.ctypes.data, "two engines may share a store"


@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_rows_share_the_memory_of_their_array(dtype):
    whole = jnp.arange(5 * 64 * 128).reshape(5, 64, 128).astype(dtype)
    rows = device_rows(whole)
    first = whole.unsafe_buffer_pointer()
    assert [row.unsafe_buffer_pointer() - first for row in rows] == [i * whole.nbytes // 5 for i in range(5)]
    want = np.asarray(whole)
    del whole
    gc.collect()
    for row, wanted in zip(rows, want, strict=True):
        np.testing.assert_array_equal(jax.jit(lambda x: x * 1)(row), wanted)


def test_small_rows_are_copies():
    np.testing.assert_array_equal(
        np.stack(device_rows(jnp.arange(15.0).reshape(5, 3))), np.arange(15).reshape(5, 3)
    )


@on_gpu
@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_mapped_file_is_read_in_place_or_copied_once(mode, tmp_path):
    want = random_pages(num_pages=64)
    want.tofile(tmp_path / "pages")
    view = device_view(np.memmap(tmp_path / "pages", np.uint16, mode, shape=want.shape))
    np.testing.assert_array_equal(jax.jit(lambda x: x + jnp.uint16(0))(view), want)


@on_gpu
def test_memory_is_unlocked_with_the_last_view():
    from rimuru_jax.cuda_driver import cuda_driver

    locked = cuda_driver(jax.devices()[0].local_hardware_id)._locked
    before = dict(locked)
    view = device_view(random_pages())
    assert len(locked) == len(before) + 1
    del view
    gc.collect()
    assert locked == before
