import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.pallas.memory_view import MemoryView
from tests.pallas.paged import get, view

# (page shape, dtype, stride in words, words of a huge page, huge pages)
LAYOUTS = [
    pytest.param((4, 6), "bfloat16", 24, 96, 5, id="divides-huge-page"),
    pytest.param((4, 6), "float32", 48, 96, 5, id="float32"),
    pytest.param((1, 10), "bfloat16", 10, 96, 5, id="straddles-huge-pages"),
    pytest.param((3, 5), "float32", 30, 72, 5, id="straddles-float32"),
    pytest.param((2, 3, 4), "float32", 64, 128, 3, id="padded"),
    pytest.param((3, 5), "bfloat16", 20, 42, 20, id="padded-straddles"),
]


def random_pool(huge_pages: int, words: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, (huge_pages, words), dtype=np.uint16)


def whole_pages(v: MemoryView, pool: np.ndarray) -> np.ndarray:
    """Pages that lie inside one huge page: the only ones an allocator hands out."""
    pages = np.arange(pool.size // v.stride)
    first, last = pages * v.stride // pool.shape[1], (pages * v.stride + v.words - 1) // pool.shape[1]
    return pages[first == last]


@pytest.mark.parametrize(("shape", "dtype", "stride", "words", "huge"), LAYOUTS)
def test_read_write_and_typed_are_the_bytes(shape, dtype, stride, words, huge):
    v = view("x", shape, dtype, stride)
    pool = random_pool(huge, words)
    ids = np.random.default_rng(1).permutation(whole_pages(v, pool))
    grid = ids[: len(ids) // 2 * 2].reshape(2, -1).astype(np.int32)
    got = np.asarray(jax.jit(v.read)(pool, grid))
    assert got.shape == (*grid.shape, *shape) and got.dtype == v.dtype
    for page, values in zip(grid.reshape(-1).tolist(), got.reshape(-1, *shape), strict=True):
        assert values.tobytes() == get(pool, v, page).tobytes()  # bits, NaN patterns included

    # Kernels also see the pages that nobody is ever given because they straddle two huge pages.
    typed = np.asarray(v.typed(jnp.asarray(pool)))
    assert len(typed) == pool.size // stride and typed.dtype == v.dtype
    for page, values in enumerate(typed):
        assert values.reshape(-1)[: np.prod(shape)].tobytes() == get(pool, v, page).tobytes()

    chosen = ids[: len(ids) // 2]
    # NaNs of both signs, quiet and signalling, among large numbers.
    content = np.random.default_rng(2).integers(0x7F00, 0x8000, (len(chosen), v.words), dtype=np.uint16)
    content[::2] |= 0x8000
    values = content.view(v.dtype).reshape(-1, *shape)
    written = np.asarray(jax.jit(v.write)(pool, chosen.astype(np.int32), values))
    expected = pool.copy()
    for page, value in zip(chosen, content, strict=True):
        expected.reshape(-1)[page * stride : page * stride + v.words] = value
    assert (written == expected).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_pages_are_pages(dtype):
    v = view("kv", (2, 3, 4, 8), dtype)
    pool = random_pool(3, v.stride * 2)
    rows = v.rows(3)
    assert rows.page_shape == (8,) and rows.stride == rows.words == v.words // 24
    row = ((4 * 2 + 1) * 3 + 2) * 4 + 3
    got = np.asarray(rows.read(jnp.asarray(pool), jnp.asarray([row], jnp.int32)))[0]
    assert got.tobytes() == get(pool, v, 4)[1, 2, 3].tobytes()


@pytest.mark.parametrize(
    ("stride", "words", "huge"),
    [
        pytest.param(128, 1 << 20, 70_000, id="row-of-a-key"),
        pytest.param(80, 2048 * 768, 45_000, id="row-that-divides-nothing"),
        pytest.param(49152, 1572864, 45_000, id="page"),
        pytest.param(3328, 786432, 90_000 // 13 * 13, id="conv-row"),
    ],
)
def test_positions_stay_exact_in_pools_beyond_two_to_the_31_words(stride, words, huge):
    v = view("x", (1, stride), "bfloat16")
    pages = huge * words // stride
    assert huge * words > 2**36
    ids = np.unique(np.linspace(0, pages - 1, 1000).astype(np.int64))
    positions = []

    def trace(pool):
        with jax.ensure_compile_time_eval():  # the pool is a shape, the ids are numbers
            positions.append(np.asarray(v._positions(pool, jnp.asarray(ids, jnp.int32))))

    jax.eval_shape(trace, jax.ShapeDtypeStruct((huge, words), jnp.uint16))
    for page, position in zip(ids.tolist(), positions[0].tolist(), strict=True):
        assert tuple(position) == divmod(page * stride, words)


def test_errors():
    with pytest.raises(ValueError, match="at least 2"):
        v = view("x", (4,), "bfloat16")
        v.write(jnp.zeros((2, 8), jnp.uint16), jnp.zeros(1, jnp.int32), jnp.zeros((1, 4), jnp.bfloat16))
    with pytest.raises(ValueError, match="more than their stride"):
        view("x", (4, 4), "float32", 16)
    with pytest.raises(ValueError, match="2 or 4 bytes"):
        view("x", (4, 4), "int8", 16)
    with pytest.raises(ValueError, match="64 words are padded to 128"):
        view("kv", (2, 1, 4, 8), "bfloat16", 128).rows(3)
