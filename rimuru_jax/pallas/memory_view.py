"""Memory views: how one kind of tensor lies in the page pool.

The pool is one array of 16-bit words `[huge_pages, words]`. A view cuts it into equal pages of one kind: page `i` is
the i-th run of `stride` words, counted through the whole pool. Words are integers, so that moving a page never touches
its bits (a bfloat16 move may quiet NaN payloads that are really halves of a float32).

A view has two faces. `typed` shows the whole pool as an array of pages for kernels: free on a GPU, but a copy of the
pool on a CPU. `read` and `write` move single pages, for the reference operators: a gather and a scatter of words.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from rimuru_jax.array_types import Pool

WORD_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """One kind's pages in the pool.

    `page_shape` and `dtype` describe the content of a page; `stride` is the distance between pages in words, at least
    the content and a multiple of its innermost row (a larger stride is padding, see `host.page_layout`).
    """

    kind: str
    page_shape: tuple[int, ...]
    dtype: jnp.dtype
    stride: int

    def __post_init__(self):
        if self.dtype.itemsize not in (2, 4):
            raise ValueError(
                f"{self.kind} pages of {self.dtype} are not supported: an element must have 2 or 4 bytes"
            )
        if self.stride < self.words:
            raise ValueError(
                f"{self.kind} pages hold {self.words} words, more than their stride of {self.stride}"
            )

    @property
    def words(self) -> int:
        """Words of content in one page."""
        return math.prod(self.page_shape) * self.dtype.itemsize // WORD_BYTES

    def rows(self, axes: int) -> "MemoryView":
        """The rows of these pages as pages: the leading `axes` axes of the page become part of the page number.

        Row `r` of page `i` is page `i * rows_per_page + r` of the result; needs pages without padding.
        """
        if self.stride != self.words:
            raise ValueError(
                f"{self.kind} pages of {self.words} words are padded to {self.stride}, so their rows are no equal pages"
            )
        rows = math.prod(self.page_shape[:axes])
        return MemoryView(
            kind=self.kind, page_shape=self.page_shape[axes:], dtype=self.dtype, stride=self.stride // rows
        )

    def typed(self, pool: Pool) -> Shaped[Array, "P ..."]:
        """The whole pool as `[pages, *page_shape]`, or `[pages, rows, row]` where pages are padded."""
        shape = self.page_shape
        if self.stride != self.words:
            row = shape[-1] * self.dtype.itemsize // WORD_BYTES
            shape = (self.stride // row, shape[-1])
        pages = pool.size // self.stride
        if self.dtype.itemsize == WORD_BYTES:
            return lax.bitcast_convert_type(pool.reshape(pages, *shape), self.dtype)
        return lax.bitcast_convert_type(pool.reshape(pages, *shape, 2), self.dtype)

    def untyped(self, pages: Shaped[Array, "P ..."], words: int) -> Pool:
        """The inverse of `typed`, for a pool of `words` words per huge page; free on a GPU."""
        return lax.bitcast_convert_type(pages, jnp.uint16).reshape(-1, words)

    def read(self, pool: Pool, ids: Int32[Array, "..."]) -> Shaped[Array, "..."]:
        """Pages `ids` as `[*ids.shape, *page_shape]`."""
        dims = lax.GatherDimensionNumbers(
            offset_dims=(ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
        )
        words = lax.gather(
            pool,
            self._positions(pool, ids),
            dims,
            slice_sizes=(1, self.words),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        return self.from_words(words)

    def write(self, pool: Pool, ids: Int32[Array, " n"], values: Shaped[Array, "n ..."]) -> Pool:
        """The pool with `values [n, *page_shape]` in pages `ids`; of equal ids any one may win.

        At least two pages, because XLA on a CPU copies the pool for a scatter of a single row.
        """
        if ids.shape[0] < 2:
            raise ValueError(
                f"{ids.shape[0]} page written at once, but a write needs at least 2: pad with scratch pages"
            )
        dims = lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        )
        return lax.scatter(
            pool,
            self._positions(pool, ids),
            self.to_words(values),
            dims,
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )

    def from_words(self, words: Array) -> Array:
        """`[..., words]` of 16 bits as `[..., *page_shape]`."""
        lead = words.shape[:-1]
        if self.dtype.itemsize == WORD_BYTES:
            return lax.bitcast_convert_type(words.reshape(*lead, *self.page_shape), self.dtype)
        return lax.bitcast_convert_type(words.reshape(*lead, *self.page_shape, 2), self.dtype)

    def to_words(self, values: Array) -> Array:
        """The inverse of `from_words`; values are cast to the view's dtype first."""
        lead = values.shape[: values.ndim - len(self.page_shape)]
        return lax.bitcast_convert_type(values.astype(self.dtype), jnp.uint16).reshape(*lead, self.words)

    def _positions(self, pool: Pool, ids: Int32[Array, "..."]) -> Int32[Array, "... 2"]:
        """(huge page, first word) of each page, without passing 2^31 on the way."""
        width = pool.shape[1]
        common = math.gcd(self.stride, width)
        stride, width = self.stride // common, width // common
        # Every `width` pages, now in units of `common` words, start at the first word of a huge page again.
        rounds, units = ids // width, ids % width * stride
        return jnp.stack([rounds * stride + units // width, units % width * common], axis=-1)
