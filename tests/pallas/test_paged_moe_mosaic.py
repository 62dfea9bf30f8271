"""The Mosaic GPU kernel of routed experts: its numbers in the GPU interpreter, its code for real shapes, its refusals.

Tests marked gpu compare it with a float32 product on the card.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.host.expert_cache import HOST
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import group_tokens
from rimuru_jax.pallas.page_loads import PageLoads
from rimuru_jax.pallas.paged_moe import mosaic_gpu, paged_moe
from rimuru_jax.pallas.paged_moe.activations import activation_named
from rimuru_jax.pallas.paged_moe.mosaic_gpu import Config, Launch
from tests.pallas.paged import NAN_WORD, poisoned_pool
from tests.pallas.test_paged_moe import LIMIT, PAGES, Experts, all_valid, layer_1, tokens

# Inner activation, expert output and sum are each rounded to bfloat16: a relative error of 2^-9 at most, 1.1e-3 in the
# mean square, so about 2e-3 together.
TOLERANCE = 5e-3


def launch(weights_first: bool, block: int, warpgroups: int, depth: int = 64, stages: int = 2) -> Launch:
    return Launch(
        weights_first=weights_first, block=block, warpgroups=warpgroups, depth=depth, stages=stages, store=64
    )


def config(weights_first: bool, block: int, warpgroups: int, **sizes: int) -> Config:
    """The same sizes for both launches, and few enough blocks that each takes several items."""
    both = launch(weights_first, block, warpgroups, **sizes)
    return Config(gate_up=both, down=both, blocks=3)


FORMS = {
    "weights first": (8, config(True, 64, 1)),
    "weights first, two warpgroups, deep": (16, config(True, 128, 2, depth=128, stages=3)),
    "tokens first": (128, config(False, 128, 2)),
}
forms = pytest.mark.parametrize(("tile", "sizes"), FORMS.values(), ids=FORMS)


@functools.partial(jax.jit, static_argnames=("view", "tile", "sizes", "activation"))
def _run(
    x,
    mix,
    chosen,
    valid,
    pool,
    host,
    table,
    loads: PageLoads | None = None,
    biases=None,
    *,
    view: MemoryView,
    tile: int,
    sizes: Config | None,
    activation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    routing = group_tokens(chosen, valid, table.shape[0], tile=tile)
    name = activation or ("silu" if table.shape[1] == 3 else "relu2")
    function = activation_named(name, swiglu_limit=LIMIT)
    return mosaic_gpu.paged_moe(
        x,
        mix,
        routing,
        pool,
        view,
        host,
        layer_1(table),
        jnp.int32(1),
        loads,
        activation=function,
        biases=biases,
        config=sizes,
    )


def interpret(
    experts: Experts, x, mix, chosen, valid, tile, sizes, *, table=None, pool=None, **rest
) -> np.ndarray:
    """What the kernel computes, with the race detector on and unwritten memory full of NaN."""
    return interpret_both(experts, x, mix, chosen, valid, tile, sizes, table=table, pool=pool, **rest)[0]


def interpret_both(
    experts: Experts, x, mix, chosen, valid, tile, sizes, *, table=None, pool=None, **rest
) -> tuple[np.ndarray, np.ndarray]:
    """The sum and the pool."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out, pool = _run(
            jnp.asarray(x, jnp.bfloat16),
            jnp.asarray(mix),
            jnp.asarray(chosen),
            jnp.asarray(valid),
            jnp.asarray(experts.pool if pool is None else pool),
            jnp.asarray(experts.host),
            jnp.asarray(experts.pages if table is None else table),
            view=experts.view,
            tile=tile,
            sizes=sizes,
            **rest,
        )
    return np.asarray(out), np.asarray(pool)


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The race detector of the interpreter only prints."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@forms
@pytest.mark.parametrize("count", [1, 21])
def test_equals_the_loop(tile, sizes, count):
    experts = Experts.random("bfloat16", f=128, d=128)
    x, mix, chosen = tokens(count, 5, 3, 128)  # expert 5 is never chosen
    got = interpret(experts, x, mix, chosen, all_valid(count), tile, sizes).astype(np.float64)
    wanted = experts.loop(x, mix, chosen)
    assert np.linalg.norm(got - wanted) <= TOLERANCE * np.linalg.norm(wanted)


