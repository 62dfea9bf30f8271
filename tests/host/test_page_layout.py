"""The planner against published models (literals from their dimensions) and against brute force."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rimuru_jax.host.page_layout import MAX_HUGE_PAGE_RATIO, PageKind, PageLayout, format_bytes

KIB, MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Published dimensions: hidden d, expert width f, layers that are MoE / attention / recurrent, and so on."""

    d: int
    f: int
    moe: int
    attention: int
    recurrent: int = 0
    kv_heads: int
    head_dim: int
    state: tuple[int, int, int] = (0, 0, 0)
    conv_channels: int = 0

    def kinds(self, state_bytes: int = 4) -> list[PageKind]:
        """Pages of 16 tokens in bf16, states in `state_bytes` bytes per element, conv kernel 4 in bf16."""
        kinds = [
            PageKind(
                name="kv",
                level=3,
                page_bytes=16 * 2 * self.kv_heads * self.head_dim * 2,
                row_bytes=self.head_dim * 2,
                layers=self.attention,
                page_tokens=16,
                groupable=True,
            ),
            PageKind(
                name="expert", level=2, page_bytes=self.f * self.d * 2, row_bytes=self.d * 2, layers=self.moe
            ),
        ]
        if self.recurrent:
            row = self.state[-1] * state_bytes
            page = math.prod(self.state) * state_bytes
            conv = self.conv_channels * 2
            kinds += [
                PageKind(name="ssm", level=2, page_bytes=page, row_bytes=row, layers=self.recurrent),
                PageKind(name="conv", level=3, page_bytes=conv, row_bytes=conv, layers=self.recurrent, run=3),
            ]
        return kinds


QWEN15_MOE = Model(d=2048, f=1408, moe=24, attention=24, kv_heads=16, head_dim=128)
QWEN3_30B = Model(d=2048, f=768, moe=48, attention=48, kv_heads=4, head_dim=128)
QWEN3_NEXT = Model(
    d=2048,
    f=512,
    moe=48,
    attention=12,
    recurrent=36,
    kv_heads=2,
    head_dim=256,
    state=(32, 128, 128),
    conv_channels=2 * 16 * 128 + 32 * 128,
)
QWEN35_35B = dataclasses.replace(QWEN3_NEXT, moe=40, attention=10, recurrent=30)
QWEN35_122B = dataclasses.replace(
    QWEN3_NEXT, d=3072, f=1024, state=(64, 128, 128), conv_channels=2 * 16 * 128 + 64 * 128
)
GRANITE_TINY = Model(
    d=1536,
    f=512,
    moe=40,
    attention=4,
    recurrent=36,
    kv_heads=4,
    head_dim=128,
    state=(48, 64, 128),
    conv_channels=48 * 64 + 2 * 128,
)
GRANITE_SMALL = dataclasses.replace(
    GRANITE_TINY, d=4096, f=768, kv_heads=8, state=(128, 64, 128), conv_channels=128 * 64 + 2 * 128
)
NEMOTRON_NANO = Model(
    d=2688,
    f=1856,
    moe=23,
    attention=6,
    recurrent=23,
    kv_heads=2,
    head_dim=128,
    state=(64, 64, 128),
    conv_channels=64 * 64 + 2 * 8 * 128,
)
MODELS = {
    "Qwen1.5-MoE-A2.7B": QWEN15_MOE,
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT,
    "Qwen3.5-35B-A3B": QWEN35_35B,
    "Qwen3.5-122B-A10B": QWEN35_122B,
    "Granite-4.0-H-Tiny": GRANITE_TINY,
    "Granite-4.0-H-Small": GRANITE_SMALL,
    "Nemotron-3-Nano-30B-A3B": NEMOTRON_NANO,
}
NEMOTRON_EXPERT = 9_977_856  # 2^14 * 3 * 7 * 29 bytes, 9.516 MiB


