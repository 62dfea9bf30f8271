"""What Mosaic kernels share that walk over chunks: one warpgroup fetches them into a ring, another computes."""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def slot_of(turn: Array, steps: int) -> Array:
    """Slot of the ring, which has `steps`, that a turn uses."""
    return lax.rem(turn, jnp.int32(steps))


def fetch_ring(
    count: Array, steps: int, ready: Any, consumed: Any, copies: Callable[[Array], Iterable[tuple[Any, Any]]]
) -> None:
    """The fetching warpgroup: `count` turns, as many of them ahead as the ring has slots.

    Args:
        count: turns, a run-time value.
        ready, consumed: barriers `[steps]`; one arrival at `ready` per copy, one at `consumed` by whoever computes.
        copies: of a turn, its sources in global memory and their rings in shared memory, `[steps, ...]`.
    """

    def fetch(turn, _):
        slot = slot_of(turn, steps)
        pl.when(turn >= steps)(lambda: plgpu.barrier_wait(consumed.at[slot]))

        @pl.when(turn < count)
        def _():
            for source, ring in copies(turn):
                plgpu.copy_gmem_to_smem(source, ring.at[slot], ready.at[slot])

        return ()

    # The last turns only wait, so that no barrier ends in a phase nobody has seen.
    lax.fori_loop(0, count + steps, fetch, ())
