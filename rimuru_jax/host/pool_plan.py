"""How large a pool must be and what it can hold: the one capacity model behind the plan, the log and admission."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rimuru_jax.host.adjuster import RESERVED_EXPERTS, AdjusterPolicy
from rimuru_jax.host.allocator import BUFFERS, EXPERTS, PageAllocator
from rimuru_jax.host.page_layout import EXPERT, PageKind, PageLayout, format_bytes

type MemoryPolicy = Literal["static", "fixed", "elastic"]

PAGE_TOKENS = (16, 8, 4, 2, 1)
"""Tokens of a page that are tried when the user names none. 16 wastes nothing on any published model."""
TOLERATED_WASTE = 1 / 8


def choose_layout(kinds: Callable[[int], tuple[PageKind, ...]], page_tokens: int | None = None) -> PageLayout:
    """The layout for `page_tokens` tokens per page, or for the most that waste little of their parents.

    `kinds(page_tokens)` lists the model's page kinds. Raises ValueError when no layout works.
    """
    if page_tokens is not None:
        if page_tokens < 1:
            raise ValueError(f"block_size is {page_tokens} tokens, but a page holds at least 1")
        return PageLayout.plan(kinds(page_tokens))
    layouts, refusal = [], None
    for tokens in PAGE_TOKENS:
        try:
            layout = PageLayout.plan(kinds(tokens))
        except ValueError as error:
            refusal = error
            continue
        waste = max(
            (placed.waste for placed in layout.sequence_kinds if placed.kind.page_tokens), default=0.0
        )
        if waste <= TOLERATED_WASTE:
            return layout
        layouts.append((waste, layout))
    if not layouts:
        assert refusal is not None
        raise refusal
    return min(layouts, key=lambda entry: entry[0])[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool of some size and what it is used for."""

    layout: PageLayout
    num_huge_pages: int
    """Scratch page included."""
    memory_policy: MemoryPolicy
    num_experts: int
    """Experts per layer."""
    matrices: int
    expert_offload_limit: int
    """Experts per layer that may be away: 0 with the policy "static"."""
    buffer_experts: int
    """Experts of one loading-buffer set; there are two sets."""
    max_model_len: int
    """Tokens of the longest request, which fits into the pool when it is alone."""

    @property
    def page_bytes(self) -> int:
        """Bytes of an expert page."""
        return self.layout[EXPERT].stride_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_huge_pages * self.layout.huge_page_bytes

    @property
    def expert_pages(self) -> int:
        """Pages of all experts of the model."""
        return self.layout[EXPERT].kind.layers * self.num_experts * self.matrices

    @property
    def floor_pages(self) -> int:
        """Pages of the experts that are always resident."""
        return (
            self.layout[EXPERT].kind.layers * (self.num_experts - self.expert_offload_limit) * self.matrices
        )

    @property
    def buffer_pages(self) -> int:
        return 2 * self.buffer_experts * self.matrices

    @property
    def pages_kept_free(self) -> int:
        """Expert-sized pages that the first fill of the pool leaves: where the adjuster would neither shrink nor expand."""
        if self.memory_policy == "fixed":
            return self.num_huge_pages * self.layout.pages_per_huge(EXPERT)
        return 0 if self.memory_policy == "static" else (RESERVED_EXPERTS + 1) * self.matrices - 1

    def at_floor(self) -> PageAllocator:
        """A pool that holds nothing but the floor of residency and the loading buffers."""
        allocator = PageAllocator(self.layout, self.num_huge_pages)
        allocator.allocate(BUFFERS, {EXPERT: self.buffer_pages})
        allocator.allocate(EXPERTS, {EXPERT: self.floor_pages})
        return allocator

    def pages(self, name: str) -> int:
        """Pages of a kind that the whole pool would hold if nothing else were in it."""
        placed, huge_pages = self.layout[name], self.num_huge_pages - 1
        if placed.parent is None:
            return huge_pages * placed.units_per_parent
        parents = huge_pages * self.layout.pages_per_huge(placed.parent)
        return parents * placed.units_per_parent * placed.kind.run

    def describe(self) -> str:
        """The pool in words for the log at start-up: its pages by kind, what may move, and the knobs."""
        layers, limit, longest = (
            self.layout[EXPERT].kind.layers,
            self.expert_offload_limit,
            self.max_model_len,
        )
        all_experts = self.concurrency(longest, resident_experts=self.num_experts)
        kinds = ", ".join(
            f"{self.pages(placed.kind.name)} {placed.kind.name}" for placed in self.layout.kinds
        )
        lines = [
            f"{format_bytes(self.pool_bytes)} of pages, by kind alone: {kinds} "
            "(page_pool_bytes, or gpu_memory_utilization)",
            f"{layers} layers of {self.num_experts} experts, of which up to {limit} of a layer may be away "
            f"(memory_policy {self.memory_policy}, expert_offload_limit), loading buffers for up to 2 x "
            f"{self.buffer_experts} (loading_buffer_experts)",
            f"requests of {longest} tokens (max_model_len) at once: {all_experts} beside all experts, "
            f"{self.concurrency(longest)} beside the fewest",
        ]
        return "\n".join([*lines, self.layout.describe()])

    def concurrency(self, num_tokens: int, *, resident_experts: int | None = None) -> int:
        """Requests of `num_tokens` tokens that fit at once beside `resident_experts` per layer (default: the floor)."""
        held = self.floor_pages
        if resident_experts is not None:
            held = self.layout[EXPERT].kind.layers * resident_experts * self.matrices
        free = (self.num_huge_pages - 1) * self.layout.pages_per_huge(EXPERT) - self.buffer_pages - held
        return max(0, free // _pages_of_one(self.layout, num_tokens))


def plan_pool(
    layout: PageLayout,
    *,
    pool_bytes: int,
    memory_policy: MemoryPolicy,
    num_experts: int,
    num_experts_per_tok: int,
    matrices: int,
    expert_offload_limit: int | Literal["auto"],
    loading_buffer_experts: int,
    max_model_len: int | None,
    model_len_limit: int,
    adjuster_policy: AdjusterPolicy = "throughput",
) -> PoolPlan:
    """Settle the offload limit, the loading buffers and the longest request for a pool of `pool_bytes`.

    An offload limit of "auto" is the smallest that leaves room for the longest request; under "elastic" at least half
    of the experts may go, so that a burst has something to take, and under its policy "throughput", which weighs what it
    takes, all but those of one token. `max_model_len` None is the model's own limit or as
    much of it as fits. Raises ValueError, naming the least pool that would do, when one request cannot fit.
    """
    _check_arguments(
        memory_policy,
        num_experts,
        expert_offload_limit,
        loading_buffer_experts,
        max_model_len,
        model_len_limit,
    )
    num_huge_pages = layout.num_huge_pages(pool_bytes)
    length = max_model_len or model_len_limit

    def plan(limit: int, length: int) -> PoolPlan:
        return PoolPlan(
            layout=layout,
            num_huge_pages=num_huge_pages,
            memory_policy=memory_policy,
            num_experts=num_experts,
            matrices=matrices,
            expert_offload_limit=limit,
            buffer_experts=min(limit, loading_buffer_experts),
            max_model_len=length,
        )

    if memory_policy == "static":
        limits = [0]
    elif expert_offload_limit != "auto":
        limits = [expert_offload_limit]
    else:
        # At the least the experts of one token stay, so that a lone stream does not live on the host alone.
        least = num_experts // 2 if memory_policy == "elastic" else 0
        if memory_policy == "elastic" and adjuster_policy == "throughput":
            least = max(least, num_experts - num_experts_per_tok)
        limits = list(range(least, max(least, num_experts - num_experts_per_tok) + 1))
        limits += [num_experts] if limits[-1] < num_experts else []
    for limit in limits:
        if _fits(plan(limit, length)):
            return plan(limit, length)
    candidate = plan(limits[-1] if max_model_len is not None else _roomiest(plan, limits), length)
    if max_model_len is None and (fitting := _longest_fit(candidate)) > 0:
        return plan(candidate.expert_offload_limit, fitting)
    tokens = max_model_len or 2  # the shortest request: a token in, a token out
    needed = _least_bytes(candidate, tokens)
    raise ValueError(
        f"a page pool of {pool_bytes} bytes ({format_bytes(pool_bytes)}) is too small for one request of "
        f"{tokens} tokens with {num_experts - candidate.expert_offload_limit} of {num_experts} experts per layer "
        f"resident: page_pool_bytes must be at least {needed} ({format_bytes(needed)}), or raise expert_offload_limit "
        "or lower max_model_len"
    )


def _roomiest(plan: Callable[[int, int], PoolPlan], limits: list[int]) -> int:
    """The smallest limit under which a useful request fits, else the largest."""
    return next((limit for limit in limits if _longest_fit(plan(limit, 1)) >= 512), limits[-1])


def _pages_of_one(layout: PageLayout, num_tokens: int) -> int:
    """Expert-sized pages of a request that shares none of them."""
    allocator = PageAllocator(layout, 2 * layout.huge_page_multiple)
    demand = {placed.kind.name: placed.units_for(num_tokens) for placed in layout.sequence_kinds}
    return max(1, allocator.shortfall([(0, demand)]) + allocator.free_expert_pages)


def _spare_pages(plan: PoolPlan) -> int:
    capacity = (plan.num_huge_pages - 1) * plan.layout.pages_per_huge(EXPERT)
    return capacity - plan.floor_pages - plan.buffer_pages


def _fits(plan: PoolPlan) -> bool:
    if _spare_pages(plan) < 1:
        return False
    demand = {p.kind.name: p.units_for(plan.max_model_len) for p in plan.layout.sequence_kinds}
    return plan.at_floor().shortfall([(0, demand)]) <= 0


def _longest_fit(plan: PoolPlan) -> int:
    """Tokens of the longest request that fits, 0 for none."""
    if _spare_pages(plan) < 1:
        return 0
    allocator = plan.at_floor()

    def fits(tokens: int) -> bool:
        demand = {p.kind.name: p.units_for(tokens) for p in plan.layout.sequence_kinds}
        return allocator.shortfall([(0, demand)]) <= 0

    low, high = 0, plan.max_model_len if plan.max_model_len > 1 else 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _least_bytes(plan: PoolPlan, num_tokens: int) -> int:
    """Bytes of the smallest pool that holds the floor, the buffers and one request."""
    layout = plan.layout
    pages = plan.floor_pages + plan.buffer_pages + _pages_of_one(layout, num_tokens)
    huge = -(-pages // layout.pages_per_huge(EXPERT)) + 1
    return -(-huge // layout.huge_page_multiple) * layout.huge_page_multiple * layout.huge_page_bytes


def _check_arguments(
    memory_policy: str,
    num_experts: int,
    limit: int | Literal["auto"],
    buffers: int,
    max_model_len: int | None,
    model_len_limit: int,
) -> None:
    if memory_policy not in ("static", "fixed", "elastic"):
        raise ValueError(f"memory_policy is {memory_policy!r}, it must be 'static', 'fixed' or 'elastic'")
    if limit != "auto" and (
        isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= num_experts
    ):
        raise ValueError(
            f"expert_offload_limit is {limit!r}, it must be 'auto' or between 0 and the {num_experts} experts of a layer"
        )
    if memory_policy == "static" and limit not in ("auto", 0):
        raise ValueError(
            f"expert_offload_limit is {limit} but memory_policy 'static' keeps all experts resident: "
            "use 'fixed' or 'elastic', or leave the limit at 'auto'"
        )
    if buffers < 0:
        raise ValueError(
            f"loading_buffer_experts is {buffers}, it must not be negative (0 reads all in place)"
        )
    if max_model_len is not None and not 1 < max_model_len <= model_len_limit:
        raise ValueError(
            f"max_model_len is {max_model_len}, it must be at least 2 and at most the model's {model_len_limit} positions"
        )