@pytest.mark.parametrize(
    ("name", "expert", "kv", "state", "conv", "huge", "huge_bf16"),
    [
        ("Qwen1.5-MoE-A2.7B", 5.5 * MIB, 128 * KIB, 0, 0, 5.5 * MIB, 5.5 * MIB),
        ("Qwen3-30B-A3B", 3 * MIB, 32 * KIB, 0, 0, 3 * MIB, 3 * MIB),
        ("Qwen3-Next-80B-A3B", 2 * MIB, 32 * KIB, 2 * MIB, 16 * KIB, 2 * MIB, 2 * MIB),
        ("Qwen3.5-35B-A3B", 2 * MIB, 32 * KIB, 2 * MIB, 16 * KIB, 2 * MIB, 2 * MIB),
        ("Qwen3.5-122B-A10B", 6 * MIB, 32 * KIB, 4 * MIB, 24 * KIB, 12 * MIB, 6 * MIB),
        ("Granite-4.0-H-Tiny", 1.5 * MIB, 32 * KIB, 1.5 * MIB, 6.5 * KIB, 1.5 * MIB, 1.5 * MIB),
        ("Granite-4.0-H-Small", 6 * MIB, 64 * KIB, 4 * MIB, 16.5 * KIB, 12 * MIB, 6 * MIB),
        (
            "Nemotron-3-Nano-30B-A3B",
            NEMOTRON_EXPERT,
            16 * KIB,
            2 * MIB,
            12 * KIB,
            NEMOTRON_EXPERT,
            NEMOTRON_EXPERT,
        ),
    ],
)
def test_published_page_sizes(name, expert, kv, state, conv, huge, huge_bf16):
    model = MODELS[name]
    layout = PageLayout.plan(model.kinds())
    assert layout.kinds[0].kind.name == "expert"
    assert layout["expert"].stride_bytes == layout["expert"].kind.page_bytes == expert
    assert layout["kv"].layer_stride_bytes == layout["kv"].kind.page_bytes == kv
    assert layout["kv"].parent == "expert"
    assert layout["kv"].waste == 0
    if state:
        assert layout["ssm"].kind.page_bytes == state
        assert layout["conv"].stride_bytes == conv
        assert layout["conv"].parent == "expert"
    assert ("ssm" in layout) == bool(state)
    assert layout.huge_page_bytes == huge
    assert PageLayout.plan(model.kinds(state_bytes=2)).huge_page_bytes == huge_bf16


def test_only_exploding_model_is_padded():
    padded = {
        (name, state_bytes): layout["ssm"].stride_bytes - layout["ssm"].kind.page_bytes
        for name, model in MODELS.items()
        for state_bytes in (2, 4)
        if "ssm" in (layout := PageLayout.plan(model.kinds(state_bytes)))
    }
    nemotron = "Nemotron-3-Nano-30B-A3B"
    assert {case for case, padding in padded.items() if padding} == {(nemotron, 2), (nemotron, 4)}


def test_nemotron_state_page_is_a_quarter_of_the_expert_page():
    layout = PageLayout.plan(NEMOTRON_NANO.kinds())
    ssm = layout["ssm"]
    assert ssm.stride_bytes == 4872 * 128 * 4 == 2_494_464  # 2.379 MiB, a float32 view [n, 4872, 128]
    assert layout.pages_per_huge("ssm") == 4
    assert layout.pages_per_huge("expert") == 1
    assert layout.huge_page_bytes // layout["kv"].layer_stride_bytes == 609
    assert layout["kv"].layers_per_page == 3  # 609 = 3 * 7 * 29 pages: 3 of 6 layers share one without waste
    assert layout["kv"].units_per_parent == 203
    assert layout["conv"].units_per_parent == 812 // 3
    assert layout.huge_page_multiple == 1


@pytest.mark.parametrize(
    ("name", "layers_per_page", "units", "tables"),
    [
        ("Qwen1.5-MoE-A2.7B", 4, 11, 6),  # 44 one-layer pages, 24 layers
        ("Qwen3-30B-A3B", 48, 2, 1),  # 96 and 48
        ("Qwen3-Next-80B-A3B", 4, 16, 3),  # 64 and 12
        ("Qwen3.5-35B-A3B", 2, 32, 5),  # 64 and 10
        ("Qwen3.5-122B-A10B", 12, 16, 1),  # 192 and 12
        ("Granite-4.0-H-Tiny", 4, 12, 1),  # 48 and 4
        ("Granite-4.0-H-Small", 4, 24, 1),  # 96 and 4
    ],
)
def test_published_layer_groups(name, layers_per_page, units, tables):
    kv = PageLayout.plan(MODELS[name].kinds())["kv"]
    assert (kv.layers_per_page, kv.units_per_parent, kv.tables) == (layers_per_page, units, tables)
    assert kv.stride_bytes == layers_per_page * kv.kind.page_bytes