@forms
def test_experts_of_two_matrices(tile, sizes):
    experts = Experts.random("bfloat16", matrices=2, f=128, d=128)
    x, mix, chosen = tokens(7, 6, 2, 128)
    got = interpret(experts, x, mix, chosen, all_valid(7), tile, sizes).astype(np.float64)
    wanted = experts.loop(x, mix, chosen)
    assert np.linalg.norm(got - wanted) <= TOLERANCE * np.linalg.norm(wanted)


@forms
def test_clamped_experts_with_biases(tile, sizes):
    experts = Experts.random("bfloat16", f=128, d=128)
    x, mix, chosen = tokens(20, 6, 3, 128)
    rng = np.random.default_rng(2)
    biases = [jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((6, 2, 128), (6, 128))]
    got = interpret(
        experts,
        x,
        mix,
        chosen,
        all_valid(20),
        tile,
        sizes,
        activation="clamped_swiglu",
        biases=tuple(biases),
    )
    wanted = experts.loop(x, mix, chosen, [np.asarray(b, np.float64) for b in biases])
    assert np.linalg.norm(got.astype(np.float64) - wanted) <= TOLERANCE * np.linalg.norm(wanted)


def page_loads(sources, targets, blocks: int) -> PageLoads:
    """Loads of the layer after layer 1; other rows must not be read."""
    count, wrong = len(sources), np.full(len(sources) + 3, 2**30)
    rows = [np.stack([wrong, wrong, np.concatenate([part, wrong[count:]])]) for part in (sources, targets)]
    return PageLoads(
        *(jnp.asarray(row, jnp.int32) for row in rows),
        counts=jnp.asarray([99, 99, count], jnp.int32),
        blocks=jnp.int32(blocks),
    )


@forms
@pytest.mark.parametrize(("count", "blocks"), [(0, 1), (1, 1), (4, 2), (5, 8)])
def test_loads_pages_meanwhile(tile, sizes, count, blocks):
    experts = Experts.random("bfloat16", experts=4, f=128, d=128)
    x, mix, chosen = tokens(5, 4, 2, 128)
    rng = np.random.default_rng(4)
    free = np.setdiff1d(np.arange(1, PAGES), experts.pages)
    sources, targets = rng.permutation(12)[:count] + 12, rng.permutation(free)[:count]
    alone = interpret(experts, x, mix, chosen, all_valid(5), tile, sizes)
    loads = page_loads(sources, targets, blocks)
    got, pool = interpret_both(experts, x, mix, chosen, all_valid(5), tile, sizes, loads=loads)
    assert (got == alone).all()
    wanted = experts.pool.copy()
    wanted[targets] = experts.host[sources]
    assert (pool == wanted).all()


def test_experts_of_several_tiles():
    experts = Experts.random("bfloat16", experts=2, f=64, d=128)
    x, mix, chosen = tokens(50, 2, 1, 128)
    got = interpret(experts, x, mix, chosen, all_valid(50), 8, config(True, 64, 1)).astype(np.float64)
    wanted = experts.loop(x, mix, chosen)
    assert np.linalg.norm(got - wanted) <= TOLERANCE * np.linalg.norm(wanted)


def test_tokens_that_fit_one_tile_get_the_same_bits_as_among_others():
    """They are not gathered by expert: every tile has them all."""
    experts = Experts.random("bfloat16", experts=4, f=64, d=128)
    x, mix, chosen = tokens(20, 4, 2, 128)
    run = functools.partial(interpret, experts, tile=8, sizes=config(True, 64, 1))
    among_others = run(x, mix, chosen, all_valid(20))[:6]
    np.testing.assert_array_equal(run(x[:6], mix[:6], chosen[:6], all_valid(6)), among_others)


def test_the_largest_tile_gives_the_same_bits():
    """A tile of which one part has no token, against two."""
    experts = Experts.random("bfloat16", experts=2, f=64, d=128)
    x, mix, chosen = tokens(280, 2, 1, 128)
    assert 128 < np.bincount(chosen.ravel()).max() <= 192
    run = functools.partial(interpret, experts, x, mix, chosen, all_valid(280))
    large = run(256, config(False, 64, 4))
    np.testing.assert_array_equal(large, run(128, config(False, 64, 2)))
    wanted = experts.loop(x, mix, chosen)
    assert np.linalg.norm(large.astype(np.float64) - wanted) <= TOLERANCE * np.linalg.norm(wanted)


