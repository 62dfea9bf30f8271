"""Norm and rotation of queries and keys, and writing keys and values: checks and choice of implementation."""

from jaxtyping import Array, Float, Float32, Int32

from rimuru_jax.array_types import Pool, Queries
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.qk_norm_rope_cache import mosaic_gpu, reference
from rimuru_jax.pallas.qk_norm_rope_cache.head_norm import HeadNorm


def qk_norm_rope_cache(
    qkv: Float[Array, "T n"],
    pool: Pool,
    view: MemoryView,
    page_table: Int32[Array, "S W"],
    rows: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    query_start: Int32[Array, " S+1"],
    *,
    num_heads: int,
    head_norm: HeadNorm | None = None,
    rotation: tuple[Float32[Array, "T half"], Float32[Array, "T half"]] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Queries, Pool]:
    """Queries ready for attention, and the pool with the tokens' keys and values in one layer's pages.

    Queries and keys are normalised, then rotated. `qkv` is rounded to the view's dtype before anything else, and
    results of norm and rotation are.

    Args:
        qkv: `[T, (H + 2N) h]`, heads of queries, keys and values side by side, in float32 or the view's dtype. In
            `[T, (2H + 2N) h]` a gate stands behind each head's query, and is passed over.
        pool: the page pool, donated or carried by the caller so that it is written in place.
        view: pages `[2 (K, V), N, page_tokens, h]`.
        page_table: page of each `page_tokens` tokens of a row.
        rows: row of each token, of padding tokens any.
        positions: position of each token in its row, of padding tokens any that the page table has.
        query_start: the last entry counts the tokens; those from there on are padding, which may or may not be written
            to page 0 (scratch), and whose queries are meaningless.
        head_norm: None: queries and keys stay as they are.
        rotation: cosines and sines of each token: dimension i turns with dimension `i + half`, those from `2 half` on
            stay. None: no rotation.

    Returns:
        Queries `[T, H, h]` in the view's dtype, and the pool.
    """
    if len(view.page_shape) != 4 or view.page_shape[0] != 2:
        raise ValueError(f"KV pages have shape {view.page_shape}, but (2, N, page_tokens, h) is wanted")
    kv_heads, h = view.page_shape[1], view.page_shape[3]
    widths = [(heads + 2 * kv_heads) * h for heads in (num_heads, 2 * num_heads)]
    if qkv.shape[1] not in widths:
        raise ValueError(
            f"qkv has {qkv.shape[1]} columns, but {num_heads} query heads and KV pages of shape {view.page_shape} "
            f"want {widths[0]}, or {widths[1]} with gates"
        )
    if head_norm is not None and head_norm.weights.shape != (2 * h,):
        raise ValueError(
            f"weights of the norm have shape {head_norm.weights.shape}, but heads of {h} want ({2 * h},)"
        )
    if rotation is not None and 2 * rotation[0].shape[1] > h:
        raise ValueError(f"a rotation of {2 * rotation[0].shape[1]} dimensions does not fit heads of {h}")
    refusal = mosaic_gpu.refusal(qkv, view, None if rotation is None else rotation[0].shape[1])
    chosen = resolve("qk_norm_rope_cache", implementation, ("reference", "mosaic_gpu"), refusal=refusal)
    operator = mosaic_gpu.qk_norm_rope_cache if chosen == "mosaic_gpu" else reference.qk_norm_rope_cache
    return operator(
        qkv,
        pool,
        view,
        page_table,
        rows,
        positions,
        query_start,
        num_heads=num_heads,
        head_norm=head_norm,
        rotation=rotation,
    )
