"""The device side of serving: the page pool, the page tables, the model, and the jitted steps that run on them.

Use it through `Engine`, or alone with a scheduler of your own:

    loop = ServingLoop(spec, params, host_pages, layout, num_huge_pages=..., max_num_seqs=..., max_model_len=...)
    loop.update_tables({"kv": (index, page)})          # pages of a slot, as your allocator handed them out
    outputs = loop.run(pack([Chunk(slot, tokens, 0)]))  # writes keys and values, gives logits of each chunk's end
    tokens = loop.sample(outputs, *build_sampling_inputs(...))
    loop.run(pack([Chunk(slot, [IN_FLIGHT], len(tokens))]))  # goes on with the sampled token, which stays on the device

Every call is asynchronous as in all of JAX. What a step was given is never changed under it: arrays are copied when
they are handed over, and pages or slots may be given to the next step as soon as this one is dispatched.
"""

import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from rimuru_jax import sampler
from rimuru_jax.array_types import Hidden, HostIntArray, HostPages, Logits, PageTable, Pool, RouterCounts
from rimuru_jax.compiled_steps import CompiledSteps, made_here
from rimuru_jax.host.expert_cache import HOST, ExpertCopy, PageMove
from rimuru_jax.host.page_layout import PageLayout
from rimuru_jax.host_memory import device_rows, device_view, page_locked_copy
from rimuru_jax.models import stack
from rimuru_jax.models.context import ExpertTables, ModelSpec, PackedBatch, PageTables
from rimuru_jax.models.stack import StackParams, param_shapes, unroll_params
from rimuru_jax.pallas import implementation
from rimuru_jax.pallas.memory_view import WORD_BYTES
from rimuru_jax.pallas.page_loads import PageLoads
from rimuru_jax.pallas.page_update import load_pages, move_pages
from rimuru_jax.programs import Programs
from rimuru_jax.sampler import Sampler
from rimuru_jax.sampling import (
    LOGPROB_WIDTHS,
    SampledTokens,
    SamplingFeatures,
    SamplingInputs,
    TokenLogprobs,
    choose_greedily,
    compute_logprobs,
    logprob_width,
)

MIN_PREFILL_SIZE = 16
"""Tokens, and rows, of the smallest bucket for prefills."""

MIN_DECODE_ROWS_ON_GPU = 8
"""A matrix product of fewer rows takes as long, and XLA launches a kernel to fill them up."""

LOADING_BLOCKS = 8
"""Thread blocks that copy pages while the others compute: enough to use all of PCIe."""

IN_FLIGHT = -1
"""In place of a token id: the token that was last sampled for the slot."""


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence in a step."""

    slot: int
    """Row of the sequence in the page tables."""
    token_ids: Sequence[int]
    """IN_FLIGHT stands for the token sampled last."""
    start: int
    """Position of the first token; all before it are in the sequence's pages already."""


NOMINAL_POOL_BYTES = 1 << 30

GPU_COMPILER_OPTIONS = {
    # Dense layers go to cuBLAS by its heuristic. Autotuning would compile dozens of kernels for each shape of each bucket,
    # take memory that the pool has by then, and choose anew at every start, in other roundings.
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": 0,
    # Rematerialization: the pool and the host's pages count as memory in use, which looks like too much: XLA would compute
    # small things again in every layer, three launches each, to save what they take. Padding for cuBLAS: of 60 experts the
    # router's weights would be padded to 64 in every layer of every step, for tensor cores that no longer ask for it.
    "xla_disable_hlo_passes": "rematerialization,cublas-pad-for-gemms",
    # Products of the same activations would be merged by putting their weights together anew in every layer of every step.
    "xla_gpu_dot_merger_threshold_mb": 0,
}

UPDATE_SIZES = (64, 1024, 16384)
"""Entries of the page tables that are written at once; few sizes, so that few programs do it."""

PROMPT_ROWS = 64
"""Prompt tokens whose log-probabilities are made at once."""

