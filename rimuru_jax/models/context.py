"""What every layer of a step sees: the batch, the tables, and where each kind of state lies in the pool."""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from rimuru_jax.array_types import ExpertTable, HostPages, PageTable, TokenIds
from rimuru_jax.host.page_layout import EXPERT, PageLayout
from rimuru_jax.models.config import Attention, ModelConfig, Rotary
from rimuru_jax.models.layers import rotation
from rimuru_jax.pallas.memory_view import WORD_BYTES, MemoryView
from rimuru_jax.pallas.page_loads import PageLoads

type LayerParams = Mapping[str, Array]
type PageTables = Mapping[str, PageTable]
"""By page kind."""


@struct.dataclass
class ModelSpec:
    """Everything static about a model in a pool; hashable, so it can be a static argument of `jax.jit`."""

    config: ModelConfig = struct.field(pytree_node=False)
    expert_view: MemoryView = struct.field(pytree_node=False)
    state_views: tuple[tuple[MemoryView, int], ...] = struct.field(pytree_node=False)
    """For each kind of sequence state: a page of one layer, and how many layers share a page of the tables."""
    dtype: Any = struct.field(pytree_node=False)
    """Activations and stored weights."""
    experts_on_host: bool = struct.field(pytree_node=False, default=False)
    """The device cannot hold all experts: whatever moves, steps read many in place."""

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        layout: PageLayout,
        dtype: Any,
        recurrent_dtype: Any = "float32",
        *,
        experts_on_host: bool = False,
    ) -> "ModelSpec":
        dtype, recurrent = jnp.dtype(dtype), jnp.dtype(recurrent_dtype)
        views = []
        for kind, (state, _) in config.states.items():
            placed = layout[kind]
            view = MemoryView(
                kind=kind,
                page_shape=state.shape_for(placed.kind.page_tokens),
                dtype=recurrent if state.recurrent else dtype,
                stride=placed.layer_stride_bytes // WORD_BYTES,
            )
            views.append((view, placed.layers_per_page))
        return cls(
            config=config,
            expert_view=MemoryView(
                kind=EXPERT,
                page_shape=(config.moe.intermediate_size, config.hidden_size),
                dtype=dtype,
                stride=layout[EXPERT].stride_bytes // WORD_BYTES,
            ),
            state_views=tuple(views),
            dtype=dtype,
            experts_on_host=experts_on_host,
        )

    def state_view(self, kind: str) -> tuple[MemoryView, int]:
        """The entry of `state_views` for a kind. Raises KeyError for a kind that no layer keeps."""
        for view, layers_per_page in self.state_views:
            if view.kind == kind:
                return view, layers_per_page
        raise KeyError(kind)


@struct.dataclass
class Batch:
    """The tokens of one step: chunks of S sequences, packed. All int32, padded to a bucket."""

    token_ids: TokenIds
    positions: Int32[Array, " T"]
    """Position of each token in its sequence."""
    rows: Int32[Array, " T"]
    """Batch row of each token; S - 1 for padding."""
    slots: Int32[Array, " S"]
    """Row of each sequence in the page tables."""
    query_start: Int32[Array, " S+1"]
    """Row s owns tokens query_start[s] to query_start[s + 1]; the last entry counts the real tokens."""
    context_len: Int32[Array, " S"]
    """Tokens of a row once this step is done; 0 for padding rows."""
    logit_tokens: Int32[Array, " S"]
    """Token of each row whose logits are wanted: its last."""


@struct.dataclass
class PackedBatch:
    """A `Batch` in one array, field after field: every array that a step is given is sent to the device on its own."""

    values: Int32[Array, " n"]
    tokens: int = struct.field(pytree_node=False)
    rows: int = struct.field(pytree_node=False)

    @classmethod
    def size(cls, tokens: int, rows: int) -> int:
        """Numbers in a batch of these sizes."""
        return sum(cls._sizes(tokens, rows))

    @staticmethod
    def _sizes(tokens: int, rows: int) -> tuple[int, ...]:
        return tokens, tokens, tokens, rows, rows + 1, rows, rows

    def unpack(self) -> Batch:
        """The fields; of a numpy array they are views."""
        ends = list(itertools.accumulate(self._sizes(self.tokens, self.rows)))
        return Batch(*(self.values[first:end] for first, end in zip([0, *ends], ends, strict=False)))


@struct.dataclass
class ExpertTables:
    """Where the step finds expert weights, and which it copies into loading buffers on the way."""

    pages: ExpertTable
    """Pool page of each matrix, HOST (-1) if it is only in host memory. Loading buffers are overlaid."""
    loads: PageLoads


class StepContext(NamedTuple):
    """A step, as its layers see it.

    Layers of one kind of state are numbered among themselves: `index` below is the number of the layer among those
    that keep that kind, a traced integer when layers run in a loop.
    """

    spec: ModelSpec
    batch: Batch
    tables: PageTables
    experts: ExpertTables
    host_pages: HostPages
    decode: bool
    """At most one token per row."""
    valid: Bool[Array, " T"]
    """Which tokens are no padding."""
    has_state: Bool[Array, " S"]
    """Rows that continue a sequence; the others start from zeros, whatever their pages hold."""
    rotations: Mapping[tuple[Rotary, int], tuple[Float32[Array, "T half"], Float32[Array, "T half"]]]
    """Cosines and sines of the tokens' positions, for each kind of rotation and head dimension that layers have."""

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        batch: Batch,
        tables: PageTables,
        experts: ExpertTables,
        host_pages: HostPages,
        *,
        decode: bool,
    ) -> "StepContext":
        query_len = batch.query_start[1:] - batch.query_start[:-1]
        mixers = [layer.mixer for layer in spec.config.layers if isinstance(layer.mixer, Attention)]
        # In the order of layers: a program must not depend on how a process hashes.
        rotaries = dict.fromkeys((m.rotary, m.head_dim) for m in mixers if m.rotary is not None)
        return cls(
            spec=spec,
            batch=batch,
            tables=tables,
            experts=experts,
            host_pages=host_pages,
            decode=decode,
            # Here and not where they are used: layers run in a loop, which would compute them each time.
            valid=jnp.arange(batch.token_ids.shape[0]) < batch.query_start[-1],
            has_state=batch.context_len > query_len,
            rotations={kind: rotation(batch.positions, *kind) for kind in rotaries},
        )

    @property
    def max_query_len(self) -> int:
        """1 for a decode, else the most tokens that a row may have."""
        return 1 if self.decode else self.batch.token_ids.shape[0]

    def page_table(self, kind: str, index: Array) -> tuple[MemoryView, Int32[Array, "S W"]]:
        """One layer's view of the pool and the pages of each row, for a kind that grows with the tokens."""
        view, layers_per_page = self.spec.state_view(kind)
        # A table entry names a run of `layers_per_page` one-layer pages.
        pages = self.tables[kind][index // layers_per_page][self.batch.slots]
        return view, pages * layers_per_page + index % layers_per_page

    def state_pages(self, kind: str, index: Array) -> tuple[MemoryView, Int32[Array, " S"]]:
        """One layer's view of the pool and the (first) page of each row's state, for a kind of constant size.

        Padding rows get page 0, which is scratch.
        """
        view, pages = self.page_table(kind, index)
        return view, jnp.where(self.batch.context_len > 0, pages[:, 0], 0)
