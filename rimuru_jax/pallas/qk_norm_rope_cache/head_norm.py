"""The norm of each head's query and key."""

from typing import NamedTuple

from jaxtyping import Array, Float

from rimuru_jax.pallas.rms_norm import NormStyle


class HeadNorm(NamedTuple):
    """RMS norm over a head, as of `pallas.rms_norm`."""

    q_weight: Float[Array, " h"]
    k_weight: Float[Array, " h"]
    eps: float
    style: NormStyle