COPY_PAGES = 64
"""Expert pages that are copied or moved at once."""

SMALL_ARRAY_BYTES = 128 << 10
SMALL_ARRAYS = 16
"""Room that is kept for small arrays: of a step of up to 32 rows all but its logits and what it needs meanwhile."""


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
    slots: Int32[Array, " S"]
    """Of each row; past the last slot for padding."""
    greedy: SampledTokens
    """The most probable tokens: what most steps want, without another program."""


@functools.partial(jax.jit, static_argnames=("spec", "decode"), donate_argnames=("pool", "last_tokens"))
def step(
    params: StackParams,
    pool: Pool,
    host_pages: HostPages,
    tables: PageTables,
    experts: ExpertTables,
    batch: PackedBatch,
    last_tokens: Int32[Array, " Q"],
    *,
    spec: ModelSpec,
    decode: bool,
) -> tuple[Pool, Int32[Array, " Q"], StepOutputs]:
    """One forward pass over a batch. The pool and `last_tokens` are donated: use those that come back.

    `last_tokens` are the ids sampled last for each slot, which take the place of IN_FLIGHT in the batch; those that come
    back are the most probable ones.
    """
    # Cut out once: every kernel that cut its own operand from the batch would be made anew in a GPU's graph at every step.
    fields = jax.lax.optimization_barrier(batch.unpack())
    ids = fields.token_ids
    known = jnp.where(ids == IN_FLIGHT, last_tokens[fields.slots[fields.rows]], ids)
    fields = fields.replace(token_ids=known)  # type: ignore[attr-defined]
    out = stack.forward(spec, params, pool, host_pages, tables, experts, fields, decode=decode)
    logits = stack.logits(spec, params, out.hidden[fields.logit_tokens])
    slots = jnp.where(fields.context_len > 0, fields.slots, last_tokens.shape[0])
    greedy = choose_greedily(logits)
    outputs = StepOutputs(logits, out.hidden, out.router_counts, slots, greedy)
    return out.pool, _remembered(last_tokens, slots, greedy.token_ids), outputs


def _remembered(
    last_tokens: Int32[Array, " Q"], slots: Int32[Array, " S"], tokens: Int32[Array, " S"]
) -> Int32[Array, " Q"]:
    return last_tokens.at[slots].set(tokens, mode="drop")


_remember = functools.partial(jax.jit, donate_argnums=(0,))(_remembered)


@jax.jit
def _take_rows(hidden: Hidden, index: Int32[Array, " n"]) -> Float[Array, "n d"]:
    return hidden[index]