@pytest.mark.parametrize(
    ("name", "kv_per_token", "state", "conv"),
    [
        ("Qwen1.5-MoE-A2.7B", 192 * KIB, 0, 0),
        ("Qwen3-30B-A3B", 96 * KIB, 0, 0),
        ("Qwen3-Next-80B-A3B", 24 * KIB, 72 * MIB, 1.6875 * MIB),
        ("Qwen3.5-35B-A3B", 20 * KIB, 60 * MIB, 1.40625 * MIB),
        ("Qwen3.5-122B-A10B", 24 * KIB, 144 * MIB, 2.53125 * MIB),
        ("Granite-4.0-H-Tiny", 8 * KIB, 54 * MIB, 702 * KIB),
        ("Granite-4.0-H-Small", 16 * KIB, 144 * MIB, 1782 * KIB),
        ("Nemotron-3-Nano-30B-A3B", 6 * KIB, 46 * MIB, 828 * KIB),
    ],
)
def test_bytes_of_one_sequence(name, kv_per_token, state, conv):
    layout = PageLayout.plan(MODELS[name].kinds())
    kv = layout["kv"]
    for num_tokens, pages in ((0, 0), (1, 1), (16, 1), (17, 2), (4096, 256)):
        assert kv.units_for(num_tokens) * kv.stride_bytes == pages * 16 * kv_per_token
        assert layout["expert"].units_for(num_tokens) == 0
        if state:
            assert layout["ssm"].units_for(num_tokens) * layout["ssm"].kind.page_bytes == state
            assert layout["conv"].units_for(num_tokens) * 3 * layout["conv"].stride_bytes == conv


def test_conv_rows_with_tails():
    """Granite-4.0-H-Tiny: 1536 KiB hold 236 rows of 6.5 KiB from an aligned start, 235 from the worst."""
    layout = PageLayout.plan(GRANITE_TINY.kinds())
    assert layout["conv"].units_per_parent == 235 // 3
    assert layout.huge_page_multiple == 13  # 6.5 KiB = 13 * 512
    assert layout.num_huge_pages(100 * layout.huge_page_bytes + 1) == 91
    assert layout["conv"].first_page([0, 1, 13]).tolist() == [0, 237, 3072]  # 1536 / 6.5 = 236.3


def test_pool_too_small_names_the_least_bytes():
    layout = PageLayout.plan(QWEN35_122B.kinds())
    assert layout.num_huge_pages(24 * MIB) == 2
    with pytest.raises(ValueError, match=f"is {24 * MIB - 1}, it must be at least {24 * MIB} "):
        layout.num_huge_pages(24 * MIB - 1)
    tails = PageLayout.plan(GRANITE_SMALL.kinds())
    with pytest.raises(ValueError, match=f"at least {11 * 12 * MIB} "):
        tails.num_huge_pages(11 * 12 * MIB - 1)
    assert tails.num_huge_pages(11 * 12 * MIB) == 11


def kind(name: str, page_bytes: int, **fields) -> PageKind:
    return PageKind(
        **{"name": name, "level": 2, "page_bytes": page_bytes, "row_bytes": 2, "layers": 1, **fields}
    )


@pytest.mark.parametrize(
    ("expert", "state", "stride", "huge"),
    [
        # One state in 2 expert pages, 2 in 3 and 2 in 4 are padded by over a quarter, 4 in 5 by 22 %.
        (1000, 1028, 1250, 5000),
        (1000, 7946, 8000, 8000),  # larger than the expert page: up to a multiple of it
        (1000, 498, 500, 1000),
    ],
)
def test_padding_when_the_least_common_multiple_explodes(expert, state, stride, huge):
    layout = PageLayout.plan([kind("expert", expert), kind("ssm", state)])
    assert (layout["ssm"].stride_bytes, layout.huge_page_bytes) == (stride, huge)
    assert layout["expert"].stride_bytes == expert


