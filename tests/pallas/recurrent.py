"""Ragged rows with states in shuffled pages, for tests of the operators that keep a state per sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rimuru_jax.pallas.memory_view import MemoryView
from tests.pallas.paged import NAN_WORD, get, poisoned_pool, put

TOKENS, ROWS = 256, 8  # every case is padded to these, so that all of them share one compilation

# Code generation is what takes long when these operators compile; what XLA plans stays the same.
QUICK = {"xla_backend_optimization_level": 0}

# (has a state, tokens) of each row
RAGGED = {
    "prefill": [(False, 37)],
    "prefill of one token": [(False, 1)],
    "prefills around a chunk": [(False, 63), (False, 64), (False, 65), (False, 2)],
    "chunks over a state": [(True, 65), (True, 2), (True, 64), (True, 63), (True, 3)],
    "three chunks": [(True, 192), (False, 64)],
    "decodes": [(True, 1), (False, 1), (True, 1), (True, 1), (True, 1)],
    "mixed": [(True, 1), (False, 70), (True, 1), (True, 130), (False, 1), (False, 5)],
    "empty rows between": [(True, 0), (True, 5), (False, 0), (False, 9), (True, 0), (True, 1), (True, 0)],
}
DECODES = [(True, 1), (False, 1), (True, 0), (True, 1), (False, 0), (True, 1)]

# Sums in float32 differ by their order; rounding to bfloat16 moves a value by at most 2^-9 of itself, and the
# difference before it may push it over to the next.
RELATIVE = {"float32": 1e-5, "bfloat16": 2.0**-8}


def close(got: np.ndarray, expected: np.ndarray, dtype: np.dtype, what: str = "") -> None:
    """Assert equality up to what computing in float32 and rounding to `dtype` may change."""
    np.testing.assert_allclose(got, expected, rtol=RELATIVE[dtype.name], atol=1e-5, err_msg=what)


class Rows:
    """Rows of (has a state, tokens) and a pool that is NaN wherever no row has a state.

    `run` consecutive pages make one state; unit 0 is scratch. `states[row]` is what the row starts from, float64.
    """

    def __init__(self, rows: list[tuple[bool, int]], view: MemoryView, run: int = 1, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.rows, self.view, self.run = rows, view, run
        units = 2 * ROWS + 1
        self.pool = poisoned_pool(units, view.stride * run)
        self.units = (rng.permutation(units - 1) + 1)[: len(rows)]
        self.pages = np.zeros(ROWS, np.int32)
        self.pages[: len(rows)] = self.units * run
        self.has_state = np.zeros(ROWS, bool)
        self.has_state[: len(rows)] = [state for state, _ in rows]
        self.start = np.zeros(ROWS + 1, np.int32)
        self.start[1:] = np.cumsum(self.lengths)
        self.states = []
        for row, (has_state, _) in enumerate(rows):
            state = rng.normal(size=(run, *view.page_shape)).astype(view.dtype)
            if has_state:
                for index in range(run):
                    put(self.pool, view, self.pages[row] + index, state[index])
            self.states.append(state.astype(np.float64) if has_state else np.zeros(state.shape))

    @property
    def lengths(self) -> list[int]:
        return [length for _, length in self.rows] + [0] * (ROWS - len(self.rows))

    def tokens(self, row: int) -> slice:
        return slice(self.start[row], self.start[row + 1])

    def normal(self, *shape: int, dtype="float32", seed: int = 1) -> np.ndarray:
        """Random numbers for every token; NaN for padding, which nothing may read."""
        values = np.random.default_rng(seed).normal(size=(TOKENS, *shape))
        values[self.start[-1] :] = np.nan
        return values.astype(jnp.dtype(dtype))

    @property
    def metadata(self) -> tuple[np.ndarray, ...]:
        return self.pages, self.start, self.has_state

    def only(self, row: int) -> tuple[np.ndarray, ...]:
        """The metadata of a call of one row, whose tokens come first."""
        pages, start, has_state = np.zeros(ROWS, np.int32), np.zeros(ROWS + 1, np.int32), np.zeros(ROWS, bool)
        pages[0], has_state[0], start[1:] = self.pages[row], self.has_state[row], self.lengths[row]
        return pages, start, has_state

    def state_in(self, pool: np.ndarray, row: int) -> np.ndarray:
        pages = [get(pool, self.view, self.pages[row] + index) for index in range(self.run)]
        return np.stack(pages).astype(np.float64)

    def state_on_device(self, pool: jax.Array, row: int) -> np.ndarray:
        """As `state_in`, of a pool too large to be copied."""
        pages = jnp.asarray(self.pages[row] + np.arange(self.run, dtype=np.int32))
        # Compiled as one, lest the whole pool be widened before the pages are picked.
        return np.asarray(jax.jit(self.view.read)(pool, pages), np.float64)

    def check(self, out, pool, expected: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Outputs and states as the oracle has them (one pair a row), and no other page touched."""
        assert np.isfinite(np.asarray(out, np.float32)).all(), "padding too"
        pool = np.asarray(pool)
        touched = {0}
        for row, (outputs, state) in enumerate(expected):
            close(np.asarray(out, np.float64)[self.tokens(row)], outputs, out.dtype, f"outputs of row {row}")
            if self.lengths[row]:
                touched.add(self.units[row])
                close(self.state_in(pool, row), state, self.view.dtype, f"state of row {row}")
        self._check_others(pool, touched)

    def check_norms(self, out, pool, expected: list[tuple[np.ndarray, np.ndarray]], tolerance: float) -> None:
        """As `check`, but errors count as norms relative to what is expected: at most `tolerance`."""
        out, pool = np.asarray(out, np.float64), np.asarray(pool)
        assert np.isfinite(out).all(), "padding too"
        touched = {0}
        for row, (outputs, state) in enumerate(expected):
            if self.lengths[row]:
                touched.add(self.units[row])
                assert norm_error(out[self.tokens(row)], outputs) <= tolerance, f"outputs of row {row}"
                assert norm_error(self.state_in(pool, row), state) <= tolerance, f"state of row {row}"
        self._check_others(pool, touched)

    def _check_others(self, pool: np.ndarray, touched: set[int]) -> None:
        others = [unit for unit in range(len(pool)) if unit not in touched]
        assert (pool[others] == self.pool[others]).all(), "a page of another row changed"


