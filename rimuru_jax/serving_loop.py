"""The device side of serving: the page pool, the page tables, the model, and the jitted steps that run on them.

Use it through `Engine`, or alone with a scheduler of your own:

    loop = ServingLoop(spec, params, host_pages, layout, num_huge_pages=..., max_num_seqs=..., max_model_len=...)
    loop.update_tables({"kv": (index, page)})          # pages of a slot, as your allocator handed them out
    outputs = loop.run(pack([Chunk(slot, tokens, 0)]))  # writes keys and values, gives logits of each chunk's end
    tokens = sample(outputs.logits, ...)

Every call is asynchronous as in all of JAX. What a step was given is never changed under it: arrays are copied when
they are handed over, and pages or slots may be given to the next step as soon as this one is dispatched.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Hidden, HostIntArray, HostPages, Logits, PageTable, Pool, RouterCounts
from rimuru_jax.host.expert_cache import HOST, ExpertCopy, PageMove
from rimuru_jax.host.page_layout import PageLayout
from rimuru_jax.host_memory import device_view
from rimuru_jax.models import stack
from rimuru_jax.models.context import Batch, ExpertTables, ModelSpec, PageTables
from rimuru_jax.models.stack import StackParams
from rimuru_jax.pallas.memory_view import WORD_BYTES
from rimuru_jax.pallas.page_loads import PageLoads
from rimuru_jax.pallas.page_update import load_pages, move_pages
from rimuru_jax.sampling import TokenLogprobs, compute_logprobs

MIN_PREFILL_TOKENS = 16

LOADING_BLOCKS = 8
"""Thread blocks that copy pages while the others compute: enough to use all of PCIe."""


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence in a step."""

    slot: int
    """Row of the sequence in the page tables."""
    token_ids: Sequence[int]
    start: int
    """Position of the first token; all before it are in the sequence's pages already."""


class Bucket(NamedTuple):
    """The static shape of a step."""

    tokens: int
    rows: int
    decode: bool
    """At most one token per row."""


class StepOutputs(NamedTuple):
    logits: Logits
    """Of the last token of each row."""
    hidden: Hidden
    """Final hidden states of all tokens, for `prompt_logprobs`."""
    router_counts: RouterCounts


@functools.partial(jax.jit, static_argnames=("spec", "decode"), donate_argnames=("pool",))
def step(
    spec: ModelSpec,
    params: StackParams,
    pool: Pool,
    host_pages: HostPages,
    tables: PageTables,
    experts: ExpertTables,
    batch: Batch,
    *,
    decode: bool,
) -> tuple[Pool, StepOutputs]:
    """One forward pass over a batch. The pool is donated: use the one that comes back."""
    out = stack.forward(spec, params, pool, host_pages, tables, experts, batch, decode=decode)
    logits = stack.logits(spec, params, out.hidden[batch.logit_tokens])
    return out.pool, StepOutputs(logits, out.hidden, out.router_counts)


@functools.partial(jax.jit, static_argnames=("num_logprobs",), static_argnums=(0,))
def prompt_logprobs(
    spec: ModelSpec,
    params: StackParams,
    hidden: Float[Array, "n d"],
    targets: Int32[Array, " n"],
    *,
    num_logprobs: int,
) -> TokenLogprobs:
    """Log-probabilities of the tokens that followed. Call it on chunks of rows: it makes `[n, V]` float32 arrays."""
    return compute_logprobs(stack.logits(spec, params, hidden), targets, num_logprobs)


@functools.partial(jax.jit, donate_argnums=(0,))
def _scatter(table: PageTable, index: Int32[Array, "U 3"], pages: Int32[Array, " U"]) -> PageTable:
    return table.at[index[:, 0], index[:, 1], index[:, 2]].set(pages, mode="drop")


_load_pages = functools.partial(jax.jit, donate_argnums=(0,))(load_pages)
_move_pages = functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(0,))(move_pages)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty_pool(huge_pages: int, words: int) -> Pool:
    return jnp.zeros((huge_pages, words), jnp.uint16)


