import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_jax.pallas.moe_routing import Scoring, group_tokens, route
from rimuru_jax.pallas.paged_moe.reference import token_tile


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 1), (9, 8, 3), (5, 16, 16)])
def test_route_token_by_token(normalize, tokens, experts, top_k):
    # Quarters make ties likely; they go to the lower expert.
    logits = np.random.default_rng(0).integers(-6, 6, (tokens, experts)).astype(np.float32) / 4
    chosen, weights = route(jnp.asarray(logits), top_k, Scoring(normalize=normalize))
    for token in range(tokens):
        e = np.exp(logits[token].astype(np.float64))
        probabilities = e / e.sum()
        best = sorted(range(experts), key=lambda x: (-logits[token, x], x))[:top_k]
        wanted = probabilities[best] / (probabilities[best].sum() if normalize else 1)
        assert chosen[token].tolist() == best
        np.testing.assert_allclose(weights[token], wanted, rtol=2e-6)


@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_sigmoid_router_token_by_token(num_groups, top_groups, biased):
    """DeepSeek-V3's: biased scores choose groups by their two best, then experts; plain scores make the weights."""
    tokens, experts, top_k = 7, 16, 3
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(tokens, experts)).astype(np.float32)
    bias = rng.normal(size=experts).astype(np.float32) * biased
    chosen, weights = route(
        jnp.asarray(logits),
        top_k,
        Scoring(
            normalize=True,
            function="sigmoid",
            num_groups=num_groups,
            top_groups=top_groups,
            normalize_epsilon=0.125,
            scale=2.5,
        ),
        selection_bias=jnp.asarray(bias) if biased else None,
    )
    size = experts // num_groups
    for token in range(tokens):
        scores = 1 / (1 + np.exp(-logits[token].astype(np.float64)))
        wanted = scores + bias
        strength = [sum(sorted(wanted[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
        groups = sorted(range(num_groups), key=lambda g, strength=strength: -strength[g])[:top_groups]
        best = sorted((e for e in range(experts) if e // size in groups), key=lambda e, w=wanted: -w[e])[
            :top_k
        ]
        assert chosen[token].tolist() == best
        np.testing.assert_allclose(
            weights[token], 2.5 * scores[best] / (scores[best].sum() + 0.125), rtol=2e-6
        )


def test_softmax_of_the_chosen_logits():
    logits = np.random.default_rng(3).normal(size=(5, 8)).astype(np.float32)
    chosen, weights = route(jnp.asarray(logits), 3, Scoring(normalize=False, function="softmax_of_chosen"))
    for token in range(5):
        best = np.argsort(-logits[token], kind="stable")[:3]
        e = np.exp(logits[token, best].astype(np.float64))
        assert chosen[token].tolist() == best.tolist()
        np.testing.assert_allclose(weights[token], e / e.sum(), rtol=2e-6)


@pytest.mark.parametrize(
    ("top_k", "options", "message"),
    [
        (5, {}, "5 experts per token asked of 4"),
        (1, {"function": "relu"}, "scoring is 'relu'"),
        (1, {"num_groups": 3}, "4 experts cannot be chosen from 1 of 3 groups"),
        (3, {"num_groups": 2}, "3 experts per token do not fit into 1 groups of 2"),
    ],
)
def test_route_refuses(top_k, options, message):
    with pytest.raises(ValueError, match=message):
        route(jnp.zeros((1, 4)), top_k, Scoring(normalize=True, **options))


_group = jax.jit(group_tokens, static_argnums=2, static_argnames="tile")


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "tile"),
    [(1, 1, 1, 1), (1, 8, 3, 4), (5, 3, 3, 2), (24, 8, 1, 1), (24, 8, 3, 8), (7, 16, 16, 64), (40, 4, 2, 16)],
)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]), popular=st.booleans())
def test_tiles_hold_every_pair_once(tokens, experts, top_k, tile, seed, share, popular):
    rng = np.random.default_rng(seed)
    favour = np.arange(experts) * 3.0 * popular  # everybody wants the last ones
    chosen = np.argsort(-favour - rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    valid = rng.random(tokens) < share
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


@pytest.mark.parametrize("tile", [1, 2, 3, 8])
def test_no_choice_of_experts_needs_more_tiles_than_there_are(tile):
    for experts in (1, 2, 4):
        for tokens in (1, 2, 5, 8):
            shape = jax.eval_shape(
                lambda chosen, valid, experts=experts: group_tokens(chosen, valid, experts, tile=tile),
                jax.ShapeDtypeStruct((tokens, 1), jnp.int32),
                jax.ShapeDtypeStruct((tokens,), jnp.bool_),
            )
            # Every way to hand out the tokens to the experts.
            needed = [
                sum(-(-chosen.count(expert) // tile) for expert in range(experts))
                for chosen in itertools.combinations_with_replacement(range(experts), tokens)
            ]
            assert max(needed) == shape.tile_experts.shape[0]


def test_tile_follows_the_mean_share():
    assert [token_tile(pairs, 16) for pairs in (1, 16, 17, 32, 128, 1 << 20)] == [1, 1, 1, 2, 8, 64]
