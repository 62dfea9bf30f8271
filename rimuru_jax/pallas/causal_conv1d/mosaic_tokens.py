"""Causal convolution of all tokens as if they were one row without a state, in Mosaic GPU, bound by memory.

    block = (512 channels, 128 tokens)    one warpgroup; a thread has 4 neighbouring channels and goes from token to token
    group = 8 tokens                      their loads come first, so that as many are under way from each thread
    registers                             taps, bias and the `kernel - 1` inputs before the token, in float32

Each input is read and converted once for all taps; only the `kernel - 1` before a block are read by two. No thread sees
what another wrote, so there is neither shared memory nor a barrier.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

THREADS = 128
CHANNELS = (4, 2, 1)
"""Of a thread, the first of these that fits. More are wider accesses, but fewer warps: a channel takes some 20 registers."""
GROUP = 8
"""Tokens whose loads are under way together."""
MOST_GROUPS = 16
"""Of a block."""
FEW_BLOCKS = 264
"""Two for each multiprocessor of an H200: with fewer, blocks are cut, lest few of them take long."""


def convolve_tokens(
    x: Float[Array, "T c"],
    taps: Float32[Array, "taps c"],
    end: Int32[Array, ""],
    *,
    activation: str | None,
    interpret: Any = None,
) -> Float[Array, "T c"]:
    """`activation(bias + sum_j taps[past - j] * x[t - j])` of each token t, in the dtype of x.

    Args:
        x: c must be a multiple of 128.
        taps: those of the kernel, the newest input's last, and then the bias.
        end: tokens that are no padding. Outputs of the others, and of the first `past`, are meaningless; they are finite
            where the inputs before `end` are.
    """
    (tokens, channels), past = x.shape, taps.shape[0] - 2
    per_thread = next(n for n in CHANNELS if channels % (n * THREADS) == 0)
    width = per_thread * THREADS
    groups = MOST_GROUPS
    while groups > 1 and pl.cdiv(tokens, groups * GROUP) * (channels // width) < FEW_BLOCKS:
        groups //= 2
    tile = groups * GROUP
    # Pallas would choose narrower accesses.
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=per_thread)

    def body(
        end,  # [1]
        x,  # [T, parts, width]
        taps,  # [kernel + 1, parts, width]
        out,  # [T, parts, width]
    ):
        part, first = lax.axis_index("part"), lax.axis_index("tile") * tile
        last = end[0] - 1

        def load(ref, row):
            return plgpu.load(ref.at[row, part], layout=layout, optimized=False)

        def store(token, values):
            def write():
                out[token, part] = values

            write() if tokens % tile == 0 else pl.when(token < tokens)(write)

        @pl.when(first <= last)
        def _():
            *weights, bias = (load(taps, i) for i in range(past + 2))

            def inputs(token, count):
                """Of `count` tokens; for padding those of the last token, which are finite."""
                return [load(x, jnp.clip(token + i, 0, last)) for i in range(count)]

            def group(turn, seen):
                token = first + turn * GROUP
                for i, new in enumerate(inputs(token, GROUP)):
                    seen = (*seen, new.astype(jnp.float32))
                    total = bias
                    for value, weight in zip(seen, weights, strict=True):
                        total += value * weight
                    store(token + i, activate(total, activation).astype(out.dtype))
                    seen = seen[1:]
                return seen

            before = tuple(value.astype(jnp.float32) for value in inputs(first - past, past))
            lax.fori_loop(0, groups, group, before)

        @pl.when(first > last)
        def _():
            zeros = plgpu.layout_cast(jnp.zeros((width,), out.dtype), layout)
            pl.loop(0, tile)(lambda i: store(first + i, zeros))

    shape = (-1, channels // width, width)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, *shape[1:]), x.dtype),
        grid=(channels // width, pl.cdiv(tokens, tile)),
        grid_names=("part", "tile"),
        # Two barriers around each store would keep the warps of a block together.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return kernel(end[None], x.reshape(shape), taps.reshape(shape)).reshape(tokens, channels)


def activate(x: Float32[Array, "..."], activation: str | None) -> Float32[Array, "..."]:
    return x / (1 + jnp.exp(-x)) if activation == "silu" else x
