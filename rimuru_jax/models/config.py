"""What a model is made of, as frozen data: one `LayerSpec` per layer, each a token mixer and a feed-forward part.

Architectures (one file each in this folder) translate a Hugging Face `config.json` into a `ModelConfig`; nothing
after that looks at the original file, so a hybrid that exists nowhere yet is served by writing such a value.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rimuru_jax.host.page_layout import PageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary position embedding, halves rotated against each other (not interleaved pairs)."""

    theta: float
    fraction: float = 1.0
    """Leading share of the head dimension that is rotated."""


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
    clip_qkv: float | None = None
    """Clamp of the projections to [-clip, clip]."""
    sliding_window: int | None = None
    """Tokens a query sees, itself included."""
    sinks: bool = False
    """A learned logit per head joins the softmax denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """SwiGLU feed-forward."""

    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts, optionally beside a shared expert that every token passes."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Width f of one expert."""
    normalize: bool
    """Divide the chosen probabilities by their sum."""
    shared_intermediate_size: int = 0
    """Width of the shared expert, whose output is multiplied by a sigmoid gate; 0: none."""
    matrices: int = 3
    """3: w1 gate, w3 up, w2 down. 2: up and down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x))."""

    mixer: Attention
    ffn: Dense | Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    eos_token_ids: tuple[int, ...] = ()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, Moe))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention))

    @property
    def moe(self) -> Moe:
        """The routed feed-forward: of one shape in every layer that has one."""
        routed = (layer.ffn for layer in self.layers if isinstance(layer.ffn, Moe))
        return _the_only(routed, "routed experts", self.model_type)

    @property
    def attention(self) -> Attention:
        """An attention layer; all keep keys and values of one shape."""
        shapes = {(a.num_kv_heads, a.head_dim) for a in self._attentions()}
        if len(shapes) != 1:
            raise ValueError(
                f"{self.model_type}: attention layers keep keys of {len(shapes)} shapes "
                f"{sorted(shapes)} (kv heads, head_dim), but one KV page kind needs exactly one"
            )
        return next(iter(self._attentions()))

    def _attentions(self) -> list[Attention]:
        return [self.layers[i].mixer for i in self.attention_layers]

    def page_kinds(self, *, weight_bytes: int, kv_bytes: int, page_tokens: int) -> tuple[PageKind, ...]:
        """The page kinds this model keeps in the pool.

        `weight_bytes` and `kv_bytes` are bytes per stored expert weight and per key or value element; `page_tokens`
        is the number of tokens of one KV page.
        """
        moe, attention = self.moe, self.attention
        kv_row = attention.head_dim * kv_bytes
        row = math.gcd(moe.intermediate_size, self.hidden_size) * weight_bytes
        return (
            PageKind(
                name="expert",
                level=2,
                page_bytes=moe.intermediate_size * self.hidden_size * weight_bytes,
                row_bytes=row,
                layers=len(self.moe_layers),
            ),
            PageKind(
                name="kv",
                level=3,
                page_bytes=2 * attention.num_kv_heads * page_tokens * kv_row,
                row_bytes=kv_row,
                layers=len(self.attention_layers),
                page_tokens=page_tokens,
                groupable=True,
            ),
        )


def _the_only[S](specs: Iterable[S], what: str, model_type: str) -> S:
    distinct = list(dict.fromkeys(specs))
    if not distinct:
        raise ValueError(f"{model_type}: the model has no layer with {what}")
    if len(distinct) > 1:
        raise ValueError(
            f"{model_type}: the model has {len(distinct)} different shapes of {what}; one is supported"
        )
    return distinct[0]


class ConfigReader:
    """Reads a `config.json` in its old and new words; errors name the file's field."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.model_type = str(raw.get("model_type"))

    def get(self, name: str, default: Any = None) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is present, as a positive integer."""
        for name in names:
            value = self.raw.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ValueError(f"config.json: {name} is {value!r}, but a positive integer is needed")
                return value
        if default is None:
            raise ValueError(f"config.json: {' or '.join(names)} is missing (model_type {self.model_type})")
        return default

    def rotary(self, head_dim: int) -> Rotary:
        """Rotary parameters from `rope_parameters` (new files) or `rope_theta` and `rope_scaling` (old ones)."""
        new = self.get("rope_parameters", {})
        old = self.get("rope_scaling", {})
        rope_type = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
        if rope_type != "default":
            raise ValueError(
                f"config.json: rope type {rope_type!r} is not supported, only 'default'; remove rope_scaling to serve "
                "the model at its original context length"
            )
        theta = new.get("rope_theta", self.get("rope_theta", 10000.0))
        fraction = new.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        if int(head_dim * fraction) % 2:
            raise ValueError(
                f"config.json: {fraction} of head_dim {head_dim} is not an even number of rotated dimensions"
            )
        return Rotary(theta=float(theta), fraction=float(fraction))

    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.get("eos_token_id", ())
        return (eos,) if isinstance(eos, int) else tuple(eos)

    def attention(self, **overrides: Any) -> Attention:
        """The attention every supported architecture starts from."""
        num_heads = self.integer("num_attention_heads")
        hidden = self.integer("hidden_size")
        head_dim = self.integer("head_dim", default=hidden // num_heads)
        num_kv_heads = self.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        return Attention(
            **{
                "num_heads": num_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "scale": head_dim**-0.5,
                "rotary": self.rotary(head_dim),
                **overrides,
            }
        )

    def model(self, layers: Iterable[LayerSpec], *, eps_field: str = "rms_norm_eps") -> ModelConfig:
        activation = self.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            max_position_embeddings=self.integer("max_position_embeddings"),
            rms_norm_eps=float(self.get(eps_field, 1e-6)),
            tie_word_embeddings=bool(self.get("tie_word_embeddings", False)),
            layers=tuple(layers),
            eos_token_ids=self.eos_token_ids(),
        )


def sparse_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers are routed, by `mlp_only_layers` and `decoder_sparse_step` (Qwen's words)."""
    dense = set(reader.get("mlp_only_layers", ()))
    step = reader.integer("decoder_sparse_step", default=1)
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
