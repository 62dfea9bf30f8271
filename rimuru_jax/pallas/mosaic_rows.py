"""What the Mosaic kernels share that take one step of every row of one token: grid (head, row), a block for each."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def this_row(pages: Any, query_start: Any, has_state: Any) -> tuple[Array, Array, Array, Array]:
    """(page, token, whether the page holds a state, whether the row has one token) of this block's row.

    `pages`, `query_start` and `has_state` are the operator's metadata in global memory, the last as int32.
    """
    row = lax.axis_index("row")
    token = query_start[row]
    return pages[row], token, has_state[row] != 0, query_start[row + 1] - token == 1


def clear_padding(out: Any, query_start: Any, room: Any, layout: Any) -> None:
    """Write zeros to this block's share of the outputs `[T, heads, d]` of padding tokens.

    `room`: shared memory for `[d]`, which threads write in `layout`.
    """
    tokens, rows = out.shape[0], query_start.shape[0] - 1

    @pl.loop(0, -(-tokens // rows))
    def _(turn):
        token = lax.axis_index("row") + turn * rows

        @pl.when((token >= query_start[rows]) & (token < tokens))
        def _():
            room[...] = plgpu.layout_cast(jnp.zeros(room.shape, room.dtype), layout)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(room, out.at[token, lax.axis_index("head")])
            plgpu.wait_smem_to_gmem(0)
