"""Building blocks of the decoder stack: pure functions of parameters and packed tokens `[T, d]`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Hidden, Keys
from rimuru_jax.models.config import Rotary

# Rows of a weight in one product: with many more, products on a CPU are up to ten times slower.
_CPU_CHUNK = 1024


def linear(
    x: Float[Array, "T n"], weight: Float[Array, "m n"], bias: Float[Array, " m"] | None = None
) -> Array:
    """`x @ weight^T + bias`, accumulated in float32, in the dtype of x."""
    if jax.default_backend() == "cpu":
        y = _cpu_product(x.astype(jnp.float32), weight)
    else:
        y = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    return y.astype(x.dtype)


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


def rms_norm(x: Float[Array, "*batch n"], weight: Float[Array, " n"], eps: float) -> Float[Array, "*batch n"]:
    """`x / sqrt(mean(x^2) + eps)` in float32, rounded to the dtype of x, times `weight`."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)


def swiglu(x: Hidden, gate_up: Float[Array, "gate_up d"], down: Float[Array, "d f"]) -> Hidden:
    """`down @ (silu(gate @ x) * (up @ x))`; gate and up are the halves of `gate_up`."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)


def rotate(x: Keys, positions: Int32[Array, " T"], rotary: Rotary) -> Keys:
    """Rotary embedding of queries or keys `[T, heads, h]` at `positions`, computed in float32.

    Source: Su et al. 2021, in the half-rotation layout of Hugging Face checkpoints: dimension i of the rotated part
    turns with dimension i + half.
    """
    rotated = int(x.shape[-1] * rotary.fraction)
    half = rotated // 2
    frequencies = rotary.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half:rotated], wide[..., rotated:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype)
