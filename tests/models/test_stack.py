"""How layers are cut into scanned segments."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru_jax.models.config import Attention, Dense, LayerSpec, ModelConfig, Moe
from rimuru_jax.models.stack import Segment, segments, stack_params, unroll_params

MOE = Moe(num_experts=4, num_experts_per_tok=2, intermediate_size=8, normalize=True)


def layer(kind: str) -> LayerSpec:
    """A layer that differs for every letter."""
    attention = Attention(num_heads=2, num_kv_heads=1, head_dim=4, scale=1.0, sliding_window=ord(kind))
    return LayerSpec(mixer=attention, ffn=Dense(intermediate_size=8) if kind == "d" else MOE)


def cut(kinds: str) -> list[tuple[str, int]]:
    names = {layer(kind): kind for kind in kinds}
    return [
        ("".join(names[spec] for spec in s.pattern), s.repeats) for s in segments([layer(k) for k in kinds])
    ]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("m" * 48, [("m", 48)]),
        ("mmdm", [("m", 2), ("dm", 1)]),
        ("dmdm", [("dm", 2)]),
        ("gggm" * 10, [("gggm", 10)]),
        ("d" + "m" * 20, [("d", 1), ("m", 20)]),
        (("s" * 5 + "m" + "s" * 4) * 4, None),
    ],
)
def test_known_patterns(kinds, expected):
    got = cut(kinds)
    assert "".join(pattern * repeats for pattern, repeats in got) == kinds
    if expected is None:
        assert sum(len(pattern) for pattern, _ in got) <= 10
    else:
        assert got == expected


def least(kinds: str) -> int:
    """The fewest layers to compile, by trying every way to cut."""
    if not kinds:
        return 0
    best = len(kinds)
    for end in range(1, len(kinds) + 1):
        for period in range(1, end + 1):
            if end % period == 0 and kinds[:period] * (end // period) == kinds[:end]:
                best = min(best, period + least(kinds[end:]))
    return best


@given(st.text("abd", min_size=1, max_size=7))
def test_segments_are_the_layers_and_as_few_as_can_be(kinds):
    got = cut(kinds)
    assert "".join(pattern * repeats for pattern, repeats in got) == kinds
    assert sum(len(pattern) for pattern, _ in got) == least(kinds)


def test_stack_params_follows_the_segments_and_keeps_no_second_copy():
    specs = [layer(k) for k in "mmdm"]
    config = ModelConfig(
        model_type="x", vocab_size=4, hidden_size=8, max_position_embeddings=8, rms_norm_eps=1e-6,
        tie_word_embeddings=True, layers=tuple(specs),
    )  # fmt: skip
    layers = [
        {"input_norm": np.full(8, i), ("dense_down" if i == 2 else "router"): np.full((2, 2), i)}
        for i in range(4)
    ]
    stacked = stack_params(config, {"embedding": np.zeros(4), "layers": layers})
    assert not any(layers)
    shapes = [[sorted(params) for params in group] for group in stacked["segments"]]
    assert shapes == [[["input_norm", "router"]], [["dense_down", "input_norm"], ["input_norm", "router"]]]
    norms = [[params["input_norm"][:, 0].tolist() for params in group] for group in stacked["segments"]]
    assert norms == [[[0, 1]], [[2], [3]]]
    assert isinstance(segments(specs)[0], Segment)


def test_unrolled_layers_have_the_parameters_of_their_own():
    """A layer may have nothing but its norm, if its mixer is one of the user's."""
    norms, routers = np.arange(6.0).reshape(2, 3), np.arange(8.0).reshape(2, 2, 2)
    biases = np.arange(8.0).reshape(2, 4).astype(jnp.bfloat16)
    pattern = (
        {"input_norm": norms},
        {"input_norm": norms + 10, "router": routers, "qkv_bias": biases},
    )
    (segment,) = unroll_params({"segments": (pattern,)}, list)["segments"]
    repetitions = list(segment.repetitions())
    assert len(repetitions) == 2
    for i, layers in enumerate(repetitions):
        assert [sorted(layer) for layer in layers] == [["input_norm"], ["input_norm", "qkv_bias", "router"]]
        np.testing.assert_array_equal(layers[0]["input_norm"], norms[i])
        np.testing.assert_array_equal(layers[1]["input_norm"], norms[i] + 10)
        np.testing.assert_array_equal(layers[1]["router"], routers[i])
        np.testing.assert_array_equal(layers[1]["qkv_bias"], biases[i].astype(np.float32), strict=True)