@forms
def test_padding_tokens_and_foreign_pages_change_nothing(tile, sizes):
    """Padding tokens of NaN with NaN weights, and a pool of NaN wherever no chosen expert lies."""
    experts = Experts.random("bfloat16", f=128, d=128)
    x, mix, chosen = tokens(6, 5, 2, 128)
    wanted = interpret(experts, x, mix, chosen, np.arange(6) < 4, tile, sizes)
    x[4:], mix[4:] = np.nan, np.nan
    experts.pool[experts.pages[5]] = NAN_WORD
    got = interpret(experts, x, mix, chosen, np.arange(6) < 4, tile, sizes)
    assert np.isfinite(wanted.astype(np.float32)).all()
    assert (got == wanted).all()
    assert (got[4:] == 0).all()


@forms
def test_bit_equal_wherever_the_pages_are(tile, sizes):
    """Law 11: identity table, shuffled pages, host, and a mix with the matrices of one expert apart."""
    experts = Experts.random("bfloat16", experts=4, f=128, d=128)
    x, mix, chosen = tokens(5, 4, 2, 128)
    run = functools.partial(interpret, experts, x, mix, chosen, all_valid(5), tile, sizes)
    shuffled = run()

    identity = np.arange(1, 13, dtype=np.int32).reshape(4, 3)
    pool = poisoned_pool(PAGES, experts.view.stride)
    pool[1:13] = experts.host[12:]
    assert (run(table=identity, pool=pool) == shuffled).all()

    nothing = poisoned_pool(PAGES, experts.view.stride)
    assert (run(table=np.full((4, 3), HOST, np.int32), pool=nothing) == shuffled).all()

    away = np.random.default_rng(3).integers(0, 2, (4, 3)) == 1
    pool = experts.pool.copy()
    pool[experts.pages[away]] = NAN_WORD
    assert (run(table=np.where(away, HOST, experts.pages).astype(np.int32), pool=pool) == shuffled).all()


def test_padded_pages():
    """Page strides beyond the content: whole rows of padding, here NaN, in the pool and on the host."""
    experts = Experts.random("bfloat16", f=64, d=128, stride=64 * 128 + 3 * 128)
    x, mix, chosen = tokens(6, 6, 2, 128)
    table = experts.pages.copy()
    table[::2] = HOST
    got = interpret(experts, x, mix, chosen, all_valid(6), 8, config(True, 64, 1), table=table)
    wanted = experts.loop(x, mix, chosen)
    assert np.linalg.norm(got.astype(np.float64) - wanted) <= TOLERANCE * np.linalg.norm(wanted)


def shapes(
    count: int, experts: int, top_k: int, d: int, f: int, matrices: int = 3, pages: int = 4096
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], MemoryView]:
    """Arguments of `_run` as shapes, and the view of the expert pages."""
    spec = jax.ShapeDtypeStruct
    args = (
        spec((count, d), jnp.bfloat16),
        spec((count, top_k), jnp.float32),
        spec((count, top_k), jnp.int32),
        spec((count,), jnp.bool_),
        spec((pages, f * d), jnp.uint16),
        spec((48 * experts * matrices, f * d), jnp.uint16),
        spec((experts, matrices), jnp.int32),
    )
    view = MemoryView(kind="expert", page_shape=(f, d), dtype=jnp.dtype(jnp.bfloat16), stride=f * d)
    return args, view


QWEN3_30B = {"experts": 128, "top_k": 8, "d": 2048, "f": 768}
QWEN15_MOE = {"experts": 60, "top_k": 4, "d": 2048, "f": 1408}
NEMOTRON_NANO = {"experts": 128, "top_k": 6, "d": 2688, "f": 1856, "matrices": 2}


@pytest.mark.parametrize(
    "model",
    [QWEN3_30B, QWEN15_MOE, NEMOTRON_NANO],
    ids=["qwen3-30b-a3b", "qwen1.5-moe", "nemotron-3-nano"],
)
@pytest.mark.parametrize("count", [1, 64, 256, 8192])
def test_lowers_for_real_shapes(model, count):
    """Layouts and types pass the compiler up to device code; no GPU is needed for that."""
    args, view = shapes(count, **model)
    tile = mosaic_gpu.token_tile(count * model["top_k"], model["experts"])
    lowered = _run.trace(*args, view=view, tile=tile, sizes=None).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2


