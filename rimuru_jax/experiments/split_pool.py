"""A pool that is cut once into a region for each kind of page, as engines do that have one memory for each."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rimuru_jax.host.allocator import PageAllocator
from rimuru_jax.host.page_layout import EXPERT
from rimuru_jax.host.pool_plan import PoolPlan


class SplitAllocator(PageAllocator):
    """Each kind that requests hold has so many units, and none of another's.

    Args:
        units: of each kind, those whose pages are on their way back included.
    """

    def __init__(self, plan: PoolPlan, units: Mapping[str, int]) -> None:
        super().__init__(plan.layout, plan.num_huge_pages)
        self.units = dict(units)

    def allocate_each(
        self, demands: Sequence[tuple[int, Mapping[str, int]]]
    ) -> list[dict[str, npt.NDArray[np.int32]]]:
        allowed = len(demands)
        while allowed and self._lacking(demands[:allowed]):
            allowed -= 1
        return super().allocate_each(demands[:allowed])

    def shortfall(self, demands: Sequence[tuple[int, Mapping[str, int]]]) -> int:
        pages = super().shortfall(demands)
        lacking = self._lacking(demands)
        return max(pages, lacking) if lacking else pages

    def _lacking(self, demands: Sequence[tuple[int, Mapping[str, int]]]) -> int:
        """Expert-sized pages that the demands lack in their own regions."""
        stores = {store.name: store for store in self._stores}
        page, missing = self.layout[EXPERT].stride_bytes, 0
        for name, limit in self.units.items():
            placed = self.layout[name]
            held = stores[name].num_held + stores[name].num_pending
            more = held + sum(demand.get(name, 0) for _, demand in demands) - limit
            missing += max(0, -(-more * placed.stride_bytes * placed.kind.run // page))
        return missing


def even_split(plan: PoolPlan, tokens: int) -> dict[str, int]:
    """Units of each kind when what experts leave is cut for as many requests of `tokens` tokens as fit."""
    layout = plan.layout
    requests = plan.concurrency(tokens)
    return {placed.kind.name: max(requests, 1) * placed.units_for(tokens) for placed in layout.sequence_kinds}
