"""Shape notation used by every annotation in the package: learn it here once.

Letters of array shapes (all sizes are static inside one jitted step):

    T  tokens of a step, packed over sequences        S  rows of the batch (sequences of a step)
    Q  slots (`max_num_seqs`)                         W  width of a page table, in pages
    L  layers of one kind                             G  page tables of one kind (layers / layers per page)
    E  experts of a layer                             K  experts chosen per token
    M  matrices of an expert (3: w1 w3 w2; 2: ungated)  B  experts of one loading-buffer set
    d  hidden size                                    f  width of one expert
    H  query heads                                    N  key/value heads      h  head dimension
    V  vocabulary                                     P  pages of one kind in the pool
"""

import jax
import numpy as np
from jaxtyping import Bool, Float, Int32, UInt16

Pool = UInt16[jax.Array, "huge_pages words"]
"""The page pool: one row of 16-bit words per huge page. Row 0 is scratch."""

HostPages = UInt16[jax.Array, "host_pages page_words"]
"""Expert pages in host memory, in (layer, expert, matrix) order."""

Hidden = Float[jax.Array, "T d"]
Queries = Float[jax.Array, "T H h"]
Keys = Float[jax.Array, "T N h"]
Logits = Float[jax.Array, "S V"]

TokenIds = Int32[jax.Array, " T"]
PageTable = Int32[jax.Array, "G Q W"]
ExpertTable = Int32[jax.Array, "L E M"]
RouterCounts = Int32[jax.Array, "L E"]

HostIntArray = Int32[np.ndarray, "..."]
HostMask = Bool[np.ndarray, "..."]
