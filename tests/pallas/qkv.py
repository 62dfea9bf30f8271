"""Projections of queries, keys and values of a few rows, and what must become of them, in float64."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rimuru_jax.pallas.qk_norm_rope_cache import HeadNorm, qk_norm_rope_cache
from tests.pallas.paged import view
from tests.pallas.recurrent import norm_error

EPS = 0.1  # so large that one forgotten is seen


@dataclass(frozen=True, kw_only=True)
class Case:
    """Heads, and rows of (first position, tokens); `padding` tokens follow, which say that they are of the last row."""

    heads: int
    kv_heads: int
    h: int
    rows: tuple[tuple[int, int], ...] = ((5, 1), (0, 3), (2, 1))
    padding: int = 0
    half: int = 0
    norm: Any = None
    gated: bool = False
    dtype: str = "bfloat16"
    """Of pages and queries."""
    qkv_dtype: str = "float32"
    page_tokens: int = 4
    stride: int | None = None

    @property
    def view(self):
        return view("kv", (2, self.kv_heads, self.page_tokens, self.h), self.dtype, self.stride)

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.rows)

    @functools.cached_property
    def inputs(self) -> dict[str, Any]:
        """All but the pool, of which at least `self.pages` pages are wanted."""
        rng = np.random.default_rng(0)
        tokens, lengths = self.tokens + self.padding, [length for _, length in self.rows]
        table = rng.permutation(self.pages - 1)[: len(self.rows) * self.width] + 1
        qkv = rng.normal(size=(tokens, ((1 + self.gated) * self.heads + 2 * self.kv_heads) * self.h))
        qkv[self.tokens :] = np.nan
        angles = rng.normal(size=(tokens, self.half)) * 3
        rotation = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        weights = rng.normal(size=2 * self.h).astype(jnp.bfloat16)
        last = np.full(self.padding, len(self.rows) - 1)
        return {
            "qkv": qkv.astype(jnp.dtype(self.qkv_dtype)),
            "page_table": table.reshape(len(self.rows), self.width).astype(np.int32),
            "rows": np.append(np.repeat(np.arange(len(self.rows)), lengths), last).astype(np.int32),
            "positions": np.concatenate([*(first + np.arange(n) for first, n in self.rows), 0 * last]).astype(
                np.int32
            ),
            "query_start": np.cumsum([0, *lengths]).astype(np.int32),
            "weights": weights if self.norm else None,
            "rotation": rotation if self.half else None,
        }

    @property
    def width(self) -> int:
        """Of the page table."""
        return max(first + length for first, length in self.rows) // self.page_tokens + 2

    @property
    def pages(self) -> int:
        """Scratch, those of the table, and others."""
        return 1 + len(self.rows) * self.width * 5 // 4 + 4

    def run(self, operator: Any = qk_norm_rope_cache, **options: Any) -> Any:
        """A function of (pool, **inputs) to jit."""

        def call(pool, qkv, weights, **rest):
            norm = None if weights is None else HeadNorm(weights, EPS, self.norm)
            return operator(qkv, pool, self.view, num_heads=self.heads, head_norm=norm, **rest, **options)

        return call

    @functools.cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Queries `[T, H, h]`, keys and values `[T, 2N, h]` of the tokens that are no padding, in float64."""
        given = self.inputs
        qkv = given["qkv"][: self.tokens].astype(self.view.dtype).astype(np.float64)
        heads = qkv.reshape(self.tokens, -1, self.h)
        split = (1 + self.gated) * self.heads
        q = heads[:, : split : 1 + self.gated]
        k, v = np.split(heads[:, split:], 2, axis=1)
        if self.norm:
            offset = 1.0 if self.norm == "zero_centred" else 0.0
            q, k = (
                x
                / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
                * (weight.astype(np.float64) + offset)
                for x, weight in zip((q, k), np.split(given["weights"], 2), strict=True)
            )
        if self.half:
            cos, sin = (x[: self.tokens, None].astype(np.float64) for x in given["rotation"])
            q, k = (self._turned(x, cos + 1j * sin) for x in (q, k))
        return q, np.concatenate([k, v], axis=1)

    def _turned(self, x: np.ndarray, factor: np.ndarray) -> np.ndarray:
        turned = (x[..., : self.half] + 1j * x[..., self.half : 2 * self.half]) * factor
        return np.concatenate([turned.real, turned.imag, x[..., 2 * self.half :]], axis=-1)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """`[T, 2N]`: (page, row of the page) of each key and value."""
        given, token = self.inputs, np.arange(self.tokens)
        page_index, offset = np.divmod(given["positions"][token], self.page_tokens)
        page = given["page_table"][given["rows"][token], page_index]
        row = np.arange(2 * self.kv_heads)[None] * self.page_tokens + offset[:, None]
        return np.stack(np.broadcast_arrays(page[:, None], row), axis=-1)

    def check_values(self, queries: np.ndarray, entries: np.ndarray) -> None:
        """`queries` and `entries` as in `expected`."""
        q, kv = self.expected
        assert queries.dtype == self.view.dtype
        bound = 5e-3 if self.dtype == "bfloat16" else 1e-6
        assert norm_error(queries[: self.tokens].astype(np.float64), q) <= bound
        keys, values = np.split(entries, 2, axis=1)
        assert norm_error(keys.astype(np.float64), kv[:, : self.kv_heads]) <= bound
        np.testing.assert_array_equal(values.astype(np.float64), kv[:, self.kv_heads :])

    def check(self, queries: Any, pool: Any, before: np.ndarray) -> None:
        """Those values, and every other word of the pool but scratch as it was `before`."""
        size = self.h * self.view.dtype.itemsize // 2
        words = np.array(pool).reshape(-1, self.view.stride)
        page, row = self.places[..., 0, None], self.places[..., 1, None] * size + np.arange(size)
        self.check_values(np.asarray(queries), words[page, row].view(self.view.dtype))
        words[page, row] = before.reshape(words.shape)[page, row]
        np.testing.assert_array_equal(words[1:], before.reshape(words.shape)[1:])


def run_once(
    case: Case, pool: np.ndarray, operator: Any = qk_norm_rope_cache, **options: Any
) -> tuple[jax.Array, jax.Array]:
    return jax.jit(case.run(operator, **options))(pool, **case.inputs)


def same_bits(x: jax.Array, y: jax.Array) -> None:
    np.testing.assert_array_equal(np.asarray(x).view(np.uint16), np.asarray(y).view(np.uint16))