def test_several_level2_kinds_and_no_experts():
    layout = PageLayout.plan([kind("a", 60), kind("b", 94), kind("c", 1000)])
    assert [placed.kind.name for placed in layout.sequence_kinds] == ["a", "b", "c"]
    # The largest stays. In 1000 bytes the others would take 100 + 100, a padding of 30 %; in 2000 they take 80 + 100.
    assert [placed.stride_bytes for placed in layout.kinds] == [80, 100, 1000]
    assert layout.huge_page_bytes == 2000
    assert "expert" not in layout


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_bytes": 0}, "page_bytes of page kind 'x' is 0, it must be positive"),
        ({"row_bytes": -2}, "row_bytes of page kind 'x' is -2"),
        ({"layers": 0}, "layers of page kind 'x' is 0"),
        ({"run": 0}, "run of page kind 'x' is 0"),
        ({"page_tokens": -1}, "page_tokens of page kind 'x' is -1"),
        ({"level": 1}, "level of page kind 'x' is 1"),
        ({"level": 2, "run": 3}, "only level 3"),
        ({"level": 2, "groupable": True}, "only level 3"),
        ({"name": "expert"}, "'expert' holds weights"),
        ({"row_bytes": 24}, "is 64, it must be a multiple of its row_bytes, 24"),
        ({"page_bytes": 63, "row_bytes": 9}, "is 63, it must be a multiple of the pool's words of 2 bytes"),
    ],
)
def test_refused_kinds(fields, message):
    with pytest.raises(ValueError, match=message):
        PageKind(**{"name": "x", "level": 3, "page_bytes": 64, "row_bytes": 2, "layers": 4, **fields})


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([], "at least one kind of level 2, got no kind"),
        ([kind("kv", 64, level=3)], "at least one kind of level 2, got kv"),
        ([kind("ssm", 64), kind("ssm", 32)], "distinct names, got ssm, ssm"),
        (
            [kind("expert", 64), kind("kv", 128, level=3)],
            r"'kv' needs 1 whole pages of 128 bytes .*expert 64 bytes",
        ),
        ([kind("expert", 64), kind("conv", 24, level=3, run=3)], "'conv' needs 3 whole pages of 24 bytes"),
        # One row fits an aligned 70-byte page, none fits the page that starts 20 bytes into a row.
        ([kind("expert", 70), kind("kv", 50, level=3)], "'kv' needs 1 whole pages of 50 bytes"),
        # No page of whole 202-byte rows shares a huge page with 1000-byte pages below 8000 bytes.
        (
            [kind("expert", 1000), kind("ssm", 404, row_bytes=202)],
            "within 8000 bytes .* 'ssm' 404 in rows of 202",
        ),
    ],
)
def test_refused_plans(kinds, message):
    with pytest.raises(ValueError, match=message):
        PageLayout.plan(kinds)


def test_level3_kind_goes_where_it_wastes_least():
    kinds = [kind("ssm", 160), kind("expert", 240)]
    assert PageLayout.plan([*kinds, kind("kv", 80, level=3)])["kv"].parent == "expert"  # both exact
    assert PageLayout.plan([*kinds, kind("kv", 32, level=3)])["kv"].parent == "ssm"  # 5 exactly; 7 and a tail
    with pytest.raises(ValueError, match="cut from 'ssm' pages"):
        PageLayout.plan([*kinds, kind("kv", 32, level=3)]).pages_per_huge("kv")


def test_layers_do_not_share_a_page_at_the_price_of_a_coarser_pool():
    """Runs of two 2-byte pages: 18 bytes hold 4 runs, and 2 runs of 4-byte pages, but 18 is no multiple of 4."""
    layout = PageLayout.plan([kind("expert", 18), kind("conv", 2, level=3, run=2, layers=2, groupable=True)])
    assert (layout["conv"].layers_per_page, layout.huge_page_multiple) == (1, 1)


