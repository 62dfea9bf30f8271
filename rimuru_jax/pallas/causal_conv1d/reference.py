"""Causal convolution in plain jnp: the specification, and the path on a CPU.

Every row's state is put in front of its tokens. In this extended sequence a convolution is a sum of shifted slices
that never looks back past its row, and the new state is the last rows of the row's part, however short it is.

    query_start    0          5       7                tokens of three rows, here with a state of 3
    extended       s s s t t t t t s s s t t s s s t t t ...
    new state                  ^ ^ ^     ^ ^ ^
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.ragged import write_pages


def causal_conv1d(
    x: Float[Array, "T c"],
    weight: Float[Array, "c kernel"],
    bias: Float[Array, " c"] | None,
    pool: Pool,
    view: MemoryView,
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    activation: str | None,
) -> tuple[Float[Array, "T c"], Pool]:
    (tokens, channels), rows, past = x.shape, pages.shape[0], weight.shape[1] - 1
    offsets = jnp.arange(past, dtype=jnp.int32)
    # An idle row has nothing to say, not even about its own page.
    pages = jnp.where(query_start[1:] > query_start[:-1], pages, 0)[:, None] + offsets[None, :]
    states = jnp.where(has_state[:, None, None], view.read(pool, pages)[:, :, 0], jnp.zeros((), view.dtype))

    wide = x.dtype if x.dtype == view.dtype else jnp.dtype(jnp.float32)
    sources = jnp.concatenate([states.reshape(rows * past, channels).astype(wide), x.astype(wide)])
    part_start = query_start + past * jnp.arange(rows + 1, dtype=jnp.int32)
    places = jnp.arange(tokens + rows * past, dtype=jnp.int32)
    row = jnp.searchsorted(part_start[1:], places, side="right").astype(jnp.int32)
    place_in_part = places - part_start[row]
    source = jnp.where(place_in_part < past, row * past + place_in_part, places + (rows - 1 - row) * past)
    # Past the last row is padding, which reads as zeros.
    source = jnp.where(row < rows, source, tokens + rows * past)
    extended = sources.at[source].get(mode="fill", fill_value=0)

    token = jnp.arange(tokens, dtype=jnp.int32)
    place = token + past * (1 + jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32))
    weight = weight.astype(jnp.float32)
    out = jnp.zeros((tokens, channels), jnp.float32)
    for back in range(past + 1):
        tap = extended.at[place - back].get(mode="fill", fill_value=0).astype(jnp.float32)
        out += tap * weight[None, :, past - back]
    if bias is not None:
        out += bias.astype(jnp.float32)[None, :]
    if activation == "silu":
        out = jax.nn.silu(out)

    newest = extended[part_start[1:, None] - past + offsets[None, :]]  # [S, past, c]
    pool = write_pages(pool, view, pages.reshape(-1), newest.reshape(rows * past, 1, channels))
    return out.astype(x.dtype), pool
