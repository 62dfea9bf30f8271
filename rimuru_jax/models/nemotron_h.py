"""Nemotron-H: blocks of one mixer each, Mamba-2, attention or ungated experts. Source: transformers `NemotronHForCausalLM`."""

from rimuru_jax.models.config import Dense, LayerSpec, Mamba2, ModelConfig, Moe
from rimuru_jax.models.config_reader import ConfigReader
from rimuru_jax.models.weights import TensorNames

NAMES = (
    TensorNames(
        embedding="backbone.embeddings.weight",
        final_norm="backbone.norm_f.weight",
        layer="backbone.layers.{layer}.",
        input_norm="norm.weight",
        ffn_norm="norm.weight",
        attention="mixer.",
        recurrent="mixer.",
        ffn="mixer.",
        router="mixer.gate.weight",
        selection_bias="mixer.gate.e_score_correction_bias",
        expert="mixer.experts.{expert}.{matrix}.weight",
        shared="mixer.shared_experts.",
        ignored=lambda name: name.startswith("mtp."),
    ),
)
_LETTERS = {"mamba": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}


def parse(reader: ConfigReader) -> ModelConfig:
    integer = reader.integer
    for name in ("use_bias", "mlp_bias", "mamba_proj_bias"):
        if reader.get(name, False):
            raise ValueError(
                f"config.json: {name} is true, which no published model uses; it is not supported"
            )
    if reader.get("moe_latent_size"):
        raise ValueError("config.json: experts in a latent space (moe_latent_size) are not supported")
    blocks = _blocks(reader, integer("num_hidden_layers"))
    parts: dict[str, LayerSpec] = {}
    if "M" in blocks:
        groups = integer("n_groups")
        mamba = Mamba2(
            num_heads=integer("mamba_num_heads"),
            head_dim=integer("mamba_head_dim"),
            state_size=integer("ssm_state_size"),
            num_groups=groups,
            kernel=integer("conv_kernel", default=4),
            norm_groups=groups,
            conv_bias=bool(reader.get("use_conv_bias", True)),
        )
        parts["M"] = LayerSpec(mixer=mamba)
    if "*" in blocks:
        bias = bool(reader.get("attention_bias", False))
        # The rope fields of published configs are not used.
        parts["*"] = LayerSpec(mixer=reader.attention(rotary=None, qkv_bias=bias, output_bias=bias))
    if "-" in blocks:
        parts["-"] = LayerSpec(ffn=Dense(intermediate_size=integer("intermediate_size"), activation="relu2"))
    if "E" in blocks:
        shared = integer("moe_shared_expert_intermediate_size") if reader.get("n_shared_experts", 1) else 0
        moe = Moe(
            num_experts=integer("n_routed_experts"),
            num_experts_per_tok=integer("num_experts_per_tok"),
            intermediate_size=integer("moe_intermediate_size"),
            normalize=bool(reader.get("norm_topk_prob", True)),
            scoring="sigmoid",
            normalize_epsilon=1e-20,
            scale=reader.number("routed_scaling_factor", 1.0),
            selection_bias=True,
            num_groups=integer("n_group", default=1),
            top_groups=integer("topk_group", default=1),
            activation="relu2",
            shared_intermediate_size=shared,
            shared_gate=False,
        )
        parts["E"] = LayerSpec(ffn=moe)
    return reader.model(
        (parts[block] for block in blocks),
        eps_field="layer_norm_epsilon" if reader.get("layer_norm_epsilon") else "norm_eps",
        activation_field="mlp_hidden_act",
        activations=("relu2",),
        norm="float32",
    )


def _blocks(reader: ConfigReader, num_layers: int) -> list[str]:
    """The letter of every block: M Mamba-2, * attention, E experts, - MLP."""
    blocks: list[str] = list(reader.get("hybrid_override_pattern", ()))
    if not blocks:
        blocks = [_LETTERS.get(kind, str(kind)) for kind in reader.get("layers_block_type", ())]
    if unknown := sorted(set(blocks) - set(_LETTERS.values())):
        raise ValueError(f"config.json: blocks of kind {', '.join(map(repr, unknown))} are not supported")
    if len(blocks) != num_layers:
        raise ValueError(
            f"config.json names the kinds of {len(blocks)} layers, but num_hidden_layers is {num_layers}"
        )
    return blocks
