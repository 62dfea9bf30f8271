"""Page loads and moves on Hopper in Mosaic GPU kernels: one launch each, in place through a Ref of the pool.

Copies are cut by place in the page:

    page      | chunk 0 | chunk 1 | ... |      a block has the same chunks of every page it copies
    block     source --TMA--> ring in shared memory --TMA--> target, several chunks under way

Thus "one after another" holds within a block, and blocks need not know of each other. What a move reads may be what an
earlier one wrote: XLA cuts a list of moves where that happens, and a block ends all its writes before it goes on.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from rimuru_jax.array_types import HostPages, Pool
from rimuru_jax.pallas.memory_view import WORD_BYTES, MemoryView
from rimuru_jax.pallas.mosaic_ring import slot_of

COPY_WORDS = 8
"""TMA copies multiples of so many words."""

BOX = 256
"""TMA copies at most so many elements along an axis."""

CHUNK_BYTES = 32 * 1024
"""A chunk of a page is at most so large, so that six fit into shared memory."""

CHUNK_COST = 4 * 1024
"""A chunk takes a block as long as so many bytes, besides its own."""

STAGES = 6
"""Chunks of a block under way."""

LOAD_BLOCKS = 16
"""Blocks that read from the host: eight saturate PCIe."""

MOVE_BLOCKS = 132
"""Blocks that move pages within the pool: one for each multiprocessor."""


def copy_refusal(stride: int, words: int) -> str | None:
    """Why pages of `words`, `stride` words apart, are not copied by a kernel, or None."""
    if math.gcd(stride, words) % COPY_WORDS:
        return f"pages have {words} words in {stride}, but multiples of {COPY_WORDS} are wanted"
    return None


def load_pages(
    pool: Pool,
    host_pages: HostPages,
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    interpret: Any = None,
) -> Pool:
    """The kernel behind `api.load_pages`, for operands without a refusal. `host_pages` may be page-locked memory of the host.

    `interpret`: an `InterpretGPUParams` runs the kernel on a CPU, slowly.
    """
    words = host_pages.shape[1]
    cut = Cut.of(words, words, LOAD_BLOCKS)
    bounds = jnp.stack([jnp.ones_like(count), jnp.zeros_like(count), count])
    host_pages = host_pages.reshape(host_pages.shape[0], *cut.page_shape)
    return _copy(pool, words, host_pages, sources, targets, bounds, cut, interpret)


def move_pages(
    pool: Pool,
    view: MemoryView,
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    interpret: Any = None,
) -> Pool:
    """The kernel behind `api.move_pages`, as `load_pages`."""
    cut = Cut.of(view.stride, view.words, MOVE_BLOCKS)
    bounds = independent_runs(sources, targets, count)
    return _copy(pool, view.stride, None, sources, targets, bounds, cut, interpret)


def independent_runs(
    sources: Int32[Array, " n"], targets: Int32[Array, " n"], count: Int32[Array, ""]
) -> Int32[Array, " n+2"]:
    """The number of runs that a list of moves is cut into, then where each begins, then where the last ends.

    No move of a run reads or writes what an earlier move of the same run writes. (To write what an earlier one reads is
    no harm: moves of a run begin in order, and a write comes after its own read.)
    """
    move = jnp.arange(sources.shape[0], dtype=jnp.int32)
    earlier = move[None, :] < move[:, None]
    written = (sources[:, None] == targets[None, :]) | (targets[:, None] == targets[None, :])
    begins = (move < count) & ((move == 0) | jnp.any(earlier & written, axis=1))
    starts = jnp.sort(jnp.where(begins, move, count))
    return jnp.concatenate([jnp.sum(begins, dtype=jnp.int32)[None], starts, count[None]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How pages are cut into chunks."""

    row: int
    """Words of a row of a chunk."""
    rows: int
    """Rows of a chunk."""
    chunks: int
    """Chunks of the content of a page."""
    blocks: int
    """Blocks that share the chunks of a page."""
    stride: int
    """Words between pages."""

    @property
    def page_shape(self) -> tuple[int, int]:
        return self.stride // self.row, self.row

    @classmethod
    def of(cls, stride: int, words: int, most_blocks: int) -> "Cut":
        """The cut with which the block that has most to do is done first."""
        row = max(n for n in range(COPY_WORDS, BOX + 1, COPY_WORDS) if math.gcd(stride, words) % n == 0)
        most = min(BOX, CHUNK_BYTES // (row * WORD_BYTES))
        sizes = [n for n in range(1, most + 1) if words // row % n == 0]

        def most_work(rows: int) -> int:
            chunks = words // row // rows
            return -(-chunks // min(most_blocks, chunks)) * (rows * row * WORD_BYTES + CHUNK_COST)

        rows = min(sizes, key=most_work)
        chunks = words // row // rows
        return cls(row=row, rows=rows, chunks=chunks, blocks=min(most_blocks, chunks), stride=stride)


def _copy(
    pool: Pool,
    stride: int,
    host: Array | None,
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    bounds: Int32[Array, " runs"],
    cut: Cut,
    interpret: Any,
) -> Pool:
    """Copy pages of `host`, or else of the pool itself, to pages of the pool; `bounds` as of `independent_runs`."""

    def body(
        sources,  # [n]
        targets,  # [n]
        bounds,  # [runs + 2]
        *refs,  # the host's pages, if any, and the pool, [P, rows, row]; ring [stages, rows, row]; barriers [stages]
    ):
        *pages, ring, ready = refs
        source, target = pages[0], pages[-1]
        block = lax.axis_index("block")
        own = lax.div(cut.chunks - block + (cut.blocks - 1), jnp.int32(cut.blocks))

        def chunk(pages, ids, turn):
            first = (block + lax.rem(turn, own) * cut.blocks) * cut.rows
            return pages.at[ids[lax.div(turn, own)], pl.ds(first, cut.rows)]

        def fetch(turn):
            slot = slot_of(turn, STAGES)
            plgpu.copy_gmem_to_smem(chunk(source, sources, turn), ring.at[slot], ready.at[slot])

        @pl.loop(0, bounds[0])
        def _(run):
            begin, end = bounds[1 + run] * own, bounds[2 + run] * own
            for ahead in range(STAGES - 1):
                pl.when(begin + ahead < end)(lambda ahead=ahead: fetch(begin + ahead))

            @pl.loop(begin, end)
            def _(turn):
                slot = slot_of(turn, STAGES)
                plgpu.barrier_wait(ready.at[slot])
                plgpu.copy_smem_to_gmem(ring.at[slot], chunk(target, targets, turn))
                # The slot of the turn before is free as soon as its write has read it.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                pl.when(turn + (STAGES - 1) < end)(lambda: fetch(turn + (STAGES - 1)))

            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        grid=(cut.blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((STAGES, cut.rows, cut.row), jnp.uint16),
            plgpu.Barrier(num_barriers=STAGES),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    ref = jax.new_ref(pool.reshape(pool.size // stride, *cut.page_shape))
    kernel(sources, targets, bounds, *(() if host is None else (host,)), ref)
    return jax.freeze(ref).reshape(pool.shape)
