"""What the stages of routing on Hopper share: the sizes of a call, and arrays over the warps of a warpgroup."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas import mosaic_elements
from rimuru_jax.pallas.moe_routing.scoring import Scoring

LANES = 32
WARPS = 4
THREADS = WARPS * LANES

ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, LANES), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""[4, n]: a row for each warp of a warpgroup, over its lanes."""
ROW_RESULTS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,), (1,))), warp_dims=(-2,), lane_dims=(plgpu.Replicated(LANES),), vector_dim=-1
)
"""[4]: a number for each row of such an array, known to all its lanes."""
LINE = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS,), (LANES,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""[n]: over the threads of a warpgroup."""

TAKEN = np.int32(-(2**31))
"""Below the key of every number."""
LOWEST = np.int32(-(2**31) + 1)
MINUS_INFINITY = np.int32(np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one call is computed."""

    block: int
    """Tokens of a thread block."""
    warpgroups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is static in one call."""

    tokens: int
    experts: int
    top_k: int
    tile: int
    max_tiles: int
    scoring: Scoring
    biased: bool
    config: Config
    interpret: Any

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.tokens, self.config.block)

    @property
    def width(self) -> int:
        """Experts, rounded up to whole lines of threads."""
        return pl.cdiv(self.experts, THREADS) * THREADS

    def read(self, ref, index):
        return mosaic_elements.read(ref, index, layout_of(index), self.interpret)

    def write(self, ref, index, values, mask=None):
        mask = index >= 0 if mask is None else mask
        mosaic_elements.write(ref, index, values, mask, layout_of(index), self.interpret)


def layout_of(x):
    if x.ndim == 2:
        return ROWS
    return ROW_RESULTS if x.shape[0] == WARPS else LINE


def line_index(n: int = THREADS):
    """[n]: 0 .. n - 1"""
    return plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=LINE)


def row_index(n: int):
    """[4, n]: the number of the row"""
    return plgpu.broadcasted_iota(jnp.int32, (WARPS, n), 0, layout=ROWS)


def column_index(n: int):
    """[4, n]: the number of the column"""
    return plgpu.broadcasted_iota(jnp.int32, (WARPS, n), 1, layout=ROWS)


def select(condition, x, y):
    """`jnp.where` of an array or a scalar of the kernel; a scalar in the first place would decide the signedness."""
    if condition.ndim == 0:
        return jnp.where(condition, x, y)
    x = plgpu.layout_cast(jnp.broadcast_to(x, condition.shape), layout_of(condition))
    return jnp.where(condition, x, y)


def spread(x, columns: int):
    """[4] -> [4, columns]"""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (WARPS, columns), (0,)), ROWS)


def key_of(x):
    """Integers in the order of the floats, above TAKEN; as in `lax.top_k`, 0 is above -0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)


def number_of(key):
    """The inverse of `key_of`."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def together(barrier):
    """Wait until all warpgroups of the block are here; then each sees what the others wrote."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
