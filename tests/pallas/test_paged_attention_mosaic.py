"""The Mosaic GPU kernels of paged attention: plans, numbers in the GPU interpreter, code for real shapes, refusals.

Tests marked gpu compare them on the card with dense attention, and with the reference where that would take too long.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.paged_attention import mosaic_decode, mosaic_gpu, mosaic_prefill, paged_attention
from rimuru_jax.pallas.paged_attention.mosaic_decode import DecodeConfig
from rimuru_jax.pallas.paged_attention.mosaic_packing import Packing
from rimuru_jax.pallas.paged_attention.mosaic_prefill import PrefillConfig
from tests.pallas.paged import NAN_WORD, view
from tests.pallas.test_paged_attention import RAGGED, Case

# Shares and outputs are each rounded to bfloat16: a relative error of 2^-9 at most, 1.1e-3 in the mean square, and
# the shares' errors average out over the keys.
TOLERANCE = 5e-3

STATIC = ("view", "scale", "max_query_len", "sliding_window", "decode", "prefill", "interpret")
_kernels = jax.jit(mosaic_gpu.paged_attention, static_argnames=STATIC)


def run(case: Case, *, padding: int = 0, longest: int | None = None, **options) -> np.ndarray:
    """What the kernels compute of a case; `padding` tokens follow its rows."""
    queries = np.pad(case.queries, ((0, padding), (0, 0), (0, 0)))
    out = _kernels(
        jnp.asarray(queries),
        jnp.asarray(case.pool),
        case.view,
        jnp.asarray(case.table),
        jnp.asarray(case.start),
        jnp.asarray(case.context),
        scale=0.3,
        max_query_len=longest or max(new for _, new in case.rows),
        **options,
    )
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    return out[: case.start[-1]]


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    assert np.linalg.norm(got - wanted) <= TOLERANCE * np.linalg.norm(wanted)


INTERPRETED = {
    "decodes in pieces": (
        [(0, 1), (63, 1), (0, 0), (200, 1), (64, 1)],
        {"heads": 6, "kv_heads": 2, "dim": 64},
        {"decode": DecodeConfig(tile=64, steps=2, items=6)},
    ),
    "decodes, window, sinks, head of 96": (
        [(0, 1), (150, 1)],
        {"heads": 16, "kv_heads": 1, "dim": 96},
        {"decode": DecodeConfig(tile=64, steps=2, items=3), "sliding_window": 70, "sinks": True},
    ),
    "mixed": (
        [(130, 1), (0, 0), (0, 21), (250, 9)],  # more tiles than the ring has slots
        {"heads": 8, "kv_heads": 1, "dim": 64},
        {"decode": DecodeConfig(tile=64, steps=2, items=2), "prefill": PrefillConfig(tile=64, steps=2)},
    ),
    "mixed, window, sinks, tokens that share units": (
        [(70, 18), (0, 0), (90, 1), (2, 5)],
        {"heads": 3, "kv_heads": 1, "dim": 96},
        {
            "decode": DecodeConfig(tile=64, steps=2, items=2),
            "prefill": PrefillConfig(tile=64, steps=2),
            "sliding_window": 40,
            "sinks": True,
        },
    ),
}


@pytest.mark.parametrize(("rows", "shape", "options"), INTERPRETED.values(), ids=INTERPRETED)
def test_interpreted(rows, shape, options):
    case = Case(rows, dtype="bfloat16", page_tokens=16, **shape)
    options = dict(options)
    sinks = np.linspace(-1, 3, shape["heads"]).astype(np.float32) if options.pop("sinks", False) else None
    got = run(
        case,
        padding=3,
        sinks=None if sinks is None else jnp.asarray(sinks),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        **options,
    )
    assert_close(got, case.dense(options.get("sliding_window"), sinks))


TOKENS = 256
# Few sizes, so that little is compiled; empty rows make fewer of them.
ROWS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 40)), min_size=6, max_size=6)


def lengths(rows: list[tuple[int, int]]) -> tuple[jax.Array, jax.Array]:
    """Context lengths and query starts of rows of (tokens before, new tokens)."""
    context = jnp.array([before + new if new else 0 for before, new in rows], jnp.int32)
    return context, jnp.array(np.cumsum([0, *(new for _, new in rows)]), jnp.int32)


@given(rows=ROWS, items=st.sampled_from([1, 3, 12]), window=st.sampled_from([None, 1, 100]))
@settings(max_examples=40)
def test_decode_plan_gives_every_tile_to_one_item(rows, items, window):
    context, start = lengths([(before, min(new, 2)) for before, new in rows])
    config = DecodeConfig(tile=64, steps=2, items=items)
    planned, of_rows = (np.asarray(x) for x in mosaic_decode.plan(context, start, start[:-1], config, window))
    covered = []
    for item, (row, length, unit, first_tile, tiles, pieces, first_item) in enumerate(planned.T.tolist()):
        if pieces:
            assert (length, unit) == (context[row], start[row])
            piece = item - first_item
            run = range(first_tile + piece * tiles // pieces, first_tile + (piece + 1) * tiles // pieces)
            assert len(run) > 0
            covered += [(row, tile) for tile in run]
    wanted = [
        (row, tile)
        for row, (length, new) in enumerate(zip(context.tolist(), np.diff(start), strict=True))
        if new == 1
        for tile in range(0 if window is None else max(0, length - window) // 64, -(-length // 64))
    ]
    assert covered == wanted
    assert of_rows[5].sum() == np.count_nonzero(planned[5])
    most = -(-len(wanted) // items)  # no item has more than its share
    assert all(-(-tiles // pieces) <= most for tiles, pieces in planned[4:6].T if pieces)


@given(rows=ROWS, group=st.sampled_from([1, 3, 7, 16]))
@settings(max_examples=40)
def test_prefill_plan_gives_every_query_to_one_tile(rows, group):
    context, start = lengths(rows)
    packing = Packing.choose(group, TOKENS)
    unit_start = packing.starts(start)
    tiles = np.asarray(mosaic_prefill.plan(context, start, unit_start, TOKENS, packing))
    context, start, unit_start = (np.asarray(x) for x in (context, start, unit_start))
    covered = {}
    for row, first, count, position, length in tiles.T.tolist():
        assert count * packing.rows <= mosaic_prefill.ROWS
        for unit in range(first, first + count):
            assert unit not in covered
            covered[unit] = (row, position + (unit - first) * packing.tokens, length)
    for row, new in enumerate(np.diff(start)):
        first = context[row] - new
        for i in range(-(-new // packing.tokens)):
            if new > 1:
                wanted = (row, first + i * packing.tokens, context[row])
                assert covered.pop(int(unit_start[row]) + i) == wanted
    # The rest are the units behind the rows, which have no context.
    behind = range(int(unit_start[-1]), int(unit_start[-1]) - (-(TOKENS - int(start[-1])) // packing.tokens))
    assert {unit: length for unit, (_, _, length) in covered.items()} == dict.fromkeys(behind, 0)


@given(rows=ROWS, group=st.sampled_from([1, 3, 4]))
@settings(max_examples=20)
def test_units_hold_every_query(rows, group):
    _, start = lengths(rows)
    packing = Packing.choose(group, TOKENS)
    queries = jnp.arange(TOKENS * 2 * group, dtype=jnp.float32).reshape(TOKENS, 2, group, 1)
    unit_start = packing.starts(start)
    units = packing.pack(queries, start, unit_start)
    assert units.shape == (packing.units(TOKENS, len(rows) + 1), 2, packing.rows, 1)
    np.testing.assert_array_equal(packing.unpack(units, start, unit_start, TOKENS, group), queries)


SHAPES = {
    "32/4 heads of 128": (32, 4, 128),
    "16/2 heads of 256": (16, 2, 256),
    "9/3 heads of 64": (9, 3, 64),
    "64/8 heads of 64": (64, 8, 64),
    "32/32 heads of 96": (32, 32, 96),
    "32/16 heads of 128": (32, 16, 128),
}


def abstract_call(heads, kv_heads, head_dim, *, tokens, rows, page_tokens=16, stride_rows=None, **options):
    """The kernels as a function of abstract operands, and those operands."""
    kv_view = view(
        "kv", (2, kv_heads, page_tokens, head_dim), "bfloat16", stride_rows and stride_rows * head_dim
    )
    call = functools.partial(mosaic_gpu.paged_attention, view=kv_view, scale=head_dim**-0.5, **options)
    struct = jax.ShapeDtypeStruct
    operands = {
        "queries": struct((tokens, heads, head_dim), jnp.bfloat16),
        "pool": struct((4096, kv_view.stride * 32), jnp.uint16),
        "page_table": struct((rows, 256), jnp.int32),
        "query_start": struct((rows + 1,), jnp.int32),
        "context_len": struct((rows,), jnp.int32),
    }
    return call, operands


@pytest.mark.parametrize(
    ("tokens", "rows", "longest"), [(64, 64, 1), (1024, 8, 1024)], ids=["decode", "mixed"]
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES.values(), ids=SHAPES)
def test_lowers_for_cuda(heads, kv_heads, head_dim, tokens, rows, longest):
    call, operands = abstract_call(
        heads, kv_heads, head_dim, tokens=tokens, rows=rows, max_query_len=longest, sliding_window=None
    )
    text = jax.jit(call).trace(**operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= (2 if longest == 1 else 3)


def test_lowers_with_window_sinks_and_padded_pages():
    call, operands = abstract_call(
        32, 4, 128, tokens=64, rows=8, stride_rows=136, max_query_len=64, sliding_window=100
    )
    operands["sinks"] = jax.ShapeDtypeStruct((32,), jnp.float32)
    assert "mosaic_gpu" in jax.jit(call).trace(**operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "computes in bfloat16"),
        ({"dim": 48}, "head_dim is 48"),
        ({"page_tokens": 4}, "pages hold 4 tokens"),
        ({"heads": 66, "kv_heads": 1}, "66 query heads share 1"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
)
def test_refusals(change, message):
    scale = change.get("scale", 1.0)
    shape = {"heads": 4, "kv_heads": 2, "dim": 64, "page_tokens": 16, "dtype": "bfloat16"}
    case = Case([(3, 1)], **{**shape, **{k: v for k, v in change.items() if k != "scale"}})
    reason = mosaic_gpu.refusal(jnp.asarray(case.queries), case.view, scale=scale)
    assert reason is not None
    assert message in reason


def test_kernels_named_without_a_gpu_are_an_error():
    if jax.default_backend() == "gpu":
        pytest.skip("this is a GPU")
    case = Case([(3, 1)], heads=4, kv_heads=2, dim=64, page_tokens=16, dtype="bfloat16")
    with pytest.raises(ValueError, match="cannot run as 'mosaic_gpu': it needs a GPU"):
        paged_attention(
            jnp.asarray(case.queries),
            jnp.asarray(case.pool),
            case.view,
            jnp.asarray(case.table),
            jnp.asarray(case.start),
            jnp.asarray(case.context),
            scale=1.0,
            max_query_len=1,
            implementation="mosaic_gpu",
        )


# On the card


def run_in_bucket(case: Case, **options) -> np.ndarray:
    """`run` with sizes that all short cases share, so that they share compiled kernels."""
    rows, tokens, width, pages = 8, 256, 40, 512
    case.table = np.pad(case.table, ((0, rows - case.table.shape[0]), (0, width - case.table.shape[1])))
    case.start = np.pad(case.start, (0, rows + 1 - len(case.start)), mode="edge")
    case.context = np.pad(case.context, (0, rows - len(case.context)))
    case.pool = np.pad(case.pool, ((0, pages - len(case.pool)), (0, 0)), constant_values=NAN_WORD)
    is_decode = max(new for _, new in case.rows) == 1
    return run(case, padding=tokens - case.start[-1], longest=1 if is_decode else tokens, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES.values(), ids=SHAPES)
def test_ragged_on_the_card(heads, kv_heads, head_dim):
    # Two key/value heads are enough: the group decides the code.
    shape = {"heads": 2 * heads // kv_heads, "kv_heads": 2, "dim": head_dim, "page_tokens": 16}
    for rows in RAGGED.values():
        case = Case(rows, **shape, dtype="bfloat16")
        wanted = case.dense()
        assert_close(run_in_bucket(case), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("window", "head_dim"), [(1, 64), (5, 64), (200, 64), (200, 96), (16, 128), (None, 128), (200, 256)]
)
def test_window_and_sinks_on_the_card(window, head_dim):
    sinks = np.linspace(-2, 4, 16).astype(np.float32)
    for rows in ("mixed", "decodes", "long"):
        case = Case(RAGGED[rows], heads=16, kv_heads=2, dim=head_dim, page_tokens=16, dtype="bfloat16")
        wanted = case.dense(window, sinks)
        assert_close(run_in_bucket(case, sliding_window=window, sinks=jnp.asarray(sinks)), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("page_tokens", [8, 32, 64, 256])
def test_page_sizes_on_the_card(page_tokens):
    case = Case(RAGGED["mixed"], heads=8, kv_heads=2, dim=128, page_tokens=page_tokens, dtype="bfloat16")
    assert_close(run(case), case.dense())


LONG = [(9000, 1), (0, 0), (300, 700), (40, 1), (0, 1500), (2047, 1), (5000, 2), (4095, 1)]


def reference(case: Case, **options) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        out = jax.jit(
            functools.partial(paged_attention, view=case.view, implementation="reference", **options)
        )(
            jnp.asarray(case.queries),
            jnp.asarray(case.pool),
            page_table=jnp.asarray(case.table),
            query_start=jnp.asarray(case.start),
            context_len=jnp.asarray(case.context),
        )
    return np.asarray(out, np.float64)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 4, 128), (16, 2, 256), (9, 3, 64)])
@pytest.mark.parametrize("window", [None, 1000])
def test_long_contexts_on_the_card(heads, kv_heads, head_dim, window):
    case = Case(LONG, heads=heads, kv_heads=kv_heads, dim=head_dim, page_tokens=16, dtype="bfloat16")
    got = run(case, sliding_window=window)
    wanted = reference(case, scale=0.3, max_query_len=1500, sliding_window=window)
    assert_close(got, wanted)
    np.testing.assert_array_equal(run(case, sliding_window=window), got)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["decodes", "mixed"])
def test_pages_beyond_2_to_the_31_elements_on_the_card(rows):
    case = Case(RAGGED[rows], heads=16, kv_heads=2, dim=128, page_tokens=16, dtype="bfloat16")
    wanted = case.dense()
    words = case.pool.shape[1]
    beyond = 2**31 // words + 5
    # Stays on the card: `run` hands arrays over as they are.
    pool = jnp.full((beyond + case.pool.shape[0], words), NAN_WORD, jnp.uint16)
    case.pool = jax.jit(lambda pool, pages: pool.at[beyond:].set(pages), donate_argnums=0)(pool, case.pool)
    case.table = case.table + np.int32(beyond)
    assert_close(run(case), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["decodes", "mixed"])
def test_padded_pages_on_the_card(rows):
    case = Case(RAGGED[rows], heads=16, kv_heads=2, dim=64, page_tokens=16, dtype="bfloat16")
    wanted = case.dense()
    stride = case.view.stride + 8 * 64
    case.pool = np.pad(case.pool, ((0, 0), (0, 8 * 64)), constant_values=NAN_WORD)
    case.view = MemoryView(kind="kv", page_shape=case.view.page_shape, dtype=case.view.dtype, stride=stride)
    assert_close(run(case), wanted)
