"""How many pages of the pool are in which state: what `PageAllocator.ledger` returns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Units of one kind: free + used + pinned + cached + pending + cut = total."""

    level: int
    total: int
    """Units in all parents split for this kind."""
    free: int
    used: int
    pinned: int
    """Held by loading buffers."""
    cached: int
    """Held for reuse only, evictable."""
    pending: int
    """Freed, but not before a later pass."""
    cut: int
    """Level 2: pages cut into level-3 pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where every page of the pool is: at L1 free + split = all huge pages less scratch."""

    huge_pages: int
    """All huge pages but scratch."""
    free_huge_pages: int
    split_huge_pages: int
    kinds: dict[str, PageCounts]
