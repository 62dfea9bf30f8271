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
from collections.abc import Mapping, Sequence

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
from rimuru_jax.models.random_weights import random_model

__all__ = ["hybrid", "random_model", "standard_mixers"]


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
