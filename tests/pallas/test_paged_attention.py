"""Paged attention against dense float64 attention over keys and values reassembled from shuffled pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.pallas.paged_attention import paged_attention
from tests.pallas.paged import poisoned_pool, put, view

_attend = jax.jit(
    functools.partial(paged_attention, scale=0.3),
    static_argnames=("view", "max_query_len", "sliding_window"),
)

# (tokens in the cache before, new tokens) of each row
RAGGED = {
    "prefill": [(0, 37)],
    "prefill of one token": [(0, 1)],
    "two prefills": [(0, 5), (0, 33)],
    "chunks over a context": [(15, 17), (64, 64), (3, 1)],
    "decodes": [(0, 1), (2, 1), (15, 1), (16, 1), (17, 1), (129, 1), (512, 1)],
    "mixed": [(130, 1), (0, 40), (7, 1), (100, 9)],
    "around a tile": [(0, 31), (0, 32), (1, 33), (40, 64), (0, 65)],
    "long": [(500, 13), (0, 130)],
    "empty rows between and after": [(5, 3), (0, 0), (9, 1), (0, 0), (0, 0)],
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of outputs rounded to that type


class Case:
    """Random queries, keys and values; whatever lies past a context is NaN."""

    def __init__(self, rows, *, heads=4, kv_heads=2, dim=16, page_tokens=4, dtype="float32", seed=0):
        rng = np.random.default_rng(seed)
        self.rows, self.group, self.dim = rows, heads // kv_heads, dim
        self.view = view("kv", (2, kv_heads, page_tokens, dim), dtype)
        lengths = [before + new for before, new in rows]
        pages_of = [-(-length // page_tokens) for length in lengths]
        width = max(pages_of) + 3
        total = sum(pages_of) + 5
        self.pool = poisoned_pool(total, self.view.stride)
        free = iter(rng.permutation(np.arange(1, total)).tolist())
        # Past a row's pages its table names pages of others, or of nobody.
        self.table = rng.integers(0, total, (len(rows), width), dtype=np.int32)
        self.kv = []
        for row, (length, count) in enumerate(zip(lengths, pages_of, strict=True)):
            kv = rng.normal(size=(2, kv_heads, length, dim)).astype(self.view.dtype)
            self.kv.append(kv.astype(np.float64))
            for index in range(count):
                page = next(free)
                self.table[row, index] = page
                content = np.full(self.view.page_shape, np.nan, self.view.dtype)
                part = kv[:, :, index * page_tokens : (index + 1) * page_tokens]
                content[:, :, : part.shape[2]] = part
                put(self.pool, self.view, page, content)
        self.start = np.cumsum([0, *(new for _, new in rows)]).astype(np.int32)
        self.context = np.asarray(lengths, np.int32)
        self.queries = rng.normal(size=(self.start[-1], heads, dim)).astype(self.view.dtype)

    def run(self, padding: int = 0, **options) -> np.ndarray:
        queries = np.pad(self.queries, ((0, padding), (0, 0), (0, 0)))
        longest = max(new for _, new in self.rows)
        out = _attend(
            queries,
            self.pool,
            self.view,
            self.table,
            self.start,
            self.context,
            max_query_len=longest,
            **options,
        )
        assert np.isfinite(np.asarray(out, np.float32)).all()
        return np.asarray(out, np.float64)[: self.start[-1]]

    def dense(self, window: int | None = None, sinks: np.ndarray | None = None) -> np.ndarray:
        out = np.zeros(self.queries.shape)
        for row, (before, new) in enumerate(self.rows):
            keys, values = self.kv[row]
            for i in range(new):
                position = before + i
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(self.queries.shape[1]):
                    q = self.queries[self.start[row] + i, head].astype(np.float64)
                    scores = keys[head // self.group, first : position + 1] @ q * 0.3
                    extra = [] if sinks is None else [sinks[head]]
                    e = np.exp(np.array([*scores, *extra]) - max([*scores, *extra]))
                    share = (e / e.sum())[: len(scores)]
                    out[self.start[row] + i, head] = share @ values[head // self.group, first : position + 1]
        return out


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in RAGGED), ("mixed", "bfloat16"), ("decodes", "bfloat16")],
)
def test_ragged(name, dtype):
    case = Case(RAGGED[name], dtype=dtype)
    # A step of decodes is as long as its rows; one with prefills is padded to a bucket.
    padding = 11 if max(new for _, new in case.rows) > 1 else 0
    np.testing.assert_allclose(case.run(padding), case.dense(), rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_tokens"),
    [(4, 4, 16, 1), (9, 3, 64, 16), (8, 2, 24, 4), (8, 1, 12, 16), (4, 2, 16, 256)],
)
def test_shapes(heads, kv_heads, dim, page_tokens):
    case = Case(RAGGED["mixed"], heads=heads, kv_heads=kv_heads, dim=dim, page_tokens=page_tokens)
    np.testing.assert_allclose(case.run(), case.dense(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_lengths_around_a_page(page_tokens):
    lengths = sorted({1, 3, page_tokens - 1, page_tokens, page_tokens + 1, 130} - {0})
    for rows in ([(length - 1, 1) for length in lengths], [(0, length) for length in lengths]):
        case = Case(rows, page_tokens=page_tokens)
        np.testing.assert_allclose(case.run(), case.dense(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [1, 5, 16, 200])
@pytest.mark.parametrize("rows", ["mixed", "decodes"])
def test_sliding_window(window, rows):
    case = Case(RAGGED[rows])
    np.testing.assert_allclose(case.run(sliding_window=window), case.dense(window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_sinks(window):
    case = Case(RAGGED["mixed"])
    sinks = np.array([-2.0, 0.0, 1.5, 4.0], np.float32)
    got = case.run(sinks=jnp.asarray(sinks), sliding_window=window)
    np.testing.assert_allclose(got, case.dense(window, sinks), rtol=0, atol=1e-5)


def test_decoding_a_position_equals_prefilling_it():
    prefill = Case([(0, 70)], seed=4)
    whole = prefill.run()
    for position in (0, 3, 4, 31, 32, 69):
        decode = Case([(0, 70)], seed=4)
        decode.rows = [(position, 1)]
        decode.queries = prefill.queries[position : position + 1]
        decode.start, decode.context = np.array([0, 1], np.int32), np.array([position + 1], np.int32)
        np.testing.assert_allclose(decode.run()[0], whole[position], rtol=0, atol=1e-6)


def test_errors():
    case = Case([(0, 3)])
    with pytest.raises(ValueError, match="sliding_window is 0"):
        case.run(sliding_window=0)
    case.queries = case.queries[..., :8]
    with pytest.raises(ValueError, match="do not fit KV pages"):
        case.run()
    three = Case([(0, 3)])
    three.queries = three.queries[:, :3]
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        three.run()