def pack(chunks: Sequence[Chunk]) -> tuple[Batch, Bucket]:
    """Pack chunks into the smallest bucket that holds them. Numpy arrays that nobody else holds."""
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    bucket = bucket_for(num_tokens, len(chunks))
    tokens, rows, _ = bucket
    token_ids, positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    token_rows = np.full(tokens, rows - 1, np.int32)
    slots, context = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    query_start = np.full(rows + 1, num_tokens, np.int32)
    first = 0
    for row, (slot, ids, start) in enumerate(chunks):
        end = first + len(ids)
        token_ids[first:end] = ids
        positions[first:end] = np.arange(start, start + len(ids))
        token_rows[first:end] = row
        slots[row], context[row], query_start[row] = slot, start + len(ids), first
        first = end
    last = np.maximum(query_start[1:] - 1, 0)
    batch = Batch(
        token_ids=token_ids,  # type: ignore[arg-type]
        positions=positions,  # type: ignore[arg-type]
        rows=token_rows,  # type: ignore[arg-type]
        slots=slots,  # type: ignore[arg-type]
        query_start=query_start,  # type: ignore[arg-type]
        context_len=context,  # type: ignore[arg-type]
        logit_tokens=last,  # type: ignore[arg-type]
    )
    return batch, bucket


def bucket_for(num_tokens: int, num_rows: int) -> Bucket:
    """The smallest bucket that holds a step. Sizes are powers of two."""
    rows = 1 << (num_rows - 1).bit_length()
    if num_tokens == num_rows:
        return Bucket(rows, rows, True)
    rows = 1 << (rows.bit_length() & ~1) if rows > 1 else 1  # powers of four: prefills vary in both sizes
    return Bucket(max(MIN_PREFILL_TOKENS, 1 << (num_tokens - 1).bit_length()), rows, False)


def buckets(max_num_batched_tokens: int, max_num_seqs: int) -> Iterator[Bucket]:
    """Every bucket that steps within these limits can have."""
    # The fewest rows and the most tokens that fall into each size: a bucket that exists at all has such a step.
    rows = [n for n in (1, *(2**i + 1 for i in range(max_num_seqs.bit_length()))) if n <= max_num_seqs]
    tokens = {*(2**i for i in range(max_num_batched_tokens.bit_length())), max_num_batched_tokens}
    yield from dict.fromkeys(bucket_for(n, n) for n in rows)
    yield from dict.fromkeys(bucket_for(t, n) for t in sorted(tokens) for n in rows if n < t)


