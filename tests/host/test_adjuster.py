"""The adjuster's rule: thresholds by hand, its promises as properties, and closed loops that must come to rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru_jax.host.adjuster import AdjusterState, PageBalance, decide

PLENTY = 1000


def _move(signed: int, *, matrices: int = 3, shrinkable: int = PLENTY, absent: int = PLENTY) -> int:
    """The decision for a signed balance, with everything else abundant."""
    balance = PageBalance(free=max(0, signed), demand=max(0, -signed), shrinkable=shrinkable, absent=absent)
    return decide(balance, AdjusterState(), matrices=matrices).experts


@pytest.mark.parametrize(
    ("signed", "experts"),
    [(-7, -3), (-6, -3), (-5, -2), (-3, -2), (-2, -1), (-1, -1)]  # ceil((R_b + 1) / 3)
    + [(0, -1), (1, -1)]  # F_b < 2
    + [(signed, 0) for signed in range(2, 12)]  # the dead zone
    + [(12, 1), (14, 1), (15, 2), (18, 3), (21, 4), (24, 5), (27, 5), (500, 5)],
)
def test_thresholds_for_three_matrices(signed: int, experts: int):
    assert _move(signed) == experts


@pytest.mark.parametrize(
    ("signed", "experts"),
    [
        (-4, -3),
        (-3, -2),
        (-2, -2),
        (-1, -1),
        (0, -1),
        (1, -1),
        (2, 0),
        (7, 0),
        (8, 1),
        (9, 1),
        (10, 2),
        (16, 5),
    ],
)
def test_thresholds_for_two_matrices(signed: int, experts: int):
    assert _move(signed, matrices=2) == experts


def test_balance_nets_everything_at_once():
    balance = PageBalance(free=10, returning=6, reserved=3, demand=20)
    assert (balance.signed, balance.shortage, balance.surplus) == (-7, 7, 0)
    balance = PageBalance(free=10, returning=6, reserved=3, demand=1)
    assert (balance.signed, balance.shortage, balance.surplus) == (12, 0, 12)


def test_patience_wants_the_surplus_to_last():
    rich = PageBalance(free=30, absent=PLENTY)
    held = PageBalance(free=5, absent=PLENTY)
    state, moves = AdjusterState(), []
    for balance in [rich, rich, held, rich, rich, rich, rich]:
        decision = decide(balance, state, expand_patience=2)
        state = decision.state
        moves.append(decision.experts)
    assert moves == [0, 0, 0, 0, 0, 5, 5]


pages = st.integers(0, 400)
balances = st.builds(
    PageBalance,
    free=pages,
    returning=pages,
    reserved=st.integers(0, 50),
    demand=pages,
    shrinkable=pages,
    absent=pages,
)
matrix_counts = st.integers(1, 4)


@given(balance=balances, matrices=matrix_counts, patience=st.integers(0, 3), calm=st.integers(0, 4))
def test_limits(balance: PageBalance, matrices: int, patience: int, calm: int):
    experts = decide(
        balance, AdjusterState(surplus_passes=calm), matrices=matrices, expand_patience=patience
    ).experts
    assert -balance.shrinkable <= experts <= min(5, balance.absent)
    if experts > 0:
        unclaimed = balance.free - balance.reserved - balance.demand
        assert experts * matrices <= unclaimed
    if 2 <= balance.surplus < 4 * matrices:
        assert experts == 0


@given(balance=balances, matrices=matrix_counts)
def test_never_shrinks_twice_for_the_same_pages(balance: PageBalance, matrices: int):
    """Once the pages of a shrink are on their way, the same demand asks for at most the one expert ahead of need."""
    first = decide(balance, AdjusterState(), matrices=matrices).experts
    if first >= 0 or -first == balance.shrinkable:
        return
    after = PageBalance(
        free=balance.free,
        returning=balance.returning - first * matrices,
        reserved=balance.reserved,
        demand=balance.demand,
        shrinkable=balance.shrinkable + first,
        absent=balance.absent - first,
    )
    assert after.shortage == 0
    second = decide(after, AdjusterState(), matrices=matrices).experts
    assert second in (-1, 0)
    if balance.shortage:
        assert balance.shortage < -first * matrices <= balance.shortage + matrices


@given(
    free=pages,
    demand=pages,
    shrinkable=st.integers(0, 200),
    absent=st.integers(0, 200),
    matrices=matrix_counts,
    delay=st.integers(1, 3),
    patience=st.integers(0, 3),
)
def test_constant_demand_comes_to_rest_without_reversal(
    free: int, demand: int, shrinkable: int, absent: int, matrices: int, delay: int, patience: int
):
    state, pending, moves = AdjusterState(), [0] * delay, []
    for _ in range(400):
        free += pending.pop(0)
        balance = PageBalance(
            free=free, returning=sum(pending), demand=demand, shrinkable=shrinkable, absent=absent
        )
        decision = decide(balance, state, matrices=matrices, expand_patience=patience)
        state = decision.state
        moves.append(decision.experts)
        shrinkable += decision.experts
        absent -= decision.experts
        free -= max(0, decision.experts) * matrices
        pending.append(max(0, -decision.experts) * matrices)
        assert free >= 0 and shrinkable >= 0 and absent >= 0
    assert moves[-1] == 0
    assert not (min(moves) < 0 < max(moves))


@given(
    needs=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=30),
    floor_pages=st.integers(60, 90),
    above_floor=st.integers(0, 40),
    matrices=matrix_counts,
    delay=st.integers(1, 3),
    patience=st.sampled_from([0, 4]),
)
def test_no_livelock_with_a_queue(
    needs: list[tuple[int, int]], floor_pages: int, above_floor: int, matrices: int, delay: int, patience: int
):
    """A queue of (pages, lifetime in passes) is served to its end from a pool whose pages experts hold at first."""
    free, shrinkable, absent = floor_pages, above_floor, 0
    pending, running, state = [0] * delay, [], AdjusterState()
    queue, capacity = list(needs), floor_pages + above_floor * matrices
    bound = sum(life + 2 * delay + 4 for _, life in needs)
    for now in range(bound):
        free += pending.pop(0)
        pending.append(0)
        for need, _ in [entry for entry in running if entry[1] <= now]:
            pending[-1] += need
        running = [entry for entry in running if entry[1] > now]
        while queue and queue[0][0] <= free:
            need, life = queue.pop(0)
            free -= need
            running.append((need, now + life))
        coming = free + sum(pending)
        head = queue[0][0] if queue and queue[0][0] <= coming + shrinkable * matrices else 0
        balance = PageBalance(
            free=free, returning=sum(pending), demand=head, shrinkable=shrinkable, absent=absent
        )
        decision = decide(balance, state, matrices=matrices, expand_patience=patience)
        state = decision.state
        shrinkable += decision.experts
        absent -= decision.experts
        free -= max(0, decision.experts) * matrices
        pending[-1] += max(0, -decision.experts) * matrices
        held = sum(need for need, _ in running)
        assert free + sum(pending) + held + shrinkable * matrices == capacity
        if not queue and not running:
            return
    raise AssertionError(f"{len(queue)} requests were still waiting after {bound} passes")
