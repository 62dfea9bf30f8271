"""What the operators with a state per sequence share: walking ragged rows, and decays inside a chunk.

Metadata of every such operator, for S rows over T packed tokens:

    query_start int32 [S + 1]  row s owns tokens query_start[s]:query_start[s + 1]; equal entries make an empty row,
                               and tokens past the last entry are padding
    has_state   bool  [S]      False: the row starts from zeros, whatever its page holds
    pages       int32 [S]      page of the row's state (the first, where a state is a run of pages); 0 is scratch
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.memory_view import MemoryView

CHUNK = 64  # tokens of a prefill chunk
DECODE_ROWS = 8  # rows of one decode turn, which bounds the states held outside the pool


def write_pages(
    pool: Pool, view: MemoryView, pages: Int32[Array, " n"], values: Shaped[Array, "n ..."]
) -> Pool:
    """`view.write` for any n >= 1: a single page is written together with scratch."""
    if pages.shape[0] == 1:
        pages = jnp.pad(pages, (0, 1))
        values = jnp.concatenate([values, values])
    return view.write(pool, pages, values)


class Chunks(NamedTuple):
    """Rows of more than one token, cut into N chunks of CHUNK tokens; the last of a row is filled with no tokens."""

    first: Int32[Array, " S"]
    """First chunk of each row."""
    number: Int32[Array, " S"]
    """Chunks of each row, 0 for rows of at most one token."""
    token: Int32[Array, "N 64"]
    """Token at each place of a chunk; T where there is none."""
    place: Int32[Array, " T"]
    """chunk * CHUNK + place in the chunk of each token; N * CHUNK where it has none."""

    @classmethod
    def cut(cls, query_start: Int32[Array, " bounds"], tokens: int) -> "Chunks":
        rows = query_start.shape[0] - 1
        # Rounding up adds at most CHUNK - 1 places a row, and a row here has at least two tokens.
        most = max(1, (tokens + (CHUNK - 1) * min(rows, tokens // 2)) // CHUNK)
        start, query_len = query_start[:-1], query_start[1:] - query_start[:-1]
        number = jnp.where(query_len > 1, (query_len + (CHUNK - 1)) // CHUNK, 0)
        row = jnp.arange(rows, dtype=jnp.int32)
        first = jnp.sum(jnp.where(row[None, :] < row[:, None], number[None, :], 0), axis=1)

        token = jnp.arange(tokens, dtype=jnp.int32)
        its_row = jnp.sum((query_start[None, 1:] <= token[:, None]).astype(jnp.int32), axis=1)
        its_row, in_a_row = jnp.minimum(its_row, rows - 1), its_row < rows
        place = first[its_row] * CHUNK + token - start[its_row]
        place = jnp.where(in_a_row & (number[its_row] > 0), place, most * CHUNK)
        at = jnp.full(most * CHUNK, tokens, jnp.int32).at[place].set(token, mode="drop")
        return cls(first, number, at.reshape(most, CHUNK), place)

    def take(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "N 64 ..."]:
        """What belongs to the tokens of each chunk; zeros where there is none."""
        return x.at[self.token].get(mode="fill", fill_value=0)

    def put(self, outputs: Shaped[Array, "N H 64 d"]) -> Shaped[Array, "T H d"]:
        """The outputs of each token; zeros for tokens of no chunk."""
        chunk, place = self.place // CHUNK, self.place % CHUNK
        return outputs.at[chunk, :, place].get(mode="fill", fill_value=0)


def update_in_place[T](
    pool: Pool, view: MemoryView, row: tuple[int, ...], kernels: Callable[[Any], T]
) -> tuple[T, Pool]:
    """Call `kernels` with a Ref of the pool, seen as pages `[P, rows, *row]`; returns its result and the pool it left.

    On a GPU the pool of a donating jit stays where it is.
    """
    pages = view.typed(pool)
    ref = jax.new_ref(pages.reshape(pages.shape[0], -1, *row))
    result = kernels(ref)
    return result, view.untyped(jax.freeze(ref), pool.shape[1])


def scan_rows(
    step: Callable[..., tuple[Array, Array]],
    chunk: Callable[..., tuple[Array, Array]],
    inputs: tuple[Shaped[Array, "T ..."], ...],
    output: jax.ShapeDtypeStruct,
    pool: Pool,
    view: MemoryView,
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    max_query_len: int,
) -> tuple[Shaped[Array, "T ..."], Pool]:
    """Run a recurrence over every row, from and into the state in its page.

    A state is read once and written once, in the view's dtype; between the two it is float32. A row of one token always
    takes `step`, whatever it shares the call with, and a longer row takes `chunk`. Work follows the real lengths.

    Args:
        step: (states `[n, *page_shape]`, one token of each input `[n, ...]`) -> (states, outputs `[n, ...]`).
        chunk: (state `page_shape`, consecutive tokens of each input `[c, ...]`) -> (state, outputs `[c, ...]`).
            All-zero tokens fill the last chunk of a row, and must not change the state.
        inputs: the arguments of `step` and `chunk` behind the state, in whatever dtype they came.
        output: shape `[T, ...]` and dtype of the outputs; tokens of no row give zeros.
        max_query_len: 1 when every row has at most one token, else any larger number.
    """
    tokens = output.shape[0]
    size = min(CHUNK, tokens)
    turn = max(2, min(DECODE_ROWS, pages.shape[0]))
    query_len = query_start[1:] - query_start[:-1]

    def take(ids: Int32[Array, " n"]) -> list[Array]:
        return [x.at[ids].get(mode="fill", fill_value=0) for x in inputs]

    def put(outputs: Array, ids: Int32[Array, " n"], values: Array) -> Array:
        return outputs.at[ids].set(values.astype(outputs.dtype), mode="drop")

    def prefill(i, carry):
        outputs, pool = carry
        row = long_rows[i]
        state = jnp.where(has_state[row], view.read(pool, pages[row]).astype(jnp.float32), 0.0)

        def advance(j, carry):
            state, outputs = carry
            ids = query_start[row] + j * size + jnp.arange(size, dtype=jnp.int32)
            ids = jnp.where(
                ids < query_start[row + 1], ids, tokens
            )  # past the row: read zeros, write nothing
            state, values = chunk(state, *take(ids))
            return state, put(outputs, ids, values)

        chunks = (query_len[row] + (size - 1)) // size
        state, outputs = lax.fori_loop(jnp.int32(0), chunks, advance, (state, outputs))
        return outputs, write_pages(pool, view, pages[row][None], state[None])

    def decode(i, carry):
        outputs, pool = carry
        rows = lax.dynamic_slice(single_rows, (i * turn,), (turn,))
        exists = rows < pages.shape[0]
        row_pages = jnp.where(exists, pages[rows], 0)
        carried = (exists & has_state[rows]).reshape(turn, *(1 for _ in view.page_shape))
        states = jnp.where(carried, view.read(pool, row_pages).astype(jnp.float32), 0.0)
        ids = jnp.where(exists, query_start[rows], tokens)
        states, values = step(states, *take(ids))
        return put(outputs, ids, values), write_pages(pool, view, row_pages, states)

    carry = jnp.zeros(output.shape, output.dtype), pool
    with jax.default_matmul_precision("highest"):
        if max_query_len > 1:
            long_rows, count = _rows_where(query_len > 1, pages.shape[0])
            carry = lax.fori_loop(jnp.int32(0), count, prefill, carry)
        single_rows, count = _rows_where(query_len == 1, pages.shape[0] + turn)
        carry = lax.fori_loop(jnp.int32(0), (count + (turn - 1)) // turn, decode, carry)
    return carry


def _rows_where(wanted: Bool[Array, " S"], size: int) -> tuple[Int32[Array, " n"], Int32[Array, ""]]:
    """The wanted rows in order, filled up to `size` with S (which is no row), and their number."""
    rows = jnp.nonzero(wanted, size=size, fill_value=wanted.shape[0])[0]
    return rows.astype(jnp.int32), jnp.sum(wanted, dtype=jnp.int32)


def decays(
    log_decay: Float[Array, "c H"],
) -> tuple[Float[Array, "c H"], Float[Array, "c H"], Float[Array, "H c c"]]:
    """Decays inside a chunk of c tokens: from its start to each token, from each token to its end, between tokens.

    `between[h, i, j]` is exp of the sum of log decays of tokens j + 1 .. i, and 0 for j > i. Each sum is taken by
    itself: a difference of two running sums loses the small decays that follow a large one.
    """
    i, j = jnp.arange(log_decay.shape[0])[:, None], jnp.arange(log_decay.shape[0])[None, :]
    later = jnp.where((i > j)[:, :, None], log_decay[:, None, :], 0.0)
    sums = jnp.einsum("il,ljh->hij", (i >= j).astype(jnp.float32), later)
    between = jnp.where((i >= j)[None], jnp.exp(sums), 0.0)
    from_start = between[:, :, 0].T * jnp.exp(log_decay[:1])
    return from_start, between[:, -1].T, between


FORGOTTEN = -100.0
"""A log decay whose exponential is 0 in float32."""


def chunk_decays(
    log_decay: Float32[Array, "N 64 H"],
) -> tuple[Float32[Array, "N H 64"], Float32[Array, "N H 64"], Float32[Array, "N H 64 64"]]:
    """`decays` of N chunks, in a form that XLA fuses into its users.

    Differences of running sums are exact here, because each log decay is split in two: multiples of 2^-10, whose sums
    (at most 64 * 100) float32 holds exactly, and a rest of at most 2^-11, whose sums are so small that their rounding
    does not count.
    """
    i, j = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)[None, :]
    log_decay = jnp.maximum(log_decay, FORGOTTEN).transpose(0, 2, 1)
    coarse = jnp.round(log_decay * 1024.0) / 1024.0
    sums = [
        jnp.sum(jnp.where((j <= i)[None, None], part[:, :, None, :], 0.0), axis=-1)
        for part in (coarse, log_decay - coarse)
    ]
    gaps = [x[:, :, :, None] - x[:, :, None, :] for x in sums]
    between = jnp.where((i >= j)[None, None], jnp.exp(gaps[0] + gaps[1]), 0.0)
    to_end = jnp.exp(sum(x[:, :, -1:] - x for x in sums))
    return jnp.exp(sums[0] + sums[1]), to_end, between
