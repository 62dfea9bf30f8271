"""config.json in its old and new words, and what is refused."""

import pytest

from rimuru_jax.models.config import Dense, Moe, Rotary
from rimuru_jax.models.registry import ARCHITECTURES, parse_config
from tests.models.tiny_checkpoints import CONFIGS


def raw(model_type: str, /, **changes):
    return {"model_type": model_type, **CONFIGS[model_type], **changes}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_old_and_new_words_mean_the_same(model_type):
    old = raw(model_type, rope_theta=5e5, rope_scaling=None, torch_dtype="bfloat16")
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).layers[0].mixer.rotary == Rotary(theta=5e5)


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
    assert config.moe_layers == (1,) and config.attention_layers == (0, 1, 2)


def test_details_of_each_architecture():
    assert parse_config(raw("qwen3_moe")).attention.qk_norm == "head"
    assert parse_config(raw("olmoe")).attention.qk_norm == "full"
    assert parse_config(raw("olmoe", clip_qkv=8.0)).attention.clip_qkv == 8.0
    qwen2 = parse_config(raw("qwen2_moe"))
    assert qwen2.attention.qkv_bias and not qwen2.attention.output_bias
    assert qwen2.moe.shared_intermediate_size and not qwen2.moe.normalize
    mixtral = parse_config(raw("mixtral", sliding_window=64))
    assert mixtral.moe.normalize and mixtral.attention.sliding_window == 64
    assert parse_config(raw("mixtral", eos_token_id=[3, 4])).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "mixtral",
            {"model_type": "llama"},
            "model_type 'llama' in config.json is not supported; supported are mixtral",
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
        ("mixtral", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is true"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "no layer with routed experts"),
    ],
)
def test_refusals_are_one_sentence(model_type, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_config(raw(model_type, **changes))
    assert "\n" not in str(caught.value)
