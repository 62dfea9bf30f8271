"""Models that exist nowhere yet: any mix of layer kinds, with random weights, ready to be served.

    config = hybrid(
        ("gdn", "gdn", "gdn", "attn") * 10,
        hidden_size=1024, vocab_size=32000,
        moe=Moe(num_experts=64, num_experts_per_tok=4, intermediate_size=512, normalize=True),
    )
    engine = Engine(random_model(config, "bfloat16"), page_pool_bytes=8 << 30)

A mixer of your own goes into `mixers`; `stack.MIXERS` says how it runs.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rimuru_jax.models.checkpoint import (
    DTYPES,
    Dtype,
    LoadedModel,
    empty_pages,
    page_shape,
    parameter_dtype,
    parameter_tree,
)
from rimuru_jax.models.config import (
    Attention,
    Dense,
    GatedDeltaNet,
    LayerSpec,
    Mamba2,
    Mixer,
    ModelConfig,
    Moe,
    Rotary,
    ShortConv,
)
from rimuru_jax.models.weights import ParameterPath, TensorNames, TensorSource, resident_sources


def standard_mixers(hidden_size: int) -> dict[str, Mixer]:
    """The known kinds in usual proportions: "attn", "swa" (sliding window), "gdn", "mamba2", "conv".

    Sizes follow published models: heads of 64 or, in wide models, 128; four query heads to a key head; recurrent layers
    twice as wide as the model.
    """
    head_dim = 128 if hidden_size >= 1024 else 64 if hidden_size >= 256 else 16
    heads = max(1, hidden_size // head_dim)
    kv_heads = max(1, heads // 4)
    attention = Attention(
        num_heads=heads // kv_heads * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=Rotary(theta=1e6),
        qk_norm="head",
    )
    return {
        "attn": attention,
        "swa": dataclasses.replace(attention, sliding_window=1024),
        "gdn": GatedDeltaNet(
            num_key_heads=heads,
            num_value_heads=2 * heads,
            key_dim=head_dim,
            value_dim=head_dim,
            kernel=4,
        ),
        "mamba2": Mamba2(
            num_heads=2 * heads,
            head_dim=head_dim,
            state_size=head_dim,
            num_groups=1,
            kernel=4,
            norm_groups=1,
        ),
        "conv": ShortConv(channels=hidden_size, kernel=3),
    }


def hybrid(
    pattern: Sequence[str],
    *,
    hidden_size: int,
    vocab_size: int,
    moe: Moe,
    dense_layers: Sequence[int] = (),
    dense_size: int | None = None,
    mixers: Mapping[str, Mixer] | None = None,
    max_position_embeddings: int = 8192,
    tie_word_embeddings: bool = False,
) -> ModelConfig:
    """A model of one layer per word of `pattern`, each a mixer and a feed-forward part.

    Args:
        pattern: kinds of mixers, names of `standard_mixers` or of `mixers`.
        moe: the routed experts of every layer but the `dense_layers`.
        dense_layers: indices of layers with a plain SwiGLU feed-forward of width `dense_size` (default: four times
            `hidden_size`) instead.
        mixers: kinds of your own, or standard ones with other sizes. All that keep one kind of state must keep it in
            one shape, so that a model has "gdn" or "mamba2" of one size, not both.

    Raises ValueError, in one sentence, for unknown kinds and for states of several shapes.
    """
    known = {**standard_mixers(hidden_size), **(mixers or {})}
    if unknown := sorted(set(pattern) - set(known)):
        raise ValueError(
            f"pattern names the mixers {', '.join(map(repr, unknown))}, known are {', '.join(map(repr, known))}"
        )
    if wrong := [index for index in dense_layers if not 0 <= index < len(pattern)]:
        raise ValueError(f"dense_layers has {wrong[0]}, but the pattern has {len(pattern)} layers")
    dense = Dense(intermediate_size=dense_size or 4 * hidden_size)
    config = ModelConfig(
        model_type="hybrid",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tie_word_embeddings,
        layers=tuple(
            LayerSpec(mixer=known[kind], ffn=dense if index in dense_layers else moe)
            for index, kind in enumerate(pattern)
        ),
    )
    _ = config.moe, config.states  # raises for what cannot share a pool
    return config


def random_model(config: ModelConfig, dtype: Dtype, seed: int = 0) -> LoadedModel:
    """Random weights for `config`: normal, scaled so that activations keep their size; norms are ones."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but weights are served in one of {', '.join(DTYPES)}")
    rng = np.random.default_rng(seed)
    leaves: dict[ParameterPath, np.ndarray] = {
        path: _random(str(path[-1]), source, config, rng).astype(parameter_dtype(source, dtype))
        for path, source in resident_sources(config, TensorNames()).items()
    }
    pages = empty_pages(*page_shape(config, dtype))
    moe = config.moe
    fan_in = [config.hidden_size] * (moe.matrices - 1) + [moe.intermediate_size]
    for row, page in enumerate(pages):
        values = rng.standard_normal(moe.intermediate_size * config.hidden_size, np.float32)
        page.view(DTYPES[dtype])[:] = values * fan_in[row % moe.matrices] ** -0.5
    return LoadedModel(config=config, raw_config={}, params=parameter_tree(config, leaves), host_pages=pages)


def _random(name: str, source: TensorSource, config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    shape = source.shape
    special: Mapping[str, Callable[[], np.ndarray]] = {
        # As recurrent models are initialised: decays of 1 to 16 per unit of a step size from 1e-3 to 1e-1.
        "A_log": lambda: np.log(rng.uniform(1, 16, shape)),
        "dt_bias": lambda: np.log(np.expm1(np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape)))),
        "D": lambda: np.ones(shape),
    }
    if name in special:
        return special[name]()
    if name.endswith("norm"):
        return np.full(shape, 0.0 if config.norm == "zero_centred" and name != "mixer_norm" else 1.0)
    if len(shape) == 1:  # biases, sinks
        return np.zeros(shape)
    if name == "embedding":
        return rng.standard_normal(shape, np.float32)
    return rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5
