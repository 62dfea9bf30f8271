"""What the decode and the prefill kernel share: fetching tiles of pages, and pieces of the softmax."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

NEGATIVE = -1e30
"""Below every real score; minus infinity would make exp2(-inf - -inf) a NaN."""
LOG2_E = math.log2(math.e)


def copies_per_tile(tile: int, page_tokens: int) -> int:
    """Copies that fetch the keys (or the values) of one tile of tokens."""
    return tile // math.gcd(tile, page_tokens)


def fetch_tiles(
    kv: Any,
    table: Any,
    k_smem: Any,
    v_smem: Any,
    k_ready: Any,
    v_ready: Any,
    consumed: tuple[Any, ...],
    *,
    row: Array,
    head: Array,
    kv_heads: int,
    page_tokens: int,
    first: Array,
    count: Array,
    last_token: Array,
) -> None:
    """Bring tiles `first ... first + count` of one row and key/value head to shared memory, a ring of slots ahead.

    Args:
        kv: `[pages, rows, h]`; keys of head n are rows `n * page_tokens ...` of a page, values follow all keys.
        table: `[S, W]` page of each `page_tokens` tokens of a row.
        k_smem, v_smem: `[steps, tile, h]`.
        k_ready, v_ready: barriers of each slot, one arrival per copy.
        consumed: barriers of each slot that say it may be filled again.
        last_token: the last token that has a page; what would lie behind it is fetched from its page instead.
    """
    steps, tile, _ = k_smem.shape
    box = math.gcd(tile, page_tokens)

    def fetch(i, _):
        slot = lax.rem(i, jnp.int32(steps))

        @pl.when(i >= steps)
        def _():
            for barrier in consumed:
                plgpu.barrier_wait(barrier.at[slot])

        @pl.when(i < count)
        def _():
            tokens = [jnp.minimum((first + i) * tile + j * box, last_token) for j in range(tile // box)]
            pages = [table[row, lax.div(token, jnp.int32(page_tokens))] for token in tokens]
            for smem, ready, part in ((k_smem, k_ready, head), (v_smem, v_ready, kv_heads + head)):
                for j, page in enumerate(pages):
                    start = part * page_tokens
                    if box < page_tokens:
                        offset = lax.rem(tokens[j], jnp.int32(page_tokens))
                        start += offset - lax.rem(offset, jnp.int32(box))
                    start = pl.multiple_of(start, 8)
                    plgpu.copy_gmem_to_smem(
                        kv.at[page, pl.ds(start, box)], smem.at[slot, pl.ds(j * box, box)], ready.at[slot]
                    )

        return ()

    # The last `steps` turns only wait, so that no barrier ends in a phase nobody has seen.
    lax.fori_loop(jnp.int32(0), count + steps, fetch, ())


def zero_rows(values: Any, valid: Array) -> None:
    """Zero rows `valid` and up of `values [tile, h]` in shared memory; called by a whole warpgroup.

    Their share in the output is 0, but 0 times a stale NaN would be NaN.
    """
    rows, columns = values.shape
    row = plgpu.broadcasted_iota(jnp.int32, (rows, 32), 0, layout=plgpu.Layout.WGMMA)
    for c in range(0, columns, 32):
        part = values.at[:, pl.ds(c, 32)]
        part[...] = jnp.where(row < valid, part[...], jnp.bfloat16(0))
    plgpu.commit_smem()


def product(shape: tuple[int, int], a: Any, b: Any) -> Array:
    """`a @ b` in float32, `a` in registers or shared memory, `b` in shared memory."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape))


def filled(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """A float32 array of one value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
