"""RMS norm in plain jnp: that of the models, and the specification for kernels that contain one."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

type NormStyle = Literal["plain", "float32", "zero_centred"]


def rms_norm(
    x: Float[Array, "*batch n"], weight: Float[Array, " n"], eps: float, style: NormStyle = "plain"
) -> Float[Array, "*batch n"]:
    """`x / sqrt(mean(x^2) + eps)` in float32, times a weight.

    The styles are those of `ModelConfig.norm`: "plain" rounds to the dtype of x before it multiplies, "float32"
    after, and "zero_centred" like that by 1 + weight.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if style == "plain":
        return normed.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)
    factor = weight.astype(jnp.float32) + (1.0 if style == "zero_centred" else 0.0)
    return (normed * jnp.broadcast_to(factor, x.shape)).astype(x.dtype)
