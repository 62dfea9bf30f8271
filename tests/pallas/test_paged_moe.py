"""Routed experts against a loop over tokens and experts, wherever the pages are."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax.host.expert_cache import HOST
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import group_tokens
from rimuru_jax.pallas.page_update import load_pages
from rimuru_jax.pallas.paged_moe import paged_moe
from tests.pallas.paged import NAN_WORD, poisoned_pool, put, view

PAGES = 90
LIMIT = 1.0  # of clamped_swiglu: low, so that it cuts


@functools.partial(jax.jit, static_argnames=("view", "tile", "activation"))
def _run(x, mix, chosen, valid, pool, host, table, biases, *, view: MemoryView, tile: int, activation: str):
    routing = group_tokens(chosen, valid, table.shape[0], tile=tile)
    mixed, _ = paged_moe(
        x,
        mix,
        routing,
        pool,
        view,
        host,
        layer_1(table),
        jnp.int32(1),
        activation=activation,
        biases=biases,
        swiglu_limit=LIMIT,
    )
    return mixed


def layer_1(table):
    """The tables of two layers of which only layer 1 is to be read."""
    return jnp.stack([jnp.full_like(table, 2**30), table])


@dataclass
class Experts:
    """Random experts of layer 1 of 2, all of them on the host and on shuffled pages of a pool of NaN."""

    weights: np.ndarray  # [experts, matrices, f, d]; the last matrix is read as [d, f]
    view: MemoryView
    pool: np.ndarray
    host: np.ndarray
    pages: np.ndarray  # [experts, matrices]

    @classmethod
    def random(
        cls, dtype: str, experts=6, matrices=3, f=16, d=24, seed=0, stride: int | None = None
    ) -> "Experts":
        rng = np.random.default_rng(seed)
        v = view("expert", (f, d), dtype, stride)
        weights = (rng.normal(size=(experts, matrices, f, d)) * 0.3).astype(v.dtype)
        pool = poisoned_pool(PAGES, v.stride)
        pages = rng.permutation(np.arange(1, PAGES))[: experts * matrices].reshape(experts, matrices)
        host = np.full((2 * experts * matrices, v.stride), NAN_WORD, np.uint16)
        for e in range(experts):
            for m in range(matrices):
                put(pool, v, pages[e, m], weights[e, m])
                put(host, v, (experts + e) * matrices + m, weights[e, m])
        return cls(weights, v, pool, host, pages.astype(np.int32))

    def run(self, x, mix, chosen, valid, tile, *, table=None, pool=None, activation=None, biases=None):
        return np.asarray(
            _run(
                jnp.asarray(x, self.view.dtype),
                mix,
                chosen,
                valid,
                self.pool if pool is None else pool,
                self.host,
                self.pages if table is None else table,
                biases,
                view=self.view,
                tile=tile,
                activation=activation or ("silu" if self.weights.shape[1] == 3 else "relu2"),
            )
        )

    def loop(self, x, mix, chosen, biases=None) -> np.ndarray:
        """Token by token, expert by expert, float64; with biases the experts of gpt_oss."""
        x = np.asarray(x.astype(self.view.dtype), np.float64)
        weights = self.weights.astype(np.float64)
        _, matrices, f, d = weights.shape
        out = np.zeros(x.shape)
        for t in range(len(x)):
            for e, share in zip(chosen[t], mix[t], strict=True):
                if biases is not None:
                    gate, up = (weights[e, i] @ x[t] + biases[0][e, i] for i in (0, 1))
                    gate, up = np.minimum(gate, LIMIT), np.maximum(np.minimum(up, LIMIT), -LIMIT)
                    h = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
                    out[t] += share * biases[1][e]
                elif matrices == 3:
                    gate = weights[e, 0] @ x[t]
                    h = gate / (1 + np.exp(-gate)) * (weights[e, 1] @ x[t])
                else:
                    h = np.maximum(weights[e, 0] @ x[t], 0) ** 2
                out[t] += share * (weights[e, -1].reshape(d, f) @ h)
        return out


def tokens(count: int, experts: int, top_k: int, d: int, seed: int = 1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, d)).astype(np.float32)
    chosen = np.stack([rng.permutation(experts)[:top_k] for _ in range(count)]).astype(np.int32)
    mix = rng.random((count, top_k)).astype(np.float32)
    return x, mix / mix.sum(1, keepdims=True), chosen


def all_valid(count: int) -> np.ndarray:
    return np.ones(count, bool)


# The inner activation is rounded to bfloat16 (8 bits), so that a sum of f products is off by about 2^-9 of its terms.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("matrices", [3, 2])
@pytest.mark.parametrize(("count", "tile"), [(1, 1), (2, 1), (7, 4), (40, 8), (33, 2), (200, 64)])
def test_equals_the_loop(dtype, matrices, count, tile):
    experts = Experts.random(dtype, matrices=matrices)
    x, mix, chosen = tokens(count, 6, 3, 24)
    got = experts.run(x, mix, chosen, all_valid(count), tile).astype(np.float64)
    wanted = experts.loop(x, mix, chosen)
    assert np.linalg.norm(got - wanted) <= TOLERANCE[dtype] * np.linalg.norm(wanted)


@pytest.mark.parametrize("tile", [1, 8])
def test_clamped_experts_with_biases(tile):
    experts = Experts.random("float32")
    x, mix, chosen = tokens(20, 6, 3, 24)
    rng = np.random.default_rng(2)
    biases = rng.normal(size=(6, 2, 16)).astype(np.float32), rng.normal(size=(6, 24)).astype(np.float32)
    got = experts.run(x, mix, chosen, all_valid(20), tile, activation="clamped_swiglu", biases=biases)
    wanted = experts.loop(x, mix, chosen, biases)
    assert np.linalg.norm(got - wanted) <= TOLERANCE["float32"] * np.linalg.norm(wanted)


@pytest.mark.parametrize("tile", [1, 4, 64])
def test_padding_tokens_change_nothing(tile):
    experts = Experts.random("float32")
    x, mix, chosen = tokens(10, 6, 3, 24)
    valid = np.arange(10) < 7
    garbage = x.copy()
    garbage[7:] = np.nan
    got = experts.run(garbage, mix, chosen, valid, tile)
    assert (got[:7] == experts.run(x, mix, chosen, valid, tile)[:7]).all()
    assert (got[7:] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", [1, 8])
def test_bit_equal_wherever_the_pages_are(dtype, tile):
    """Law 11: identity table, shuffled pages, host, loading buffers and random mixes."""
    experts = Experts.random(dtype)
    x, mix, chosen = tokens(12, 6, 3, 24)
    shuffled = experts.run(x, mix, chosen, all_valid(12), tile)

    identity = np.arange(1, 19, dtype=np.int32).reshape(6, 3)
    pool = poisoned_pool(PAGES, experts.view.stride)
    pool[1:19] = experts.host[18:]
    assert (experts.run(x, mix, chosen, all_valid(12), tile, table=identity, pool=pool) == shuffled).all()

    # Law 12: no page at all is in the pool, whatever number of them was chosen.
    on_host = np.full((6, 3), HOST, np.int32)
    nothing = poisoned_pool(PAGES, experts.view.stride)
    assert (experts.run(x, mix, chosen, all_valid(12), tile, table=on_host, pool=nothing) == shuffled).all()

    load = jax.jit(load_pages)
    rng = np.random.default_rng(3)
    free = np.setdiff1d(np.arange(1, PAGES), experts.pages)
    for _ in range(6):
        # Each expert anywhere: resident, in a buffer filled just now, or on the host; matrices of one expert apart.
        place = rng.integers(0, 3, (6, 3))
        buffers = rng.permutation(free)[:18].reshape(6, 3).astype(np.int32)
        table = np.select([place == 0, place == 1], [experts.pages, buffers], HOST).astype(np.int32)
        away = np.argwhere(place == 1)
        sources = np.array([18 + e * 3 + m for e, m in away], np.int32)
        sources, targets = np.resize(sources, 18), np.resize(buffers[place == 1], 18)
        pool = experts.pool.copy()
        pool[experts.pages[place != 0]] = NAN_WORD
        pool = load(pool, experts.host, sources, targets, np.int32(len(away)))
        assert (experts.run(x, mix, chosen, all_valid(12), tile, table=table, pool=pool) == shuffled).all()


def test_an_expert_nobody_chose_may_be_anything():
    experts = Experts.random("float32")
    x, mix, chosen = tokens(9, 5, 2, 24)  # expert 5 is never chosen
    before = experts.run(x, mix, chosen, all_valid(9), 4)
    experts.pool[experts.pages[5]] = NAN_WORD
    assert (experts.run(x, mix, chosen, all_valid(9), 4) == before).all()


def test_a_token_does_not_depend_on_its_neighbours():
    experts = Experts.random("float32")
    x, mix, chosen = tokens(30, 6, 3, 24)
    together = experts.run(x, mix, chosen, all_valid(30), 8)
    for t in (0, 13, 29):
        alone = np.arange(30) == t
        assert (experts.run(x, mix, chosen, alone, 8)[t] == together[t]).all()


def test_errors():
    experts = Experts.random("float32")
    x, mix, chosen = tokens(4, 6, 3, 25)
    with pytest.raises(ValueError, match=r"expert pages of shape \(16, 24\) do not fit hidden states of 25"):
        experts.run(x, mix, chosen, all_valid(4), 1)
    x, mix, chosen = tokens(4, 6, 3, 24)
    with pytest.raises(ValueError, match="4 matrices, but 'silu' takes 3"):
        experts.run(x, mix, chosen, all_valid(4), 1, table=np.zeros((6, 4), np.int32))
