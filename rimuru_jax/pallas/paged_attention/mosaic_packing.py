"""Query heads in rows of matrices: the kernels copy and multiply no less than 8 rows of one key/value head at once.

Letters as everywhere, and U units, R rows of a unit, S1 = S + 1. Groups of 5 or more query heads per key/value head are padded to a size the kernels know. Smaller ones would be mostly
padding in a prefill, which multiplies: there, several tokens of a row share the 8 rows. Decode waits for memory, not
for products, and has but one token a row.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

UNIT_ROWS = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """A unit: `tokens` of one row that follow each other, times `heads` of one key/value head, padding included."""

    heads: int
    tokens: int

    @classmethod
    def choose(cls, group: int, max_query_len: int) -> "Packing":
        if max_query_len > 1 and group <= 4:
            heads = next(size for size in (1, 2, 4) if size >= group)
            return cls(heads=heads, tokens=UNIT_ROWS[0] // heads)
        return cls(heads=next(size for size in UNIT_ROWS if size >= group), tokens=1)

    @property
    def rows(self) -> int:
        """Rows of a unit."""
        return self.heads * self.tokens

    def units(self, tokens: int, rows: int) -> int:
        """The most units that `tokens` tokens in `rows` rows can take."""
        return tokens if self.tokens == 1 else tokens // self.tokens + rows

    def starts(self, query_start: Int32[Array, " S1"]) -> Int32[Array, " S1"]:
        """First unit of each row; the last entry belongs to the tokens behind the rows."""
        if self.tokens == 1:
            return query_start
        units = (query_start[1:] - query_start[:-1] + (self.tokens - 1)) // self.tokens
        return jnp.append(jnp.int32(0), jnp.cumsum(units, dtype=jnp.int32)) + query_start[0]

    def pack(
        self,
        queries: Float[Array, "T N G h"],
        query_start: Int32[Array, " S1"],
        unit_start: Int32[Array, " S1"],
    ) -> Float[Array, "U N R h"]:
        """Queries by units; a unit that its row does not fill holds tokens of whatever follows."""
        tokens, kv_heads, group, head_dim = queries.shape
        if group < self.heads:
            queries = jnp.pad(queries, ((0, 0), (0, 0), (0, self.heads - group), (0, 0)))
        if self.tokens == 1:
            return queries
        unit = jnp.arange(self.units(tokens, len(query_start)), dtype=jnp.int32)
        row = _last_at_most(unit_start, unit)
        token = query_start[row] + (unit - unit_start[row]) * self.tokens
        ids = token[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)[None, :]
        packed = queries.at[jnp.minimum(ids, tokens - 1)].get(
            mode="promise_in_bounds"
        )  # [U, tokens, N, heads, h]
        return packed.transpose(0, 2, 1, 3, 4).reshape(len(unit), kv_heads, self.rows, head_dim)

    def unpack(
        self,
        units: Float[Array, "U N R h"],
        query_start: Int32[Array, " S1"],
        unit_start: Int32[Array, " S1"],
        tokens: int,
        group: int,
    ) -> Float[Array, "T N G h"]:
        """The inverse of `pack`."""
        if self.tokens > 1:
            token = jnp.arange(tokens, dtype=jnp.int32)
            row = _last_at_most(query_start, token)
            ahead = token - query_start[row]
            units = units.reshape(*units.shape[:2], self.tokens, self.heads, units.shape[3])
            units = units.at[unit_start[row] + ahead // self.tokens, :, ahead % self.tokens].get(
                mode="promise_in_bounds"
            )
        return units[:, :, :group]


def _last_at_most(starts: Int32[Array, " S1"], x: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The last row that starts at `x` or before, of rows that start in order."""
    return jnp.sum((starts[None, :] <= x[:, None]).astype(jnp.int32), axis=1) - 1
