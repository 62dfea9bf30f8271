"""config.json in its old and new words, and what is refused."""

import dataclasses

import pytest

from rimuru_jax.models.config import Attention, Dense, ElementBytes, ModelConfig, Moe, Rotary
from rimuru_jax.models.registry import ARCHITECTURES, parse_config
from tests.models.tiny_checkpoints import CONFIGS


def raw(model_type: str, /, **changes):
    return {"model_type": model_type, **CONFIGS[model_type], **changes}


def attention(config: ModelConfig) -> Attention:
    """The first attention layer."""
    return next(layer.mixer for layer in config.layers if isinstance(layer.mixer, Attention))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_old_and_new_words_mean_the_same(model_type):
    positions = {"position_embedding_type": "rope"} if model_type == "granitemoehybrid" else {}
    old = raw(model_type, **positions, rope_theta=5e5, rope_scaling=None, torch_dtype="bfloat16")
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert parse_config(old) == parse_config(new)
    rotary = attention(parse_config(old)).rotary
    if model_type == "nemotron_h":  # its files carry rope fields that no layer uses
        assert rotary is None
    else:
        assert rotary == Rotary(
            theta=5e5, fraction=0.25 if "qwen3_next" in model_type or "3_5" in model_type else 1.0
        )


def test_experts_may_be_called_num_local_experts():
    one = raw("qwen3_moe")
    two = {**one, "num_local_experts": one["num_experts"]}
    del two["num_experts"]
    assert parse_config(one) == parse_config(two)


def test_dense_layers():
    config = parse_config(raw("qwen3_moe", decoder_sparse_step=2, num_hidden_layers=5))
    assert [isinstance(layer.ffn, Moe) for layer in config.layers] == [False, True, False, True, False]
    config = parse_config(raw("qwen2_moe", mlp_only_layers=[0, 2], num_hidden_layers=3))
    assert [isinstance(layer.ffn, Dense) for layer in config.layers] == [True, False, True]
    assert config.moe_layers == (1,)


def test_details_of_each_architecture():
    assert attention(parse_config(raw("qwen3_moe"))).qk_norm == "head"
    assert attention(parse_config(raw("olmoe"))).qk_norm == "full"
    assert attention(parse_config(raw("olmoe", clip_qkv=8.0))).clip_qkv == 8.0
    qwen2 = parse_config(raw("qwen2_moe"))
    assert attention(qwen2).qkv_bias and not attention(qwen2).output_bias
    assert qwen2.moe.shared_intermediate_size and not qwen2.moe.normalize
    mixtral = parse_config(raw("mixtral", sliding_window=64))
    assert mixtral.moe.normalize and attention(mixtral).sliding_window == 64
    assert parse_config(raw("mixtral", eos_token_id=[3, 4])).eos_token_ids == (3, 4)


@pytest.mark.parametrize("words", ["partial_rotary_factor", "rope_parameters"])
def test_partial_rotation_in_old_and_new_words(words):
    fraction = {"partial_rotary_factor": 0.5}
    changes = {"rope_parameters": {"rope_theta": 1e6, **fraction}} if words == "rope_parameters" else fraction
    rotary = attention(parse_config(raw("mixtral", **changes))).rotary
    assert rotary == Rotary(theta=1e6 if words == "rope_parameters" else 1e4, fraction=0.5)
    with pytest.raises(ValueError, match=r"0\.5 of head_dim 6 is not an even number"):
        parse_config(raw("mixtral", head_dim=6, **changes))


def test_page_kinds_of_qwen3_30b():
    """The sizes of design's tables, by hand: experts [768, 2048] and 4 heads of 128 in bfloat16."""
    config = parse_config(
        raw(
            "qwen3_moe", hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_hidden_layers=48,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        )
    )  # fmt: skip
    expert, kv = config.page_kinds(ElementBytes(), 16)
    assert (expert.page_bytes, expert.layers, expert.level) == (3 << 20, 48, 2)
    assert (kv.page_bytes, kv.layers, kv.level, kv.page_tokens) == (32 << 10, 48, 3, 16)
    assert (expert.row_bytes, kv.row_bytes) == (256 * 2, 128 * 2)


def test_one_shape_of_keys_per_model():
    config = parse_config(raw("mixtral"))
    narrow = dataclasses.replace(attention(config), num_kv_heads=1)
    mixed = dataclasses.replace(
        config, layers=(*config.layers, dataclasses.replace(config.layers[0], mixer=narrow))
    )
    with pytest.raises(ValueError, match=r"'kv' states of 2 shapes \(\(2, 1, 1, 8\), \(2, 2, 1, 8\)\)"):
        _ = mixed.states


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "mixtral",
            {"model_type": "llama"},
            "model_type 'llama' in config.json is not supported; supported are gpt_oss, granitemoehybrid",
        ),
        ("mixtral", {"model_type": None}, "model_type None"),
        ("mixtral", {"hidden_size": None}, "hidden_size is missing"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts or num_experts is missing"),
        ("mixtral", {"num_hidden_layers": "three"}, "num_hidden_layers is 'three', but a positive integer"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the number of experts 4"),
        (
            "mixtral",
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is no multiple of num_key_value_heads 3",
        ),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("mixtral", {"rope_scaling": {"type": "llama3"}}, "rope type 'llama3' is not supported"),
        ("mixtral", {"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' needs a factor"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is true"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "no layer with routed experts"),
    ],
)
def test_refusals_are_one_sentence(model_type, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_config(raw(model_type, **changes))
    assert "\n" not in str(caught.value)
