"""What a model is made of, as frozen data: one `LayerSpec` per layer, each a token mixer and a feed-forward part.

Architectures (one file each in this folder) translate a Hugging Face `config.json` into a `ModelConfig`; nothing
after that looks at the original file, so a hybrid that exists nowhere yet is served by writing such a value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from rimuru_jax.host.page_layout import EXPERT, PageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes per element of what lies in the pool."""

    weight: int = 2
    state: int = 2
    """Of keys, values and inputs of convolutions, which are kept in the dtype of the activations."""
    recurrent: int = 4
    """Of recurrent states, kept in float32 unless asked otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """What one layer keeps in the pool for each sequence. In all layers, pages of one kind have one shape."""

    kind: str
    """Name of the page kind: "kv", "ssm", "conv", or one of your own."""
    level: Literal[2, 3]
    """2: a page is large, like a recurrent state. 3: it is cut from a larger one, like keys and values."""
    page_shape: tuple[int, ...]
    """Of one page; 1 stands on the `token_axis`."""
    token_axis: int | None = None
    """Axis of `page_shape` along which a page holds several tokens; None: the state has the same size all along."""
    run: int = 1
    """Consecutive pages that make one state (level 3)."""
    recurrent: bool = False
    """Kept in the dtype of recurrent states (float32) instead of that of the activations."""

    def shape_for(self, page_tokens: int) -> tuple[int, ...]:
        """Shape of a page of `page_tokens` tokens."""
        if self.token_axis is None:
            return self.page_shape
        axis = self.token_axis
        return (*self.page_shape[:axis], page_tokens, *self.page_shape[axis + 1 :])

    def page_kind(self, layers: int, size: ElementBytes, page_tokens: int) -> PageKind:
        element = size.recurrent if self.recurrent else size.state
        shape = self.shape_for(page_tokens)
        return PageKind(
            name=self.kind,
            level=self.level,
            page_bytes=math.prod(shape) * element,
            row_bytes=shape[-1] * element,
            layers=layers,
            page_tokens=0 if self.token_axis is None else page_tokens,
            run=self.run,
            groupable=self.token_axis is not None,
        )


class Mixer(Protocol):
    """What mixes the tokens of a sequence: a frozen dataclass, so that equal layers are compiled once."""

    def states(self) -> tuple[SequenceState, ...]:
        """What it keeps for each sequence, at most one state of each kind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Stretches a rotary embedding to longer contexts. Source: Peng et al. 2023 (arXiv 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the two ends of the ramp to whole dimensions."""
    attention_factor: float | None = None
    """Factor of cosines and sines; None: 0.1 ln(factor) + 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary position embedding, halves rotated against each other (not interleaved pairs)."""

    theta: float
    fraction: float = 1.0
    """Leading share of the head dimension that is rotated."""
    yarn: Yarn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention over paged keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, usually head_dim ** -0.5."""
    rotary: Rotary | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    """RMS norm of queries and keys before rotation: per head, or over the whole projection."""
    output_gate: bool = False
    """The query projection also gives, beside each head's query, a gate whose sigmoid multiplies the head's output."""
    clip_qkv: float | None = None
    """Clamp of the projections to [-clip, clip]."""
    sliding_window: int | None = None
    """Tokens a query sees, itself included."""
    sinks: bool = False
    """A learned logit per head joins the softmax denominator."""

    def states(self) -> tuple[SequenceState, ...]:
        shape = (2, self.num_kv_heads, 1, self.head_dim)
        return (SequenceState(kind="kv", level=3, page_shape=shape, token_axis=2),)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Linear attention with the gated delta rule behind a causal convolution (Qwen3-Next, Qwen3.5)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Width of the convolution; its state is the last `kernel - 1` inputs."""

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def states(self) -> tuple[SequenceState, ...]:
        return (
            _recurrent_state(self.num_value_heads, self.key_dim, self.value_dim),
            _conv_state(self.channels, self.kernel),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Selective state space model behind a causal convolution (Granite-4.0-H, Nemotron-H)."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    """Groups of heads that share the input and output projections B and C."""
    kernel: int
    norm_groups: int
    """Groups of channels that the norm of the output takes apart."""
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_size

    def states(self) -> tuple[SequenceState, ...]:
        return (
            _recurrent_state(self.num_heads, self.head_dim, self.state_size),
            _conv_state(self.channels, self.kernel),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """Causal convolution between two multiplicative gates (LFM2)."""

    channels: int
    kernel: int
    bias: bool = False

    def states(self) -> tuple[SequenceState, ...]:
        return (_conv_state(self.channels, self.kernel),)


def _recurrent_state(*shape: int) -> SequenceState:
    return SequenceState(kind="ssm", level=2, page_shape=shape, recurrent=True)


def _conv_state(channels: int, kernel: int) -> SequenceState:
    return SequenceState(kind="conv", level=3, page_shape=(1, channels), run=kernel - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Feed-forward: SwiGLU, or with "relu2" an ungated squared ReLU."""

    intermediate_size: int
    activation: Literal["silu", "relu2"] = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts, optionally beside a shared expert that every token passes."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Width f of one expert."""
    normalize: bool
    """Divide the scores of the chosen experts by their sum."""
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Scores of experts from logits: over all experts, each by itself, or over the chosen ones only."""
    normalize_epsilon: float = 0.0
    """Added to the sum that `normalize` divides by."""
    scale: float = 1.0
    """Factor of the weights."""
    selection_bias: bool = False
    """A learned bias per expert counts when experts are chosen, not in their weights."""
    num_groups: int = 1
    """Groups of experts, of which only the best `top_groups` are chosen from."""
    top_groups: int = 1
    router_bias: bool = False
    activation: Literal["silu", "relu2", "clamped_swiglu"] = "silu"
    """"silu": w2 (silu(w1 x) * w3 x). "relu2": w2 relu(w1 x)^2. "clamped_swiglu": of gpt_oss, with the next two."""
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    expert_bias: bool = False
    """Biases of w1, w3 and w2."""
    shared_intermediate_size: int = 0
    """Width of the shared expert; 0: none."""
    shared_gate: bool = True
    """The output of the shared expert is multiplied by the sigmoid of a learned projection."""

    @property
    def matrices(self) -> int:
        """Pages of an expert. 3: w1 gate, w3 up, w2 down. 2: up and down."""
        return 2 if self.activation == "relu2" else 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x)). A part that is None is left out, its norm too."""

    mixer: Mixer | None = None
    ffn: Dense | Moe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model.

    Raises ValueError for layers that cannot share a pool: page kinds of more than one shape, or no routed experts.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    eos_token_ids: tuple[int, ...] = ()
    norm: Literal["plain", "float32", "zero_centred"] = "plain"
    """How RMS norms end: rounded and then times the weight; times the weight in float32; times 1 + weight in float32."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what every mixer and feed-forward adds."""
    logits_scale: float = 1.0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, Moe))

    @property
    def moe(self) -> Moe:
        """The routed feed-forward: of one shape in every layer that has one."""
        routed = list(dict.fromkeys(layer.ffn for layer in self.layers if isinstance(layer.ffn, Moe)))
        if not routed:
            raise ValueError(f"{self.model_type}: the model has no layer with routed experts")
        if len(routed) > 1:
            raise ValueError(
                f"{self.model_type}: the model has {len(routed)} different shapes of routed experts; one is supported"
            )
        return routed[0]

    @property
    def states(self) -> Mapping[str, tuple[SequenceState, int]]:
        """What sequences keep in the pool, by kind: the state of a layer, and how many layers keep one."""
        found: dict[str, list[SequenceState]] = {}
        for layer in self.layers:
            for state in layer.mixer.states() if layer.mixer else ():
                found.setdefault(state.kind, []).append(state)
        for kind, states in found.items():
            if len(distinct := set(states)) > 1:
                shapes = ", ".join(str(state.page_shape) for state in sorted(distinct, key=str))
                raise ValueError(
                    f"{self.model_type}: layers keep {kind!r} states of {len(distinct)} shapes ({shapes}), "
                    "but one page kind needs exactly one"
                )
        return {kind: (states[0], len(states)) for kind, states in found.items()}

    def page_kinds(self, size: ElementBytes, page_tokens: int) -> tuple[PageKind, ...]:
        """The page kinds this model keeps in the pool, with `page_tokens` tokens in a page of what grows with them."""
        moe, states = self.moe, self.states
        if not states:
            raise ValueError(f"{self.model_type}: no layer keeps anything for a sequence")
        expert = PageKind(
            name=EXPERT,
            level=2,
            page_bytes=moe.intermediate_size * self.hidden_size * size.weight,
            row_bytes=math.gcd(moe.intermediate_size, self.hidden_size) * size.weight,
            layers=len(self.moe_layers),
        )
        return (
            expert,
            *(state.page_kind(layers, size, page_tokens) for state, layers in states.values()),
        )