@pytest.mark.parametrize("tile", mosaic_gpu.TILES)
@pytest.mark.parametrize("f", [64, 192, 512, 768, 1024, 1408, 1856, 14336])
@pytest.mark.parametrize("d", [64, 320, 2048, 4096])
def test_every_shape_has_a_configuration(tile, f, d):
    two, one = (mosaic_gpu.choose_config(tile, f, d, 132, inner=inner) for inner in (2, 1))
    launches = ((two.gate_up, f, d, 2), (one.gate_up, f, d, 1), (two.down, d, f, 1))
    for sizes, width, contracted, matrices in launches:
        assert width % sizes.block == 0 and contracted % sizes.depth == 0
        m_side = sizes.block if sizes.weights_first else tile
        assert m_side == 64 * sizes.warpgroups
        slot = (matrices * sizes.block + tile) * sizes.depth * 2
        assert sizes.stages >= 2 and sizes.stages * slot + tile * min(sizes.block, 128) * 2 < 227 * 1024


@pytest.mark.parametrize(("warpgroups", "at_start"), [(1, 256), (2, 168), (4, 96)])
def test_no_warpgroup_waits_for_registers(warpgroups, at_start):
    """Registers of a thread at the start are what CUDA's occupancy calculator gives for blocks of 256, 384 and 640 threads."""
    wanted = warpgroups * mosaic_gpu.multiply_registers(warpgroups) + mosaic_gpu.FETCH_REGISTERS
    assert wanted <= (warpgroups + 1) * at_start


def test_tiles_hold_the_tokens_of_most_experts():
    pairs = (1, 64, 65, 160, 1024, 16 * 96, 16 * 97, 1 << 20)
    assert [mosaic_gpu.token_tile(n, 16) for n in pairs] == [8, 8, 8, 32, 128, 128, 128, 128]
    # Once a second tile would be read from the host for many experts, tiles are larger.
    assert [mosaic_gpu.token_tile(n, 16, from_host=True) for n in pairs] == [8, 8, 8, 32, 128, 128, 256, 256]


@pytest.mark.parametrize("count", [1, 256, 8192])
def test_loads_and_biases_lower_for_real_shapes(count):
    args, view = shapes(count, experts=32, top_k=4, d=2880, f=2880)
    spec = jax.ShapeDtypeStruct
    loads = PageLoads(*(spec(s, jnp.int32) for s in ((3, 96), (3, 96), (3,), ())))  # type: ignore[arg-type]
    biases = spec((32, 2, 2880), jnp.bfloat16), spec((32, 2880), jnp.bfloat16)
    tile = mosaic_gpu.token_tile(count * 4, 32)
    traced = _run.trace(*args, loads, biases, view=view, tile=tile, sizes=None, activation="clamped_swiglu")
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 2


def refused(**changes) -> str | None:
    view = MemoryView(kind="expert", page_shape=(128, 64), dtype=jnp.dtype(jnp.bfloat16), stride=128 * 64)
    fields = ("page_shape", "dtype", "stride")
    view = dataclasses.replace(view, **{k: v for k, v in changes.items() if k in fields})
    rest = {
        "hidden_dtype": jnp.dtype(jnp.bfloat16),
        "tile": 8,
        "host_words": 128 * 64,
    }
    return mosaic_gpu.refusal(view, **rest | {k: v for k, v in changes.items() if k not in fields})


def test_refusals_name_what_is_wrong():
    assert refused() is None
    cases = (
        ({"hidden_dtype": jnp.dtype(jnp.float32)}, "hidden states float32, but bfloat16"),
        ({"page_shape": (96, 64)}, "96 x 64, but multiples of 64"),
        ({"stride": 128 * 64 + 64}, "pages of 8256 and 8192 words are no multiples of rows of 128 and 64"),
        ({"tile": 4}, "4 tokens, but one of 8, 16"),
    )
    for changes, reason in cases:
        assert reason in (refused(**changes) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what happens without a GPU")
def test_naming_it_without_a_gpu_is_an_error():
    experts = Experts.random("bfloat16", f=64, d=64)
    x, mix, chosen = tokens(2, 6, 3, 64)
    routing = group_tokens(jnp.asarray(chosen), jnp.ones(2, bool), 6, tile=8)
    with pytest.raises(ValueError, match="paged_moe cannot run as 'mosaic_gpu': it needs a GPU"):
        paged_moe(
            jnp.asarray(x, jnp.bfloat16),
            jnp.asarray(mix),
            routing,
            jnp.asarray(experts.pool),
            experts.view,
            jnp.asarray(experts.host),
            layer_1(experts.pages),
            jnp.int32(1),
            implementation="mosaic_gpu",
        )


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
]