def test_ids_beyond_int32_byte_offsets():
    """A 6 TiB pool, ids given as int32: products exceed 2^31 and 2^32 and stay exact."""
    conv = PageLayout.plan(GRANITE_SMALL.kinds())["conv"]
    parents = np.array([2**20 - 1, 2**20], np.int32)
    first = conv.first_page(parents)
    assert first.tolist() == [-(-int(parent) * 6 * MIB // 16896) for parent in parents]
    units = conv.unit_ids(parents)
    assert units.shape == (2, conv.units_per_parent)
    owners, indices = conv.locate(units.astype(np.int32))
    assert np.array_equal(owners, np.broadcast_to(parents[:, None], units.shape))
    assert np.array_equal(indices, np.broadcast_to(np.arange(conv.units_per_parent), units.shape))


def test_describe_and_json_tell_the_plan():
    layout = PageLayout.plan(NEMOTRON_NANO.kinds())
    summary, floor, header, *lines = layout.describe().splitlines()
    assert summary.startswith("huge page 9.516 MiB = 1 expert or 4 ssm; pool in steps of 1 ")
    assert floor.endswith("= 2 kv + 23 ssm + 23 conv units")
    assert (
        len({line.index(cell) for line, cell in zip(lines, ("expert", "kv", "ssm", "conv"), strict=True)})
        == 1
    )
    why = header.index("why")
    assert all(line[why - 2 : why] == "  " and line[why] != " " for line in lines)
    ssm, conv = lines[2], lines[3]
    assert "2.379 MiB (+388 KiB)" in ssm
    assert "padded: the least common multiple would be 1.189 GiB" in ssm
    assert "3 x 12 KiB" in conv
    assert "3 of 6 layers share a page" in lines[1]

    plan = json.loads(json.dumps(layout.to_json()))
    assert plan["huge_page_bytes"] == NEMOTRON_EXPERT
    assert [entry["name"] for entry in plan["kinds"]] == ["expert", "kv", "ssm", "conv"]
    assert plan["kinds"][2]["stride_bytes"] == 2_494_464
    assert plan["kinds"][3]["units_per_parent"] == 270


def test_format_bytes():
    sizes = (0, 1023, 1024, 6656, NEMOTRON_EXPERT, 128 * NEMOTRON_EXPERT)
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "6.5 KiB",
        "9.516 MiB",
        "1.189 GiB",
    ]


@st.composite
def level2_kinds(draw) -> list[PageKind]:
    """Expert and state pages whose least common multiple is often large."""
    row = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    step = math.lcm(row, 2)
    expert = kind("expert", 2 * draw(st.integers(4, 200)))
    return [expert, kind("ssm", step * draw(st.integers(1, 200)), row_bytes=row)]


@settings(deadline=None)
@given(level2_kinds())
def test_state_stride_against_brute_force(kinds):
    expert, ssm = kinds
    limit = MAX_HUGE_PAGE_RATIO * max(expert.page_bytes, ssm.page_bytes)
    strides = [
        stride
        for stride in range(ssm.page_bytes, limit + 1, 2)
        if stride % ssm.row_bytes == 0 and math.lcm(stride, expert.page_bytes) <= limit
    ]
    if not strides:
        with pytest.raises(ValueError, match="no common huge page"):
            PageLayout.plan(kinds)
        return
    layout = PageLayout.plan(kinds)
    best = min(
        strides,
        key=lambda stride: (
            stride > ssm.page_bytes,  # without padding if that works at all
            max(4 * stride, 5 * ssm.page_bytes),
            math.lcm(stride, expert.page_bytes),
            stride,
        ),
    )
    assert layout["ssm"].stride_bytes == best
    assert layout.huge_page_bytes == math.lcm(best, expert.page_bytes)


@st.composite
def layouts(draw) -> PageLayout:
    """Random plans with one to three L2 kinds and two L3 kinds, small enough to enumerate."""
    names = draw(st.sampled_from((("expert",), ("expert", "ssm"), ("ssm",), ("expert", "ssm", "latent"))))
    kinds = [
        kind(
            name,
            4 * draw(st.integers(6, 60)),
            row_bytes=draw(st.sampled_from((2, 4))),
            layers=draw(st.integers(1, 4)),
        )
        for name in names
    ]
    kv_layers = draw(st.integers(1, 12))
    kinds += [
        kind("kv", 2 * draw(st.integers(1, 24)), level=3, page_tokens=4, layers=kv_layers, groupable=True),
        kind("conv", 2 * draw(st.integers(1, 20)), level=3, run=draw(st.integers(1, 4)), layers=2),
    ]
    try:
        layout = PageLayout.plan(kinds)
    except ValueError:
        assume(False)
        raise
    assume(layout.huge_page_bytes * layout.huge_page_multiple < 16_000)
    return layout


def parents_of(layout: PageLayout, placed, pool_bytes: int) -> list[range]:
    """Byte ranges of all possible parents of a kind in the pool."""
    size = layout.huge_page_bytes if placed.parent is None else layout[placed.parent].stride_bytes
    return [range(start, start + size) for start in range(0, pool_bytes, size)]


def rows_inside(parent: range, stride: int) -> list[int]:
    """Rows of `stride` bytes that lie wholly inside a byte range, by looking at every row near it."""
    near = range(max(0, parent.start // stride - 1), parent.stop // stride + 2)
    return [row for row in near if parent.start <= row * stride and (row + 1) * stride <= parent.stop]


@settings(deadline=None)
@given(layouts(), st.integers(0, 3), st.data())
def test_placement_against_brute_force(layout, extra, data):
    step = layout.huge_page_bytes * layout.huge_page_multiple
    pool_bytes = step * (2 + extra) + data.draw(st.integers(0, step - 1))
    pool_bytes = layout.num_huge_pages(pool_bytes) * layout.huge_page_bytes
    assert pool_bytes == step * (2 + extra)
    for placed in layout.kinds:
        stride, run = placed.stride_bytes, placed.kind.run
        assert pool_bytes % stride == 0 == pool_bytes % placed.layer_stride_bytes
        assert stride % placed.kind.row_bytes == 0
        assert placed.layer_stride_bytes >= placed.kind.page_bytes

        parents = parents_of(layout, placed, pool_bytes)
        inside = [rows_inside(parent, stride) for parent in parents]
        assert placed.units_per_parent == min(len(rows) // run for rows in inside) > 0
        if placed.parent is None:
            assert {len(rows) for rows in inside} == {placed.units_per_parent}

        units = placed.unit_ids(np.arange(len(parents)))
        assert placed.first_page(np.arange(len(parents))).tolist() == [rows[0] for rows in inside]
        owned = np.zeros(pool_bytes, bool)
        for parent, rows, ids in zip(parents, inside, units.tolist(), strict=True):
            for unit in ids:
                assert set(range(unit, unit + run)) <= set(rows)
                span = slice(unit * stride, (unit + run) * stride)
                assert not owned[span].any()
                owned[span] = True
                assert parent.start <= span.start < span.stop <= parent.stop

        owners, indices = placed.locate(units)
        assert np.array_equal(owners, np.indices(units.shape)[0])
        assert np.array_equal(indices, np.indices(units.shape)[1])
        assert units[0, 0] == 0 and run * stride <= layout.huge_page_bytes  # the scratch unit


@settings(deadline=None)
@given(layouts())
def test_grouping_and_parent_against_brute_force(layout):
    """No parent would waste less, and no larger group of layers would lose nothing."""
    pool_bytes = layout.huge_page_bytes * layout.huge_page_multiple
    level2 = [placed for placed in layout.kinds if placed.parent is None]
    for placed in layout.kinds:
        if placed.parent is None:
            continue
        page, run = placed.kind.page_bytes, placed.kind.run

        def units(parent_bytes: int, stride: int, run: int = run) -> int:
            period = math.lcm(parent_bytes, stride)
            starts = range(0, period, parent_bytes)
            return min(
                len(rows_inside(range(start, start + parent_bytes), stride)) // run for start in starts
            )

        shares = {
            other.kind.name: units(other.stride_bytes, page) * page / other.stride_bytes for other in level2
        }
        assert shares[placed.parent] >= max(shares.values()) - 1e-12
        if "expert" in shares and shares["expert"] >= max(shares.values()):
            assert placed.parent == "expert"

        single = units(placed.parent_bytes, page)
        lossless = [
            group
            for group in range(1, placed.kind.layers + 1)
            if placed.kind.layers % group == 0
            and group * units(placed.parent_bytes, group * page) >= single
            and math.lcm(group * page, layout.huge_page_bytes) == math.lcm(page, layout.huge_page_bytes)
        ]
        assert placed.layers_per_page == (max(lossless) if placed.kind.groupable else 1)
        assert placed.tables * placed.layers_per_page == placed.kind.layers
        assert pool_bytes % placed.stride_bytes == 0
