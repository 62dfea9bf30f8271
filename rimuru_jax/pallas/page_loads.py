"""Host pages that a step copies into loading buffers, layer by layer."""

from typing import NamedTuple

from jaxtyping import Array, Int32


class PageLoads(NamedTuple):
    """Row l is copied before layer l computes: by the kernel that computes layer l - 1, while it does so."""

    sources: Int32[Array, "L+1 loads"]
    """Host pages. Row L is empty."""
    targets: Int32[Array, "L+1 loads"]
    """Pages of the pool, none of which the layer before reads."""
    counts: Int32[Array, " L+1"]
    """Copies of each row; what follows in the row is meaningless."""
    blocks: Int32[Array, ""]
    """Thread blocks of a kernel that copy while the others compute."""