class OnCard:
    """Random experts of layer 1 of 2 at the far end of a pool of NaN that has more than 2^31 elements."""

    def __init__(self, experts: int, top_k: int, d: int, f: int, seed: int = 0):
        self.experts, self.top_k, self.d, self.f = experts, top_k, d, f
        self.rng = np.random.default_rng(seed)
        pages = 2**31 // (f * d) + 3 * experts + 9
        ids = pages - 1 - self.rng.permutation(3 * experts + 8)[: 3 * experts]
        self.table = jnp.asarray(ids.reshape(experts, 3), jnp.int32)
        self.view = shapes(1, experts, top_k, d, f)[1]

        @jax.jit
        def build(key):
            w = jax.random.normal(key, (3 * experts, f * d), jnp.bfloat16) * jnp.bfloat16(0.02)
            words = jax.lax.bitcast_convert_type(w, jnp.uint16)
            pool = jnp.full((pages, f * d), NAN_WORD, jnp.uint16).at[jnp.asarray(ids)].set(words)
            host = jnp.full((6 * experts, f * d), NAN_WORD, jnp.uint16).at[3 * experts :].set(words)
            return w.reshape(experts, 3, f, d), pool, host

        self.weights, self.pool, self.host = build(jax.random.key(seed))

    def tokens(self, count: int, skew: float):
        """Hidden states, mixing weights and distinct experts; expert e is chosen like 1 / (e + 1)^skew."""
        popularity = -skew * np.log(np.arange(1, self.experts + 1))
        scores = popularity + self.rng.gumbel(size=(count, self.experts))
        chosen = np.argsort(-scores, axis=1)[:, : self.top_k].astype(np.int32)
        mix = self.rng.random((count, self.top_k)).astype(np.float32)
        x = self.rng.normal(size=(count, self.d)).astype(np.float32)
        return jnp.asarray(x, jnp.bfloat16), jnp.asarray(mix / mix.sum(1, keepdims=True)), jnp.asarray(chosen)

    def run(self, x, mix, chosen, valid, **rest):
        return self.run_both(x, mix, chosen, valid, **rest)[0]

    def run_both(self, x, mix, chosen, valid, *, table=None, pool=None, from_host=False, **rest):
        tile = mosaic_gpu.token_tile(chosen.size, self.experts, from_host=from_host)
        return _run(
            x,
            mix,
            chosen,
            valid,
            self.pool if pool is None else pool,
            self.host,
            self.table if table is None else table,
            view=self.view,
            tile=tile,
            sizes=None,
            **rest,
        )

    def dense(self, x, mix, chosen, chunk: int = 256) -> np.ndarray:
        """Every expert for every token in float32, without any rounding in between."""
        out = []
        for start in range(0, len(x), chunk):
            # Chunks of one size, so that this compiles once.
            parts = [a[start : start + chunk] for a in (x, mix, chosen)]
            missing = chunk - len(parts[0])
            padded = [jnp.pad(a, ((0, missing), (0, 0))) for a in parts]
            out.append(np.asarray(_dense(self.weights, *padded))[: len(parts[0])])
        return np.concatenate(out)


@jax.jit
def _dense(weights, x, mix, chosen):
    experts, _, f, d = weights.shape
    dot = functools.partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32)
    x = x.astype(jnp.float32)

    def add_expert(e, total):
        w1, w3, w2 = weights[e].astype(jnp.float32)
        h = jax.nn.silu(dot(x, w1.T)) * dot(x, w3.T)
        share = jnp.sum(jnp.where(chosen == e, mix, 0), axis=1, keepdims=True)
        return total + share * dot(h, w2.reshape(d, f).T)

    return jax.lax.fori_loop(0, experts, add_expert, jnp.zeros(x.shape, jnp.float32))


@pytest.fixture(scope="module", params=[QWEN3_30B, QWEN15_MOE], ids=["qwen3-30b-a3b", "qwen1.5-moe"])
def on_card(request) -> OnCard:
    return OnCard(**request.param)