def norm_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def move_beyond_2_to_the_31(given: Rows) -> jax.Array:
    """A pool on the device that has the pages of `given`, which are renumbered, behind its first 2^31 elements of 4 bytes."""
    units, words = given.pool.shape
    beyond = 2**32 // words + 5
    pool = jnp.full((beyond + units, words), NAN_WORD, jnp.uint16)
    given.pages = np.where(given.pages, given.pages + beyond * given.run, 0).astype(np.int32)
    return jax.jit(lambda pool, pages: pool.at[beyond:].set(pages), donate_argnums=0)(pool, given.pool)


def stays_in_place(operator, view: MemoryView, rows: int, run: int = 1) -> None:
    """Assert that three layers of `operator(pool, pages) -> (out, pool)` in a scan keep a donated pool in place."""
    pool = jax.ShapeDtypeStruct((2048, view.stride * run), jnp.uint16)
    pages = jax.ShapeDtypeStruct((3, rows), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=QUICK)
    def layers(pool, pages):
        def layer(pool, pages):
            out, pool = operator(pool, pages)
            return pool, out

        return jax.lax.scan(layer, pool, pages)

    compiled = layers.lower(pool, pages).compile()
    shape = f"u16[{pool.shape[0]},{pool.shape[1]}]"
    text = compiled.as_text() or ""
    assert shape in text
    copies = [line for line in text.splitlines() if f"= {shape}" in line and " copy" in line]
    assert not copies, copies
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = 2 * pool.size
    assert memory.alias_size_in_bytes >= pool_bytes, "the pool that comes back is not the one that was given"
    assert memory.temp_size_in_bytes < 0.1 * pool_bytes


def cut(given: Rows, tokens, lengths: list[int], run, expected: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Run the only row in calls of `lengths` tokens, each over the state the last one left; compare with one call's."""
    pages, start, has_state = given.metadata
    pool, outputs, done = given.pool, [], 0
    for length in lengths:
        rolled = [np.roll(x, -done, axis=0) for x in tokens]
        out, pool = run(*rolled, pool, given.view, pages, np.minimum(start, length), has_state | (done > 0))
        outputs.append(np.asarray(out[:length]))
        done += length
    assert done == start[-1]
    close(np.concatenate(outputs), expected[0][0], outputs[0].dtype)
    close(given.state_in(np.asarray(pool), 0), expected[0][1], given.view.dtype)