class ServingLoop:
    """Owns everything on the device: one pool, the page tables, the resident parameters.

    Args:
        spec: the model and its views of the pool.
        params: resident parameters as `models.stack.stack_params` returns them.
        host_pages: uint16 `[pages, words]`, every expert page in (layer, expert, matrix) order; kept, never written.
        layout: of the pool; its `num_huge_pages` rows include the scratch page.
        max_num_seqs, max_model_len: size of the page tables, in slots and tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Any],
        host_pages: np.ndarray,
        layout: PageLayout,
        *,
        num_huge_pages: int,
        max_num_seqs: int,
        max_model_len: int,
    ):
        self.spec = spec
        self.params: StackParams = jax.tree.map(jnp.asarray, params)
        self.host_pages: HostPages = device_view(host_pages)
        self.pool: Pool = _empty_pool(num_huge_pages, layout.huge_page_bytes // WORD_BYTES)
        self.tables: dict[str, PageTable] = {}
        for placed in layout.sequence_kinds:
            tokens = placed.kind.page_tokens
            width = -(-max_model_len // tokens) if tokens else 1
            self.tables[placed.kind.name] = jnp.zeros((placed.tables, max_num_seqs, width), jnp.int32)
        moe, layers = spec.config.moe, len(spec.config.moe_layers)
        self.set_experts(
            np.full((layers, moe.num_experts, moe.matrices), HOST, np.int32),
            np.zeros((layers, 0), np.int32),
            np.zeros((2, 0, moe.matrices), np.int32),
        )

    def update_tables(self, updates: Mapping[str, tuple[HostIntArray, HostIntArray]]) -> None:
        """Write page ids `[U]` at (table, slot, column) `[U, 3]` of each named kind's tables."""
        for kind, (index, pages) in updates.items():
            size = max(8, 1 << (len(pages) - 1).bit_length())
            # Padding goes past the end, where a scatter drops it.
            padded = np.full((size, 3), np.iinfo(np.int32).max, np.int32)
            padded[: len(pages)] = index
            self.tables[kind] = _scatter(self.tables[kind], padded, np.resize(pages, size))

    def set_experts(self, pages: HostIntArray, loads: HostIntArray, buffer_pages: HostIntArray) -> None:
        """Set what the following steps read.

        Args:
            pages: `[L, E, M]` pool page of each matrix or HOST, loading buffers overlaid.
            loads: `[L, B]` experts to copy into the buffers of set `layer % 2` before the layer computes; -1 is none.
            buffer_pages: `[2, B, M]` pages of the two sets.
        """
        layers, experts, matrices = pages.shape
        # As wide as the layer whatever B is, so that no setting of the buffers changes a compiled shape.
        sources = np.zeros((layers + 1, experts * matrices), np.int32)
        targets, counts = np.zeros_like(sources), np.zeros(layers + 1, np.int32)
        for layer in np.flatnonzero((loads >= 0).any(axis=1)).tolist():
            away = loads[layer][loads[layer] >= 0]
            count = len(away) * matrices
            first = (layer * experts + away) * matrices
            sources[layer, :count] = (first[:, None] + np.arange(matrices)).reshape(-1)
            targets[layer, :count] = buffer_pages[layer % 2, : len(away)].reshape(-1)
            counts[layer] = count
        # Not `jnp.array(pages)`: on a CPU that reads aligned memory in place, and copies it behind the running step.
        self.experts = ExpertTables(
            pages=jnp.asarray(pages.copy()),
            loads=PageLoads(
                sources=jnp.asarray(sources),
                targets=jnp.asarray(targets),
                counts=jnp.asarray(counts),
                blocks=jnp.int32(LOADING_BLOCKS),
            ),
        )

    def copy_experts(self, copies: Sequence[ExpertCopy]) -> None:
        """Copy experts from host memory into their pool pages, before the next step."""
        if not copies:
            return
        moe = self.spec.config.moe
        targets = np.array([copy.pages for copy in copies], np.int32).reshape(-1)
        first = np.array([(c.layer * moe.num_experts + c.expert) * moe.matrices for c in copies], np.int32)
        sources = (first[:, None] + np.arange(moe.matrices, dtype=np.int32)).reshape(-1)
        size = 1 << (len(targets) - 1).bit_length()
        self.pool = _load_pages(
            self.pool,
            self.host_pages,
            np.resize(sources, size),
            np.resize(targets, size),
            np.int32(len(targets)),
        )

    def move_experts(self, moves: Sequence[PageMove]) -> None:
        """Copy expert pages elsewhere in the pool, one after another, before the next step and its other copies."""
        if not moves:
            return
        pages = np.array(moves, np.int32)
        size = 1 << (len(pages) - 1).bit_length()
        self.pool = _move_pages(
            self.pool,
            self.spec.expert_view,
            np.resize(pages[:, 0], size),
            np.resize(pages[:, 1], size),
            np.int32(len(pages)),
        )

    def run(self, packed: tuple[Batch, Bucket]) -> StepOutputs:
        """Run one step."""
        batch, bucket = packed
        self.pool, outputs = step(
            self.spec,
            self.params,
            self.pool,
            self.host_pages,
            self.tables,
            self.experts,
            batch,
            decode=bucket.decode,
        )
        return outputs

    def prompt_logprobs(
        self, hidden: Hidden, first: int, targets: Sequence[int], num_logprobs: int, rows: int = 64
    ) -> Iterator[TokenLogprobs]:
        """Log-probabilities of `targets` after hidden states `first`, `first + 1`, ...; `rows` at a time."""
        for begin in range(0, len(targets), rows):
            part = np.zeros(rows, np.int32)
            count = min(rows, len(targets) - begin)
            part[:count] = targets[begin : begin + count]
            index = np.minimum(first + begin + np.arange(rows), hidden.shape[0] - 1)
            logprobs = prompt_logprobs(self.spec, self.params, hidden[index], part, num_logprobs=num_logprobs)
            yield jax.tree.map(lambda x, count=count: np.asarray(x)[:count], logprobs)
