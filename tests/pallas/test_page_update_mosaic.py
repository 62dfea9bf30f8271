"""The Mosaic GPU kernels of page loads and moves: numbers in the GPU interpreter, how pages and lists are cut, refusals.

Tests marked gpu run them on the card at real sizes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rimuru_jax.pallas.page_update import load_pages, mosaic_gpu, move_pages
from rimuru_jax.pallas.page_update.mosaic_gpu import Cut
from tests.pallas.paged import mixed_bits, view

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

# The race detector does not see that a TMA read has ended when its barrier says so, nor a TMA write when it was waited
# for: a page both read and written in one kernel looks like a race.
INTERPRET_CHAINS = plgpu.InterpretGPUParams()


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The race detector of the interpreter only prints."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.fixture
def small_chunks(monkeypatch):
    """Few blocks and small chunks, so that blocks have several of a page and the ring goes round."""
    for name, value in {"LOAD_BLOCKS": 2, "MOVE_BLOCKS": 3, "CHUNK_BYTES": 1024}.items():
        monkeypatch.setattr(mosaic_gpu, name, value)


def random_pool(huge_pages: int, words: int) -> np.ndarray:
    """Any bits, NaN patterns among them."""
    return np.random.default_rng(1).integers(0, 1 << 16, (huge_pages, words), dtype=np.uint16)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_load_pages_interpreted(small_chunks, count):
    words = 20 * 256
    pool, host = random_pool(6, 3 * words), random_pool(9, words)[::-1].copy()
    rng = np.random.default_rng(2)
    sources, targets = (rng.permutation(n)[:7].astype(np.int32) for n in (9, 18))
    got = jax.jit(functools.partial(mosaic_gpu.load_pages, interpret=INTERPRET))(
        pool, host, sources, targets, np.int32(count)
    )
    expected = pool.copy().reshape(-1, words)
    expected[targets[:count]] = host[sources[:count]]
    assert (np.asarray(got).reshape(-1, words) == expected).all()


MOVES = {
    "apart": [(0, 4), (1, 5), (2, 6), (3, 7)],
    "chain": [(0, 4), (1, 5), (4, 8), (5, 9), (9, 10), (2, 1), (10, 11)],
    "twice the same target": [(0, 4), (1, 4), (4, 5), (2, 4)],
    "a page that was left": [(0, 4), (1, 0), (2, 1), (3, 2)],
    "in place": [(3, 3), (3, 4)],
}


@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
def test_move_pages_interpreted(small_chunks, moves):
    pages = view("expert", (10, 256), "bfloat16", 12 * 256)
    pool = random_pool(6, 2 * pages.stride)
    # The list is longer than what counts of it.
    sources, targets = np.resize(np.array(moves, np.int32), (len(moves) + 2, 2)).T.copy()
    interpret = INTERPRET if moves == MOVES["apart"] else INTERPRET_CHAINS
    got = jax.jit(functools.partial(mosaic_gpu.move_pages, view=pages, interpret=interpret))(
        pool, sources=sources, targets=targets, count=np.int32(len(moves))
    )
    expected = pool.copy().reshape(-1, pages.stride)
    for source, target in moves:
        expected[target, : pages.words] = expected[source, : pages.words]
    assert (np.asarray(got).reshape(-1, pages.stride) == expected).all()


def test_moves_are_cut_where_one_needs_another():
    rng = np.random.default_rng(0)
    runs_of = jax.jit(mosaic_gpu.independent_runs)
    for _ in range(50):
        count = int(rng.integers(0, 13))
        sources, targets = rng.integers(0, 30, (2, 12)).astype(np.int32)
        runs, *bounds = np.asarray(runs_of(sources, targets, np.int32(count))).tolist()
        bounds = bounds[: runs + 1]
        assert bounds[0] == 0 or count == 0
        assert bounds[-1] == count and (np.diff(bounds) > 0).all()
        for begin, end in itertools.pairwise(bounds):
            for i in range(begin, end):
                assert not {sources[i], targets[i]} & set(targets[begin:i].tolist())
    assert runs_of(*np.array(MOVES["apart"], np.int32).T, np.int32(4))[0] == 1, (
        "nothing is cut without a need"
    )


SIZES = {
    "qwen3-30b": (2048 * 768, 2048 * 768),
    "qwen1.5": (2048 * 1408, 2048 * 1408),
    "nemotron, padded": (2688 * 1856, 1024 * 4872),
    "mixtral": (14336 * 4096, 14336 * 4096),
    "tiny": (40, 48),
    "uneven rows": (264 * 7, 264 * 7),
}


@pytest.mark.parametrize("most_blocks", [16, 132])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_pages_are_cut_evenly(size, most_blocks):
    words, stride = size
    cut = Cut.of(stride, words, most_blocks)
    assert cut.chunks * cut.rows * cut.row == words
    assert cut.page_shape[0] * cut.row == stride
    assert max(cut.rows, cut.row) <= 256 and cut.row % 8 == 0
    assert cut.rows * cut.row * 2 * mosaic_gpu.STAGES <= 220 * 1024
    assert 1 <= cut.blocks <= most_blocks
    if words >= 1 << 20:
        assert -(-cut.chunks // cut.blocks) * cut.blocks <= 1.2 * cut.chunks, "a sixth idle at most"


def test_refusals():
    assert mosaic_gpu.copy_refusal(48, 40) is None
    assert "40 words in 44" in str(mosaic_gpu.copy_refusal(44, 40))


_load = jax.jit(load_pages, static_argnames="implementation", donate_argnames="pool")
_move = jax.jit(move_pages, static_argnames=("view", "implementation"), donate_argnames="pool")


BEYOND = 2800  # pages of 2048 x 768, of which those from 1366 on lie beyond 2^31 words


def both_ways(update) -> None:
    """`update(pool, implementation)` does the same to every word of a pool, by the kernel and by the reference."""
    got = update(mixed_bits(BEYOND, 2048 * 768), "mosaic_gpu")
    wanted = update(mixed_bits(BEYOND, 2048 * 768), "reference")
    assert jax.jit(lambda a, b: jnp.all(a == b))(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 45])
def test_load_pages_on_the_card(count):
    rng = np.random.default_rng(0)
    host = ~mixed_bits(64, 2048 * 768)
    sources, targets = (
        jnp.asarray(rng.permutation(n)[:48] + first, jnp.int32) for n, first in ((64, 0), (1400, 1400))
    )
    both_ways(
        lambda pool, implementation: _load(
            pool, host, sources, targets, jnp.int32(count), implementation=implementation
        )
    )


@pytest.mark.gpu
def test_move_pages_on_the_card():
    """Random moves among few pages: most read or overwrite what others wrote. Repeated, because timing decides."""
    pages_view = view("expert", (768, 2048), "bfloat16")
    for seed in range(5):
        sources, targets = jnp.asarray(
            np.random.default_rng(seed).integers(BEYOND - 20, BEYOND, (2, 64)), jnp.int32
        )
        both_ways(
            lambda pool, implementation, s=sources, t=targets: _move(
                pool, pages_view, s, t, jnp.int32(60), implementation=implementation
            )
        )
