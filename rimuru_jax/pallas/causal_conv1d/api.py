"""Causal depthwise convolution: checks and choice of implementation."""

from jaxtyping import Array, Bool, Float, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.causal_conv1d import mosaic_gpu, reference
from rimuru_jax.pallas.implementation import Implementation, resolve
from rimuru_jax.pallas.memory_view import MemoryView


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
    max_query_len: int,
    activation: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T c"], Pool]:
    """Each channel's convolution with its own kernel over the row's past inputs, in float32.

        out[t] = activation(bias + sum_j weight[:, kernel - 1 - j] * x[t - j])

    Inputs before the row's first token come from its state, the last `kernel - 1` inputs of the calls before; they
    lie in as many consecutive pages, newest last, and are read and written once. Prefill chunks of any length (also
    shorter than the state, whose rows then move up) and decodes mix. `pallas.ragged` says what the metadata means.

    Args:
        x: inputs, packed over rows.
        weight: the newest input's weight is the last column.
        pool: the page pool, donated or carried by the caller so that it is written in place.
        view: pages `[1, c]`, each one input of a state.
        max_query_len: 1 when every row has at most one token (decode), else any larger number.
        activation: "silu" or None.
        pages: first page of each row's state; 0 for padding rows, whose pages 0 .. kernel - 2 are scratch.

    Returns:
        Outputs in the dtype of x, and the pool. Outputs of padding tokens are finite and meaningless.
    """
    if view.page_shape != (1, x.shape[1]):
        raise ValueError(f"inputs of {x.shape[1]} channels do not fit conv pages of shape {view.page_shape}")
    if weight.shape[1] < 2:
        raise ValueError(f"a kernel of {weight.shape[1]} has no state, but at least 2 columns are wanted")
    if activation not in (None, "silu"):
        raise ValueError(f"activation is {activation!r}, but causal_conv1d knows 'silu' and None")
    refusal = mosaic_gpu.refusal(x, weight, view)
    chosen = resolve("causal_conv1d", implementation, ("reference", "mosaic_gpu"), refusal=refusal)
    arguments = x, weight, bias, pool, view, pages, query_start, has_state
    if chosen == "mosaic_gpu":
        return mosaic_gpu.causal_conv1d(*arguments, activation=activation, max_query_len=max_query_len)
    return reference.causal_conv1d(*arguments, activation=activation)
