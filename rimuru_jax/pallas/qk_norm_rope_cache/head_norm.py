"""The norm of each head's query and key."""

from typing import NamedTuple

from jaxtyping import Array, Float

from rimuru_jax.pallas.rms_norm import NormStyle


class HeadNorm(NamedTuple):
    """RMS norm over a head, as of `pallas.rms_norm`."""

    weights: Float[Array, " 2h"]
    """Of queries, then of keys."""
    eps: float
    style: NormStyle
