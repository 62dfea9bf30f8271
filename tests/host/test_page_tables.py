import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru_jax.host.page_layout import PageKind, PageLayout
from rimuru_jax.host.page_tables import PageTables

LAYOUT = PageLayout.plan(
    [
        PageKind(name="expert", level=2, page_bytes=4096, row_bytes=64, layers=5),
        PageKind(name="ssm", level=2, page_bytes=2048, row_bytes=64, layers=2),
        PageKind(name="kv", level=3, page_bytes=256, row_bytes=64, layers=3, page_tokens=16),
        PageKind(name="conv", level=3, page_bytes=64, row_bytes=64, layers=2, run=3),
    ]
)


@pytest.fixture
def tables() -> PageTables:
    return PageTables(LAYOUT, max_num_seqs=4, max_model_len=100)


def test_shapes_follow_the_layout(tables: PageTables) -> None:
    shapes = {name: array.shape for name, array in tables.arrays.items()}
    assert shapes == {"ssm": (2, 4, 1), "kv": (3, 4, 7), "conv": (2, 4, 1)}  # 7 pages of 16 tokens cover 100
    assert all(array.dtype == np.int32 and not array.any() for array in tables.arrays.values())


def test_units_arrive_column_by_column(tables: PageTables) -> None:
    tables.append(2, {"kv": np.array([11, 12, 13, 21, 22, 23]), "ssm": np.array([7, 8])})
    tables.append(2, {"kv": np.array([31, 32, 33])})
    assert tables.arrays["kv"][:, 2].tolist() == [
        [11, 21, 31, 0, 0, 0, 0],
        [12, 22, 32, 0, 0, 0, 0],
        [13, 23, 33, 0, 0, 0, 0],
    ]
    assert tables.arrays["ssm"][:, 2, 0].tolist() == [7, 8]
    assert tables.lengths("kv").tolist() == [0, 0, 3, 0]
    assert tables.lengths("ssm").tolist() == [0, 0, 1, 0]
    assert not tables.arrays["kv"][:, [0, 1, 3]].any()


def test_updates_name_each_change_once(tables: PageTables) -> None:
    tables.append(1, {"kv": np.array([5, 6, 7])})
    ((name, (index, value)),) = tables.take_updates().items()
    assert (name, index.dtype, value.dtype) == ("kv", np.int32, np.int32)
    assert sorted(zip(index.tolist(), value.tolist(), strict=True)) == [
        ([0, 1, 0], 5),
        ([1, 1, 0], 6),
        ([2, 1, 0], 7),
    ]
    assert tables.take_updates() == {}


def test_a_slot_that_changes_hands_within_a_pass_shows_only_its_last_user(tables: PageTables) -> None:
    tables.append(0, {"kv": np.array([1, 2, 3, 4, 5, 6])})
    tables.clear(0)
    tables.append(0, {"kv": np.array([7, 8, 9])})
    index, value = tables.take_updates()["kv"]
    assert {
        (*where, page) for where, page in zip(map(tuple, index.tolist()), value.tolist(), strict=True)
    } == {
        (0, 0, 0, 7),
        (1, 0, 0, 8),
        (2, 0, 0, 9),
        (0, 0, 1, 0),
        (1, 0, 1, 0),
        (2, 0, 1, 0),
    }
    assert len(value) == 6


def test_later_edits_do_not_reach_what_was_handed_over(tables: PageTables) -> None:
    tables.append(0, {"kv": np.array([1, 2, 3])})
    index, value = tables.take_updates()["kv"]
    before = index.copy(), value.copy()
    tables.clear(0)
    tables.append(0, {"kv": np.array([7, 8, 9])})
    assert (index == before[0]).all() and (value == before[1]).all()
    assert not any(np.shares_memory(part, tables.arrays["kv"]) for part in (index, value))


def test_the_ids_passed_in_are_copied(tables: PageTables) -> None:
    ids = np.array([1, 2, 3], np.int32)
    tables.append(0, {"kv": ids})
    ids[:] = 99
    assert tables.arrays["kv"][:, 0, 0].tolist() == [1, 2, 3]


def test_slots_may_grow_together(tables: PageTables) -> None:
    tables.append(3, {"kv": np.array([1, 2, 3])})
    tables.take_updates()
    units = [{"kv": np.array([4, 5, 6])}, {"ssm": np.array([7, 8]), "kv": np.array([11, 12, 13, 21, 22, 23])}]
    tables.append_each([3, 1], units)
    assert tables.arrays["kv"][:, 3, :3].tolist() == [[1, 4, 0], [2, 5, 0], [3, 6, 0]]
    assert tables.arrays["kv"][:, 1, :3].tolist() == [[11, 21, 0], [12, 22, 0], [13, 23, 0]]
    assert tables.arrays["ssm"][:, :, 0].tolist() == [[0, 7, 0, 0], [0, 8, 0, 0]]
    assert tables.lengths("kv").tolist() == [0, 2, 0, 2]
    device = {name: np.zeros_like(array) for name, array in tables.arrays.items()}
    device["kv"][:, 3, 0] = [1, 2, 3]
    apply(device, tables)
    assert all((device[name] == array).all() for name, array in tables.arrays.items())


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({"ssm": [1, 2], "kv": [1, 2]}, "2 units of 'kv' are no whole columns of 3 tables"),
        ({"ssm": [1, 2], "kv": [1] * 24}, "raise max_model_len"),
        ({"kv": [1] * 3, "ssm": [1, 2, 3, 4]}, "gets 2 more, its table has room for 1"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    tables: PageTables, units: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tables.append(0, {name: np.array(ids) for name, ids in units.items()})
    assert not any(array.any() for array in tables.arrays.values())
    assert tables.take_updates() == {}


SLOTS = st.integers(0, 3)


@given(
    st.lists(
        st.one_of(st.tuples(st.just("append"), SLOTS, st.integers(0, 3)), st.tuples(st.just("clear"), SLOTS))
    )
)
def test_a_device_that_applies_the_updates_has_the_same_tables(steps: list[tuple]) -> None:
    tables = PageTables(LAYOUT, max_num_seqs=4, max_model_len=100)
    device = {name: array.copy() for name, array in tables.arrays.items()}
    rows: list[list[list[int]]] = [[] for _ in range(4)]  # slot -> columns -> one page per table
    page = 0
    for number, (step, slot, *columns) in enumerate(steps):
        if step == "clear":
            tables.clear(slot)
            rows[slot] = []
        elif len(rows[slot]) + columns[0] <= 7:
            new = [[page + 3 * column + table + 1 for table in range(3)] for column in range(columns[0])]
            page += 3 * columns[0]
            tables.append(slot, {"kv": np.array(new, np.int32).reshape(-1)})
            rows[slot] += new
        if number % 3 == 2:
            apply(device, tables)
    apply(device, tables)
    for name, array in tables.arrays.items():
        assert (device[name] == array).all()
    for slot, columns in enumerate(rows):
        expected = np.zeros((3, 7))
        for column, pages in enumerate(columns):
            expected[:, column] = pages
        assert (tables.arrays["kv"][:, slot] == expected).all()
        assert tables.lengths("kv")[slot] == len(columns)


def apply(device: dict[str, np.ndarray], tables: PageTables) -> None:
    for name, (index, value) in tables.take_updates().items():
        assert len({tuple(where) for where in index.tolist()}) == len(index)
        device[name][tuple(index.T)] = value
