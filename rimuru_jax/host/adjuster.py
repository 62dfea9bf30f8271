"""How many experts to give up or take back between two steps: a pure function from page counts to a decision.

All counts are expert-sized pages. An expert is `m` pages (its matrices). One signed balance per pass,

    A = free + returning - reserved - demand,        R_b = max(0, -A),    F_b = max(0, A),

decides alone. `returning` are pages already given up that come back after their reclaim delay: counting them
is what keeps the next pass from shrinking again for the same shortage. With the thresholds in pages:

    R_b > 0          shrink ceil((R_b + 1) / m) experts           leaves F_b in 1 .. m
    F_b < 2          shrink one expert                            leaves F_b in m .. m + 1
    F_b in 2..4m-1   hold                                         the dead zone (2..11 for m = 3)
    F_b >= 4m        expand floor((F_b - 3m) / m), at most        leaves F_b >= 3m
                     max_expansion

Growth also counts the pages of loading buffers that it makes needless, since these return to the surplus.

For m = 3 these are the published numbers (9 kept back, growth from 12). They scale as follows: the growth
side is measured in experts, so 9 is 3m; the low mark of 2 pages is slack for growing sequences and does not
depend on how many pages an expert has. For every m >= 1 a shrink alone ends below 4m and an expansion ends
at 3m >= 2, so that neither triggers the other.
"""

from dataclasses import dataclass
from typing import Literal

type AdjusterPolicy = Literal["watermark", "throughput"]
"""How far residency gives way: for whoever needs pages, or as far as it pays (`throughput.most_absent`)."""

LOW_PAGES = 2
"""Pages of surplus below which one expert is given up ahead of need."""
RESERVED_EXPERTS = 3
"""Experts' worth of surplus that growth leaves untouched."""
MAX_EXPANSION = 5
"""Experts taken back in one pass, at most, as published: each is copied over PCIe in the step that follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBalance:
    """What one scheduling pass knows about pages, in expert-sized pages, and about experts.

    Attributes:
      free: pages that can be handed out now.
      returning: pages freed earlier that become free in later passes.
      reserved: pages promised to expansions but not yet taken from `free`.
      demand: pages that running requests lack now or need in the next pass, plus the need of the head of the
        queue ("throughput": of as many waiting requests as one step can begin with).
      shrinkable: experts resident above the floor of their layers.
      absent: experts not resident.
      released: pages of loading buffers that nobody needs any more once `release_after` experts are resident again.
    """

    free: int
    returning: int = 0
    reserved: int = 0
    demand: int = 0
    shrinkable: int = 0
    absent: int = 0
    released: int = 0
    release_after: int = 0

    @property
    def signed(self) -> int:
        """A: pages left once every claim is met; negative when they do not suffice."""
        return self.free + self.returning - self.reserved - self.demand

    @property
    def shortage(self) -> int:
        """R_b, pages."""
        return max(0, -self.signed)

    @property
    def surplus(self) -> int:
        """F_b, pages."""
        return max(0, self.signed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjusterState:
    """What one pass remembers for the next: for how many passes in a row the surplus has allowed growth."""

    surplus_passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Experts to take back (positive) or to give up (negative), and what to remember for the next pass."""

    experts: int
    state: AdjusterState


def decide(
    balance: PageBalance,
    state: AdjusterState,
    *,
    matrices: int = 3,
    expand_patience: int = 0,
    max_expansion: int = MAX_EXPANSION,
) -> Decision:
    """Return the change of residency of this pass.

    Args:
      balance: the pages of this pass.
      state: what the previous decision returned; `AdjusterState()` at the start.
      matrices: pages of one expert, m.
      expand_patience: passes for which the surplus must already have allowed growth before experts are taken
        back; 0 grows at once. It damps reversals after completions that the next arrivals use up.
      max_expansion: experts taken back in one pass, at most.

    Shrinking never asks for more experts than are above their floor; expanding takes only pages that are
    free now and not claimed by `demand`, so growth never makes a request wait for pages that are still
    returning.
    """
    surplus = balance.surplus
    if balance.shortage:
        wanted = -(-(balance.shortage + 1) // matrices)
        return Decision(experts=-min(wanted, balance.shrinkable), state=AdjusterState())
    if surplus < LOW_PAGES:
        return Decision(experts=-min(1, balance.shrinkable), state=AdjusterState())
    growth = (surplus - RESERVED_EXPERTS * matrices) // matrices
    if growth < balance.release_after <= max_expansion:
        # What the loading buffers give back counts, if they would.
        later = (surplus + balance.released - RESERVED_EXPERTS * matrices) // matrices
        growth = balance.release_after if later >= balance.release_after else growth
    if growth < 1:
        return Decision(experts=0, state=AdjusterState())
    if state.surplus_passes < expand_patience:
        return Decision(experts=0, state=AdjusterState(surplus_passes=state.surplus_passes + 1))
    affordable = max(0, balance.free - balance.reserved - balance.demand) // matrices
    return Decision(experts=min(max_expansion, growth, affordable, balance.absent), state=state)