class TestOnCard:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("count", "skew"), [(1, 0.0), (37, 0.0), (64, 1.2), (256, 0.0), (1000, 1.2), (8192, 0.0), (8192, 1.2)]
    )
    def test_equals_a_dense_float32_product(self, on_card, count, skew):
        x, mix, chosen = on_card.tokens(count, skew)
        valid = np.ones(count, bool)
        got = on_card.run(x, mix, chosen, valid)
        wanted = on_card.dense(x, mix, chosen)
        error = np.linalg.norm(np.asarray(got, np.float32) - wanted)
        assert error <= TOLERANCE * np.linalg.norm(wanted)
        assert (got == on_card.run(x, mix, chosen, valid)).all()

    @pytest.mark.parametrize("count", [50, 2000])
    def test_bit_equal_wherever_the_pages_are(self, on_card, count):
        x, mix, chosen = on_card.tokens(count, 0.5)
        valid = np.ones(count, bool)
        resident = on_card.run(x, mix, chosen, valid)
        host = jnp.full_like(on_card.table, HOST)
        away = jnp.asarray(on_card.rng.random(host.shape) < 0.5)
        for table in (host, jnp.where(away, host, on_card.table)):
            assert (on_card.run(x, mix, chosen, valid, table=table) == resident).all()

    def test_tiles_for_experts_on_the_host_give_the_same_bits(self, on_card):
        x, mix, chosen = on_card.tokens(4096, 1.2)
        valid = np.ones(4096, bool)
        wanted = on_card.run(x, mix, chosen, valid)
        assert mosaic_gpu.token_tile(chosen.size, on_card.experts, from_host=True) == mosaic_gpu.TILES[-1]
        for table in (on_card.table, jnp.full_like(on_card.table, HOST)):
            assert (on_card.run(x, mix, chosen, valid, table=table, from_host=True) == wanted).all()

    @pytest.mark.parametrize("count", [16, 2048])
    def test_padding_tokens_change_nothing(self, on_card, count):
        x, mix, chosen = on_card.tokens(count, 0.5)
        valid = np.arange(count) < count * 3 // 4
        wanted = on_card.run(x, mix, chosen, valid)
        x, mix = x.at[~valid].set(jnp.nan), mix.at[~valid].set(jnp.nan)
        got = on_card.run(x, mix, chosen, valid)
        assert (got == wanted).all() and (got[~valid] == 0).all() and (got[valid] != 0).any()

    @pytest.mark.parametrize(("count", "loaded", "blocks"), [(1, 3, 8), (64, 40, 8), (2048, 90, 16)])
    def test_loads_pages_meanwhile(self, on_card, count, loaded, blocks):
        x, mix, chosen = on_card.tokens(count, 0.5)
        valid = np.ones(count, bool)
        alone = on_card.run(x, mix, chosen, valid)
        pages = len(on_card.pool)
        free = on_card.rng.choice(pages - 3 * on_card.experts - 9, loaded, replace=False)
        sources = 3 * on_card.experts + on_card.rng.permutation(3 * on_card.experts)[:loaded]
        loads = page_loads(sources, free, blocks)
        got, pool = on_card.run_both(x, mix, chosen, valid, loads=loads)
        assert (got == alone).all()
        assert (pool[free] == on_card.host[sources]).all()
        others = np.setdiff1d(on_card.rng.integers(1, pages, 500), free)
        assert (pool[others] == on_card.pool[others]).all()

    @pytest.mark.parametrize("count", [3, 500])
    def test_clamped_experts_with_biases(self, on_card, count):
        x, mix, chosen = on_card.tokens(count, 0.5)
        sizes = (on_card.experts, 2, on_card.f), (on_card.experts, on_card.d)
        biases = tuple(jnp.asarray(on_card.rng.normal(size=size), jnp.bfloat16) for size in sizes)
        got = on_card.run(x, mix, chosen, np.ones(count, bool), activation="clamped_swiglu", biases=biases)
        wanted = np.asarray(_dense_clamped(on_card.weights, x, mix, chosen, *biases))
        assert np.linalg.norm(np.asarray(got, np.float32) - wanted) <= TOLERANCE * np.linalg.norm(wanted)


@jax.jit
def _dense_clamped(weights, x, mix, chosen, inner_bias, outer_bias):
    """Experts of gpt_oss, every one for every token, in float32."""
    experts, _, f, d = weights.shape
    dot = functools.partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32)
    x = x.astype(jnp.float32)

    def add_expert(e, total):
        w1, w3, w2 = weights[e].astype(jnp.float32)
        bias = inner_bias[e].astype(jnp.float32)
        gate = jnp.minimum(dot(x, w1.T) + bias[0][None], LIMIT)
        up = jnp.clip(dot(x, w3.T) + bias[1][None], -LIMIT, LIMIT)
        out = dot(gate * jax.nn.sigmoid(1.702 * gate) * (up + 1), w2.reshape(d, f).T)
        share = jnp.sum(jnp.where(chosen == e, mix, 0), axis=1, keepdims=True)
        return total + share * (out + outer_bias[e].astype(jnp.float32)[None])

    return jax.lax.fori_loop(0, experts, add_expert, jnp.zeros(x.shape, jnp.float32))
