import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_jax.pallas.moe_routing import group_tokens, route
from rimuru_jax.pallas.paged_moe.api import token_tile


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 1), (9, 8, 3), (5, 16, 16)])
def test_route_token_by_token(normalize, tokens, experts, top_k):
    # Quarters make ties likely; they go to the lower expert.
    logits = np.random.default_rng(0).integers(-6, 6, (tokens, experts)).astype(np.float32) / 4
    chosen, weights = route(jnp.asarray(logits), top_k, normalize=normalize)
    for token in range(tokens):
        e = np.exp(logits[token].astype(np.float64))
        probabilities = e / e.sum()
        best = sorted(range(experts), key=lambda x: (-logits[token, x], x))[:top_k]
        wanted = probabilities[best] / (probabilities[best].sum() if normalize else 1)
        assert chosen[token].tolist() == best
        np.testing.assert_allclose(weights[token], wanted, rtol=2e-6)


def test_route_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="5 experts per token asked of 4"):
        route(jnp.zeros((1, 4)), 5, normalize=True)


_group = jax.jit(group_tokens, static_argnums=2, static_argnames="tile")


@settings(max_examples=60)
@given(st.data())
def test_tiles_hold_every_pair_once(data):
    tokens, experts = data.draw(st.sampled_from([1, 5, 24])), data.draw(st.sampled_from([1, 3, 8]))
    top_k = min(experts, data.draw(st.sampled_from([1, 3])))
    tile = data.draw(st.sampled_from([1, 2, 8, 64]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    chosen = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    valid = rng.random(tokens) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    result = jax.device_get(_group(chosen, valid, experts, tile=tile))

    counts = np.bincount(chosen[valid].reshape(-1), minlength=experts)
    assert result.counts.tolist() == counts.tolist()
    assert result.num_tiles == sum(-(-count // tile) for count in counts) <= len(result.tile_experts)
    used = set()
    for token in range(tokens):
        for choice in range(top_k):
            row = result.pair_rows[token, choice]
            if valid[token]:
                assert row // tile < result.num_tiles
                assert result.tile_experts[row // tile] == chosen[token, choice]
                assert result.row_tokens[row] == token
                used.add(int(row))
            else:
                assert row >= len(result.row_tokens)
    assert len(used) == valid.sum() * top_k
    fillers = set(range(len(result.row_tokens))) - used
    assert all(result.row_tokens[row] == tokens for row in fillers)
    assert (np.diff(result.tile_experts[: result.num_tiles]) >= 0).all()


def test_tile_follows_the_mean_share():
    assert [token_tile(pairs, 16) for pairs in (1, 16, 17, 32, 128, 1 << 20)] == [1, 1, 1, 2, 8, 64]
