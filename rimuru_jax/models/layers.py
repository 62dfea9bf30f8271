"""Building blocks of the decoder stack: pure functions of parameters and packed tokens `[T, d]`."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from rimuru_jax.array_types import Hidden
from rimuru_jax.models.config import ModelConfig, Rotary
from rimuru_jax.pallas.rms_norm import rms_norm

# Rows from which a GPU's product rounds its sums itself. With fewer, cuBLAS may split a sum, and would round the parts too.
_ROUNDED_BY_PRODUCT = 512

# Rows of a weight in one product: with many more, products on a CPU are up to ten times slower.
_CPU_CHUNK = 1024


def linear(
    x: Float[Array, "T n"],
    weight: Float[Array, "m n"],
    bias: Float[Array, " m"] | None = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """`x @ weight^T + bias`, accumulated in float32, in `dtype` or the dtype of x."""
    if jax.default_backend() == "cpu":
        y = _cpu_product(x.astype(jnp.float32), weight)
    else:
        rounds = len(x) >= _ROUNDED_BY_PRODUCT and bias is None and dtype is None
        y = lax.dot_general(
            x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype if rounds else jnp.float32
        )
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    return y.astype(dtype or x.dtype)


def _cpu_product(x: Float[Array, "T n"], weight: Float[Array, "m n"]) -> Float[Array, "T m"]:
    """The product in the form that XLA's CPU backend is fast at: float32, weights on the left, in small pieces.

    Only one piece of the weights is ever widened to float32 at a time.
    """

    def product(part: Array) -> Array:
        # The barrier keeps the conversion out of the product's inner loop.
        return lax.dot_general(
            lax.optimization_barrier(part.astype(jnp.float32)), x.T, (((1,), (0,)), ((), ()))
        )

    m, n = weight.shape
    if m <= _CPU_CHUNK:
        return product(weight).T

    def chunk(i, out):
        start = jnp.minimum(i * _CPU_CHUNK, m - _CPU_CHUNK)  # the last chunk overlaps the one before it
        part = lax.dynamic_slice(weight, (start, jnp.int32(0)), (_CPU_CHUNK, n))
        return lax.dynamic_update_slice(out, product(part).T, (jnp.int32(0), start))

    out = jnp.zeros((x.shape[0], m), jnp.float32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-m // _CPU_CHUNK)), chunk, out)


def norm(
    x: Float[Array, "*batch n"], weight: Float[Array, " n"], config: ModelConfig
) -> Float[Array, "*batch n"]:
    """The model's RMS norm."""
    return rms_norm(x, weight, config.rms_norm_eps, config.norm)


def mlp(x: Hidden, params: Mapping[str, Array], stem: str) -> Hidden:
    """A feed-forward by the parameters there are: `{stem}_gate_up` makes it SwiGLU, `{stem}_up` squared ReLU.

    `down @ (silu(gate @ x) * (up @ x))` with gate and up the halves of `gate_up`, or `down @ relu(up @ x)^2`.
    """
    if f"{stem}_gate_up" in params:
        gate, up = jnp.split(linear(x, params[f"{stem}_gate_up"]), 2, axis=-1)
        inner = jax.nn.silu(gate) * up
    else:
        inner = jnp.square(jax.nn.relu(linear(x, params[f"{stem}_up"])))
    return linear(inner, params[f"{stem}_down"])


def rotation(
    positions: Int32[Array, " T"], rotary: Rotary, head_dim: int
) -> tuple[Float32[Array, "T half"], Float32[Array, "T half"]]:
    """Cosines and sines at `positions` of the leading share of `head_dim` that is rotated."""
    frequencies, factor = rotary_frequencies(rotary, int(head_dim * rotary.fraction))
    angles = positions[:, None].astype(jnp.float32) * frequencies[None, :]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotary_frequencies(rotary: Rotary, rotated: int) -> tuple[Float32[Array, " half"], float]:
    """Angle per position of each of `rotated / 2` pairs, and the factor of cosines and sines.

    With YaRN (arXiv 2309.00071) fast pairs keep their angle, slow ones turn `factor` times slower, and between the two
    bounds (in turns over the original context) lies a linear ramp.
    """
    half = rotated // 2
    plain = rotary.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    yarn = rotary.yarn
    if yarn is None:
        return plain, 1.0

    def pair_of(turns: float) -> float:
        """The pair (a fraction) that makes so many turns over the original context."""
        length = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return half * math.log(length) / math.log(rotary.theta)

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (jnp.arange(half, dtype=jnp.float32) - low) / max(high - low, 1e-3)
    slow = jnp.clip(ramp, 0.0, 1.0)
    factor = yarn.attention_factor
    if factor is None:
        factor = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0
    return plain * (1.0 - slow) + plain / yarn.factor * slow, factor
