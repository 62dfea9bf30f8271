"""Reading a Hugging Face `config.json`, in its old and new words; errors name the file's field."""

from collections.abc import Iterable, Mapping
from typing import Any

from rimuru_jax.models.config import Attention, LayerSpec, ModelConfig, Rotary, Yarn


class ConfigReader:
    """The contents of one file."""

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

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"config.json: {name} is {value!r}, but a number is needed")
        return float(value)

    def rotary(self, head_dim: int, *, fraction: float = 1.0) -> Rotary:
        """Rotary parameters from `rope_parameters` (new files) or `rope_theta` and `rope_scaling` (old ones).

        `fraction` of the head is rotated if the file does not say how much.
        """
        new = self.get("rope_parameters", {})
        scaling = {**self.get("rope_scaling", {}), **new}
        rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
        if rope_type not in ("default", "yarn"):
            raise ValueError(
                f"config.json: rope type {rope_type!r} is not supported, only 'default' and 'yarn'; remove "
                "rope_scaling to serve the model at its original context length"
            )
        theta = new.get("rope_theta", self.get("rope_theta", 10000.0))
        fraction = new.get("partial_rotary_factor", self.get("partial_rotary_factor", fraction))
        if int(head_dim * fraction) % 2:
            raise ValueError(
                f"config.json: {fraction} of head_dim {head_dim} is not an even number of rotated dimensions"
            )
        yarn = self._yarn(scaling) if rope_type == "yarn" else None
        return Rotary(theta=float(theta), fraction=float(fraction), yarn=yarn)

    def _yarn(self, scaling: Mapping[str, Any]) -> Yarn:
        if "factor" not in scaling:
            raise ValueError("config.json: rope type 'yarn' needs a factor")
        if unknown := sorted({"mscale", "mscale_all_dim"} & set(scaling)):
            raise ValueError(f"config.json: {', '.join(unknown)} of rope type 'yarn' is not supported")
        original = scaling.get("original_max_position_embeddings") or self.integer("max_position_embeddings")
        attention_factor = scaling.get("attention_factor")
        return Yarn(
            factor=float(scaling["factor"]),
            original_max_position_embeddings=int(original),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            truncate=bool(scaling.get("truncate", True)),
            attention_factor=None if attention_factor is None else float(attention_factor),
        )

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
                **({} if "rotary" in overrides else {"rotary": self.rotary(head_dim)}),
                **overrides,
            }
        )

    def layer_types(self, num_layers: int, words: Mapping[str, str]) -> list[str]:
        """The kinds of all layers from `layer_types`, each translated by `words`."""
        kinds = self.get("layer_types", ())
        if unknown := sorted({str(kind) for kind in kinds if kind not in words}):
            raise ValueError(
                f"config.json: layers of kind {', '.join(map(repr, unknown))} are not supported, "
                f"only {', '.join(map(repr, words))}"
            )
        if len(kinds) != num_layers:
            raise ValueError(
                f"config.json names the kinds of {len(kinds)} layers in layer_types, but num_hidden_layers is {num_layers}"
            )
        return [words[kind] for kind in kinds]

    def model(
        self,
        layers: Iterable[LayerSpec],
        *,
        eps_field: str = "rms_norm_eps",
        activation_field: str = "hidden_act",
        activations: tuple[str, ...] = ("silu", "swish"),
        **others: Any,
    ) -> ModelConfig:
        """The whole model; `others` are fields of `ModelConfig` that most architectures leave at their defaults."""
        activation = self.get(activation_field, activations[0])
        if activation not in activations:
            raise ValueError(
                f"config.json: {activation_field} {activation!r} is not supported, only {activations[0]!r}"
            )
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            max_position_embeddings=self.integer("max_position_embeddings"),
            rms_norm_eps=float(self.get(eps_field, 1e-6)),
            tie_word_embeddings=bool(self.get("tie_word_embeddings", False)),
            layers=tuple(layers),
            eos_token_ids=self.eos_token_ids(),
            **others,
        )


def sparse_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers are routed, by `mlp_only_layers` and `decoder_sparse_step` (Qwen's words)."""
    dense = set(reader.get("mlp_only_layers", ()))
    step = reader.integer("decoder_sparse_step", default=1)
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