@functools.partial(jax.jit, static_argnames=("spec", "num_logprobs"))
def prompt_logprobs(
    params: StackParams,
    hidden: Float[Array, "n d"],
    targets: Int32[Array, " n"],
    *,
    spec: ModelSpec,
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


def step_shapes(
    spec: ModelSpec,
    layout: PageLayout,
    bucket: Bucket,
    *,
    pool_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    unrolled: bool = False,
) -> tuple[Any, ...]:
    """Shapes of what `step` takes: enough to compile it. `unrolled`: with parameters of `unroll_params`."""
    shape, int32 = jax.ShapeDtypeStruct, jnp.int32
    moe, layers = spec.config.moe, len(spec.config.moe_layers)
    loads = (layers + 1, moe.num_experts * moe.matrices)
    tables = table_shapes(layout, max_num_seqs, max_model_len)
    params: StackParams = param_shapes(spec.config, "float32" if spec.dtype == jnp.float32 else "bfloat16")
    if unrolled:
        params = jax.eval_shape(functools.partial(unroll_params, rows=list), params)
    return (
        params,
        shape((layout.num_huge_pages(pool_bytes), layout.huge_page_bytes // WORD_BYTES), jnp.uint16),
        shape((layers * moe.num_experts * moe.matrices, spec.expert_view.words), jnp.uint16),
        {name: shape(size, int32) for name, size in tables.items()},
        ExpertTables(
            pages=shape((layers, moe.num_experts, moe.matrices), int32),  # type: ignore[arg-type]
            loads=PageLoads(*(shape(size, int32) for size in (loads, loads, (layers + 1,), ()))),  # type: ignore[arg-type]
        ),
        jax.tree.map(lambda array: shape(array.shape, array.dtype), empty_batch(bucket)),
        shape((max_num_seqs,), int32),
    )


def workspace_bytes(
    spec: ModelSpec, layout: PageLayout, *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
) -> int:
    """Device memory that the largest step takes beside pool, weights and tables.

    Compiles it and the sampler, with a pool of a nominal size. Everything is given back when the last program that uses it
    has been enqueued: results before the next step is, what a program needs meanwhile at once. So of a step and the sampler
    the larger counts.
    """
    bucket = bucket_for(max_num_batched_tokens, max_num_seqs)
    shapes = step_shapes(
        spec,
        layout,
        bucket,
        pool_bytes=NOMINAL_POOL_BYTES,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    lowered = step.lower(*shapes, spec=spec, decode=bucket.decode)
    forward = lowered.compile(_compiler_options()).memory_analysis()
    assert forward is not None
    results = forward.output_size_in_bytes - forward.alias_size_in_bytes
    sampling = sampler.workspace_bytes(bucket.rows, spec.config.vocab_size)
    return results + max(forward.temp_size_in_bytes, sampling)


def _compiler_options() -> dict[str, Any] | None:
    return GPU_COMPILER_OPTIONS if jax.default_backend() == "gpu" else None


def table_shapes(
    layout: PageLayout, max_num_seqs: int, max_model_len: int
) -> dict[str, tuple[int, int, int]]:
    """Shapes `[tables, slots, width]` of the page tables."""
    shapes = {}
    for placed in layout.sequence_kinds:
        tokens = placed.kind.page_tokens
        width = -(-max_model_len // tokens) if tokens else 1
        shapes[placed.kind.name] = (placed.tables, max_num_seqs, width)
    return shapes


def pack(chunks: Sequence[Chunk]) -> tuple[PackedBatch, Bucket]:
    """Pack chunks into the smallest bucket that holds them. Numpy arrays that nobody else holds."""
    slots, ids, starts = zip(*chunks, strict=True)
    return pack_rows(slots, starts, list(map(len, ids)), list(itertools.chain.from_iterable(ids)))


def pack_rows(
    slots: Sequence[int], starts: Sequence[int], num_tokens: Sequence[int], token_ids: Sequence[int]
) -> tuple[PackedBatch, Bucket]:
    """`pack` of chunks whose fields come apart: of each the slot, the start and the length, and the tokens of all."""
    lengths = np.array(num_tokens, np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    firsts, context, rows, tokens = ends - lengths, starts + lengths, len(slots), int(ends[-1])
    bucket = bucket_for(tokens, rows)
    packed = empty_batch(bucket)
    batch: Any = packed.unpack()  # views
    batch.token_ids[:tokens] = token_ids
    batch.positions[:tokens] = np.arange(tokens, dtype=np.int32) + np.repeat(starts - firsts, lengths)
    batch.rows[:tokens] = np.repeat(np.arange(rows, dtype=np.int32), lengths)
    batch.slots[:rows], batch.context_len[:rows] = slots, context
    batch.query_start[:rows], batch.query_start[rows:] = firsts, tokens
    batch.logit_tokens[:] = np.maximum(batch.query_start[1:] - 1, 0)
    return packed, bucket


def empty_batch(bucket: Bucket) -> PackedBatch:
    """A batch of nothing but padding, in a numpy array that nobody else holds."""
    values: Any = np.zeros(PackedBatch.size(bucket.tokens, bucket.rows), np.int32)
    batch = PackedBatch(values, bucket.tokens, bucket.rows)
    fields: Any = batch.unpack()
    fields.rows[:] = bucket.rows - 1
    return batch


def bucket_for(num_tokens: int, num_rows: int) -> Bucket:
    """The smallest bucket that holds a step. Tokens are powers of two, rows of prefills of sixteen."""
    if num_tokens == num_rows:
        least = MIN_DECODE_ROWS_ON_GPU if jax.default_backend() == "gpu" else 1
        rows = max(least, 1 << (num_rows - 1).bit_length())
        return Bucket(rows, rows, True)
    # Prefills vary in both sizes. Rows cost little beside their tokens, and every bucket takes seconds to compile.
    rows = MIN_PREFILL_SIZE
    while rows < num_rows:
        rows *= 16
    return Bucket(max(rows, 1 << (num_tokens - 1).bit_length()), rows, False)


def buckets(max_num_batched_tokens: int, max_num_seqs: int) -> Iterator[Bucket]:
    """Every bucket that steps within these limits can have."""
    # The fewest rows and the most tokens that fall into each size: a bucket that exists at all has such a step.
    rows = [n for n in (1, *(2**i + 1 for i in range(max_num_seqs.bit_length()))) if n <= max_num_seqs]
    tokens = {*(2**i for i in range(max_num_batched_tokens.bit_length())), max_num_batched_tokens}
    yield from dict.fromkeys(bucket_for(n, n) for n in rows)
    yield from dict.fromkeys(bucket_for(t, n) for t in sorted(tokens) for n in rows if n < t)


def _parts(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first, number, padded size) of the parts that `count` items are handled in; sizes ascend."""
    first = 0
    while first < count:
        left = count - first
        size = next((size for size in sizes if size >= left), sizes[-1])
        yield first, min(left, size), size
        first += size


def _keep_small_arrays_apart(device: Any) -> list[jax.Array]:
    """Make free places for small arrays on the device; returns what holds them apart.

    An array takes the smallest free place that has room for it. Batches and results, which come and go in every step, would
    begin in the place that a step's temporaries have just left and push those on, and a GPU's graph records every kernel
    anew whose temporaries have moved: 2.0 ms of the host for 0.7 in 150 kernels (`benchmarks/results/engine.md`).
    """
    places, between = [], []
    for _ in range(SMALL_ARRAYS):
        places.append(jnp.zeros(SMALL_ARRAY_BYTES, jnp.uint8, device=device))
        between.append(jnp.zeros((), jnp.uint8, device=device))
    jax.block_until_ready((places, between))
    return between  # the places are free again with the end of their arrays


def _wait(running: dict[str, jax.Array]) -> None:
    jax.block_until_ready(running)


class ServingLoop:
    """Owns everything on the device: one pool, the page tables, the resident parameters.

    Args:
        spec: the model and its views of the pool.
        params: resident parameters as `models.stack.stack_params` returns them.
        host_pages: uint16 `[pages, words]`, every expert page in (layer, expert, matrix) order; kept, never written.
        layout: of the pool; its `num_huge_pages` rows include the scratch page.
        max_num_seqs: slots of the page tables.
        max_model_len: tokens that a slot's pages hold, at most.
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
        cache: Path | None = None,
    ):
        self.spec, self.max_model_len = spec, max_model_len
        self._device = jax.devices()[0]
        self._on_gpu = self._device.platform == "gpu"
        # What runs still when Python ends would want to give memory back to it, and bring the process down.
        self._running: dict[str, jax.Array] = {}
        weakref.finalize(self, _wait, self._running)
        self._between_small_arrays = _keep_small_arrays_apart(self._device) if self._on_gpu else None
        # Everything is bound to the device from the start: what comes out of a step is, and programs tell the two apart.
        params, on_host = dict(params), {}
        if self._on_gpu and not spec.config.tie_word_embeddings:
            # A token takes one row: 4 KB over PCIe for 0.6 GiB of the device.
            on_host["embedding"] = page_locked_copy(params.pop("embedding"))
        self.params: StackParams = jax.device_put(params, self._device) | on_host
        # Layers in a loop are dispatched one by one, which takes longer than a decode; prefills, of which there are many
        # more buckets, give the host that time, and compile sooner.
        self._decode_params = unroll_params(self.params, device_rows) if self._on_gpu else self.params
        self.host_pages: HostPages = device_view(host_pages)
        self.pool: Pool = jax.device_put(
            _empty_pool(num_huge_pages, layout.huge_page_bytes // WORD_BYTES), self._device
        )
        self.last_tokens: Int32[Array, " Q"] = jnp.zeros(max_num_seqs, jnp.int32, device=self._device)
        self.tables: dict[str, PageTable] = {
            name: jnp.zeros(shape, jnp.int32, device=self._device)
            for name, shape in table_shapes(layout, max_num_seqs, max_model_len).items()
        }
        self._loading_blocks = self._put(np.array(LOADING_BLOCKS, np.int32))
        moe, layers = spec.config.moe, len(spec.config.moe_layers)
        self.set_experts(
            np.full((layers, moe.num_experts, moe.matrices), HOST, np.int32),
            np.zeros((layers, 0), np.int32),
            np.zeros((2, 0, moe.matrices), np.int32),
        )
        # What layers and functions of one's own do, no key could tell.
        kept = None
        if cache is not None and made_here(spec, stack.EXTENSIONS):
            kept = CompiledSteps(cache, self._program_key())
        # On a CPU, loops of the same model share what `jit` has compiled.
        self._programs = Programs(kept, _compiler_options(), shared=not self._on_gpu)
        self._sampler = Sampler(self._programs, spec.config.vocab_size)

    @property
    def late_compilations(self) -> int:
        """Programs that had to be compiled when they were first run, although `warm_up` was called."""
        return self._programs.late

    def update_tables(self, updates: Mapping[str, tuple[HostIntArray, HostIntArray]]) -> None:
        """Write page ids `[U]` at (table, slot, column) `[U, 3]` of each named kind's tables."""
        for kind, (index, pages) in updates.items():
            for first, count, size in _parts(len(pages), UPDATE_SIZES):
                # Padding goes past the end, where a scatter drops it.
                where = np.full((size, 3), np.iinfo(np.int32).max, np.int32)
                where[:count] = index[first : first + count]
                part = np.zeros(size, np.int32)
                part[:count] = pages[first : first + count]
                self.tables[kind] = _scatter(self.tables[kind], where, part)

    def set_experts(self, pages: HostIntArray, loads: HostIntArray, buffer_pages: HostIntArray) -> None:
        """Set what the following steps read.

        Args:
            pages: `[L, E, M]` pool page of each matrix or HOST, loading buffers overlaid.
            loads: `[L, B]` experts to copy into the buffers of set `layer % 2` before the layer computes, in the order of
                the buffers; -1 behind them is none.
            buffer_pages: `[2, B, M]` pages of the two sets; of as many buffers as the layer with the most loads needs.
        """
        layers, experts, matrices = pages.shape
        loads = loads[:, : buffer_pages.shape[1]]
        loading, rows = loads >= 0, np.arange(layers)
        first = (rows[:, None] * experts + loads) * matrices
        # As wide as the layer whatever B is, so that no setting of the buffers changes a compiled shape.
        sources = np.zeros((layers + 1, experts * matrices), np.int32)
        targets, counts = np.zeros_like(sources), np.zeros(layers + 1, np.int32)
        width = loads.shape[1] * matrices
        page, buffer = first[..., None] + np.arange(matrices), buffer_pages[rows % 2, : loads.shape[1]]
        sources[:layers, :width] = np.where(loading[..., None], page, 0).reshape(layers, width)
        targets[:layers, :width] = np.where(loading[..., None], buffer, 0).reshape(layers, width)
        counts[:layers] = loading.sum(axis=1) * matrices
        self._shown, self._experts_in_place = (pages.copy(), loads.copy()), None
        # Not `jnp.array(pages)`: on a CPU that reads aligned memory in place, and copies it behind the running step.
        shown, sources, targets, counts = self._put((self._shown[0], sources, targets, counts))
        self.experts = ExpertTables(
            pages=shown, loads=PageLoads(sources, targets, counts, self._loading_blocks)
        )

    @property
    def experts_in_place(self) -> ExpertTables:
        """`experts` without loads, for steps that read in place: made when the first of them comes."""
        if self._experts_in_place is None:
            pages, loads = self._shown
            in_place = pages.copy()
            layer, place = np.nonzero(loads >= 0)
            in_place[layer, loads[layer, place]] = HOST
            none = np.zeros(len(pages) + 1, np.int32)
            self._experts_in_place = ExpertTables(
                pages=self._put(in_place), loads=self.experts.loads._replace(counts=self._put(none))
            )
        return self._experts_in_place

    def _put(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self._device)

    def copy_experts(self, copies: Sequence[ExpertCopy]) -> None:
        """Copy experts from host memory into their pool pages, before the next step."""
        if not copies:
            return
        moe = self.spec.config.moe
        targets = np.array([copy.pages for copy in copies], np.int32).reshape(-1)
        first = np.array([(c.layer * moe.num_experts + c.expert) * moe.matrices for c in copies], np.int32)
        sources = (first[:, None] + np.arange(moe.matrices, dtype=np.int32)).reshape(-1)
        for begin, count, size in _parts(len(targets), (COPY_PAGES,)):
            ids = (np.resize(array[begin : begin + count], size) for array in (sources, targets))
            self.pool = _load_pages(self.pool, self.host_pages, *ids, np.int32(count))

    def move_experts(self, moves: Sequence[PageMove]) -> None:
        """Copy expert pages elsewhere in the pool, one after another, before the next step and its other copies."""
        if not moves:
            return
        pages = np.array(moves, np.int32)
        for begin, count, size in _parts(len(pages), (COPY_PAGES,)):
            ids = (np.resize(pages[begin : begin + count, column], size) for column in (0, 1))
            self.pool = _move_pages(self.pool, self.spec.expert_view, *ids, np.int32(count))

    def warm_up(self, buckets: Sequence[Bucket], progress: Callable[[float, str], None]) -> None:
        """Compile the steps of these buckets, several at a time, and everything else that a step may need.

        `progress` is told the fraction done and what is done. After this, `late_compilations` counts what came without:
        steps of other buckets, and more log-probabilities than the server gives.
        """
        tasks: list[Callable[[], Any]] = [functools.partial(self._compile, bucket) for bucket in buckets]
        for rows in sorted({bucket.rows for bucket in buckets}):
            tasks += self._sampler.tasks(rows)
        tasks += self._prompt_logprob_tasks(sorted({bucket.tokens for bucket in buckets}))
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            try:
                futures = [threads.submit(task) for task in tasks]
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    progress(done / len(tasks), f"compiling {len(buckets)} shapes of steps")
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        nowhere = np.full((max(UPDATE_SIZES), 3), np.iinfo(np.int32).max, np.int32)
        for kind in self.tables:
            for size in UPDATE_SIZES:
                self.update_tables({kind: (nowhere[:size], np.zeros(size, np.int32))})
        for rows in {bucket.rows for bucket in buckets}:
            slots = jnp.full(rows, self.last_tokens.shape[0], jnp.int32, device=self._device)
            self.last_tokens = _remember(self.last_tokens, slots, jnp.zeros_like(slots))
        zero, ids = np.int32(0), np.zeros(COPY_PAGES, np.int32)
        self.pool = _load_pages(self.pool, self.host_pages, ids, ids, zero)
        self.pool = _move_pages(self.pool, self.spec.expert_view, ids, ids, zero)

    def _compile(self, bucket: Bucket) -> None:
        """Find or compile the step of a bucket. Thread-safe."""
        arguments = (*self._arguments(bucket, self.experts), empty_batch(bucket), self.last_tokens)
        self._programs.compile(_name(bucket), step, *arguments, spec=self.spec, decode=bucket.decode)

    def _arguments(self, bucket: Bucket, experts: ExpertTables) -> tuple[Any, ...]:
        """What a step takes first."""
        params = self._decode_params if bucket.decode else self.params
        return params, self.pool, self.host_pages, self.tables, experts

    def _program_key(self) -> Any:
        """All that tells the steps of a bucket apart, beside the code."""
        arguments = (self.params, self.pool, self.host_pages, self.tables, self.experts, self.last_tokens)
        shapes = jax.tree.map(lambda array: (array.shape, str(array.dtype)), arguments)
        return self.spec, GPU_COMPILER_OPTIONS, implementation.device_refusal(), shapes

    def _prompt_logprob_tasks(self, tokens: Sequence[int]) -> Iterator[Callable[[], Any]]:
        shape, int32 = jax.ShapeDtypeStruct, jnp.int32
        width, dtype = self.spec.config.hidden_size, self.spec.dtype
        rows, targets = shape((PROMPT_ROWS, width), dtype), shape((PROMPT_ROWS,), int32)
        for count in tokens:
            hidden = shape((count, width), dtype)
            yield functools.partial(self._programs.compile, f"rows-{count}", _take_rows, hidden, targets)
        for num_logprobs in {logprob_width(num, self.spec.config.vocab_size) for num in LOGPROB_WIDTHS}:
            yield functools.partial(
                self._programs.compile, f"prompt-logprobs-{num_logprobs}", prompt_logprobs,
                self.params, rows, targets, spec=self.spec, num_logprobs=num_logprobs,
            )  # fmt: skip

    def run(self, packed: tuple[PackedBatch, Bucket], *, loads_ahead: bool = True) -> StepOutputs:
        """Run one step. `loads_ahead`: it fills the loading buffers, else it reads in place what they would hold."""
        batch, bucket = packed
        experts = self.experts if loads_ahead else self.experts_in_place
        arguments = (*self._arguments(bucket, experts), batch, self.last_tokens)
        self.pool, self.last_tokens, outputs = self._programs(
            _name(bucket), step, *arguments, spec=self.spec, decode=bucket.decode
        )
        self._running["step"] = outputs.slots
        return outputs

    def sample(
        self, outputs: StepOutputs, inputs: SamplingInputs, features: SamplingFeatures
    ) -> SampledTokens:
        """Choose the next token of each row, as `build_sampling_inputs` describes them; the next step may follow at once.

        Without this call, the next step goes on with `outputs.greedy`.
        """
        sampled = self._sampler(outputs.logits, inputs, features)
        self.last_tokens = _remember(self.last_tokens, outputs.slots, sampled.token_ids)
        self._running["sampler"] = sampled.token_ids
        return sampled

    def prompt_logprobs(
        self, hidden: Hidden, first: int, targets: Sequence[int], num_logprobs: int
    ) -> Iterator[tuple[int, TokenLogprobs]]:
        """Log-probabilities of `targets` after hidden states `first`, `first + 1`, ...; PROMPT_ROWS at a time.

        Each part with the number of its rows that count.
        """
        width = logprob_width(num_logprobs, self.spec.config.vocab_size)
        for begin in range(0, len(targets), PROMPT_ROWS):
            part = np.zeros(PROMPT_ROWS, np.int32)
            count = min(PROMPT_ROWS, len(targets) - begin)
            part[:count] = targets[begin : begin + count]
            index = np.minimum(first + begin + np.arange(PROMPT_ROWS, dtype=np.int32), hidden.shape[0] - 1)
            rows = self._programs(f"rows-{hidden.shape[0]}", _take_rows, hidden, index)
            logprobs = self._programs(
                f"prompt-logprobs-{width}", prompt_logprobs,
                self.params, rows, part, spec=self.spec, num_logprobs=width,
            )  # fmt: skip
            yield count, logprobs


def _name(bucket: Bucket) -> str:
    return f"{bucket.tokens}-{bucket.rows}-{'decode' if bucket.decode else 'prefill'}"
