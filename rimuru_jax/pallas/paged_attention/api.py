"""Paged attention: checks and choice of implementation."""

from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Pool, Queries
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.paged_attention import mosaic_gpu, reference

PREFILL_TILE = 32


def paged_attention(
    queries: Queries,
    pool: Pool,
    view: MemoryView,
    page_table: Int32[Array, "S W"],
    query_start: Int32[Array, " S+1"],
    context_len: Int32[Array, " S"],
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    implementation: Implementation | None = None,
) -> Queries:
    """Causal attention of ragged queries over each sequence's pages, softmax in float32.

    Row s owns queries `query_start[s]:query_start[s + 1]`; they are the last tokens of its context of
    `context_len[s]` tokens, whose keys and values are already in its pages. Prefill chunks and decodes mix.
    Grouped queries: head q reads key/value head `q // (H / N)`. Pages and rows past the context may hold anything,
    NaN included.

    Args:
        queries: `[T, H, h]`.
        pool: the page pool; `view` shows KV pages `[2, N, page_tokens, h]`.
        page_table: page of each `page_tokens` tokens of a row.
        query_start: non-decreasing; equal entries make an empty row. What queries past the last entry give is finite and meaningless.
        context_len: tokens of a row after this step, its queries included; 0 for an empty row.
        scale: factor of the scores.
        max_query_len: 1 when every row has at most one query (decode), else any larger number.
        sliding_window: a query sees this many tokens, itself included.
        sinks: a logit per head that joins the softmax denominator.
    """
    if len(view.page_shape) != 4 or view.page_shape[0] != 2 or view.page_shape[3] != queries.shape[2]:
        raise ValueError(f"queries of shape {queries.shape} do not fit KV pages of shape {view.page_shape}")
    if queries.shape[1] % view.page_shape[1]:
        raise ValueError(
            f"{queries.shape[1]} query heads are no multiple of {view.page_shape[1]} key/value heads"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}, but a query sees at least itself")
    chosen = resolve(
        "paged_attention",
        implementation,
        ("reference", "mosaic_gpu"),
        refusal=mosaic_gpu.refusal(queries, view, scale=scale),
    )
    if chosen == "mosaic_gpu":
        return mosaic_gpu.paged_attention(
            queries,
            pool,
            view,
            page_table,
            query_start,
            context_len,
            scale=scale,
            max_query_len=max_query_len,
            sliding_window=sliding_window,
            sinks=sinks,
        )
    return reference.paged_attention(
        queries,
        pool,
        view,
        page_table,
        query_start,
        context_len,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        tile=1 if max_query_len == 1 else min(PREFILL_TILE, queries.shape[0]),
    )
