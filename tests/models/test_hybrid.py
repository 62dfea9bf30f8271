"""Models from a pattern: what they are made of, what they keep, and what is refused."""

import dataclasses

import numpy as np
import pytest

from rimuru_jax import Engine, SamplingParams
from rimuru_jax.models.config import Attention, Dense, ElementBytes, GatedDeltaNet, Mamba2, Moe, ShortConv
from rimuru_jax.models.hybrid import hybrid, random_model, standard_mixers
from rimuru_jax.models.stack import segments

MOE = Moe(num_experts=4, num_experts_per_tok=2, intermediate_size=32, normalize=True)
SIZES = {"hidden_size": 64, "vocab_size": 96, "moe": MOE}


def test_layers_follow_the_pattern():
    config = hybrid(("gdn", "gdn", "gdn", "attn") * 10, dense_layers=[0], dense_size=80, **SIZES)
    kinds = [type(layer.mixer) for layer in config.layers]
    assert kinds == [GatedDeltaNet, GatedDeltaNet, GatedDeltaNet, Attention] * 10
    assert config.layers[0].ffn == Dense(intermediate_size=80)
    assert all(layer.ffn == MOE for layer in config.layers[1:])
    assert {kind: layers for kind, (_, layers) in config.states.items()} == {"ssm": 30, "conv": 30, "kv": 10}
    # Compile time follows the pattern: at most two runs of it, the first with its dense layer.
    assert sum(len(segment.pattern) for segment in segments(config.layers)) <= 8


@pytest.mark.parametrize(
    ("pattern", "mixers", "kinds"),
    [
        (("attn", "swa"), (Attention, Attention), {"kv"}),
        (("mamba2", "attn"), (Mamba2, Attention), {"ssm", "conv", "kv"}),
        (("conv", "attn"), (ShortConv, Attention), {"conv", "kv"}),
        (("gdn",), (GatedDeltaNet,), {"ssm", "conv"}),
    ],
)
def test_every_standard_kind_runs(pattern, mixers, kinds):
    config = hybrid(pattern, **SIZES)
    assert tuple(type(layer.mixer) for layer in config.layers) == mixers
    assert {kind.name for kind in config.page_kinds(ElementBytes(), 16)} == {"expert", *kinds}
    engine = Engine(
        random_model(config, "float32"), dtype="float32", page_pool_bytes=1 << 20, max_model_len=64
    )
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    prompts = [[5], list(range(12))]
    outputs = [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]
    assert [len(tokens) for tokens in outputs] == [4, 4] and outputs[0] != outputs[1]


def test_experts_may_have_biases():
    moe = dataclasses.replace(MOE, activation="clamped_swiglu", expert_bias=True, router_bias=True)
    layer = random_model(hybrid(("attn",), hidden_size=64, vocab_size=96, moe=moe), "float32").params[
        "layers"
    ][0]
    assert layer["expert_gate_up_bias"].shape == (4, 2, 32) and layer["expert_down_bias"].shape == (4, 64)


def test_weights_are_a_function_of_the_seed():
    config = hybrid(("gdn", "attn"), **SIZES)
    one, same, other = (random_model(config, "bfloat16", seed) for seed in (3, 3, 4))
    assert (one.host_pages == same.host_pages).all() and (one.host_pages != other.host_pages).any()
    layer = one.params["layers"][0]
    assert layer["A_log"].dtype == np.float32 and layer["delta_in"].dtype.name == "bfloat16"
    assert (layer["input_norm"] == 1).all()


def test_refusals():
    with pytest.raises(ValueError, match="mixers 'rnn', known are 'attn', 'swa', 'gdn', 'mamba2', 'conv'"):
        hybrid(("attn", "rnn"), **SIZES)
    with pytest.raises(ValueError, match="'ssm' states of 2 shapes"):
        small = dataclasses.replace(standard_mixers(64)["gdn"], value_dim=8)  # type: ignore[type-var]
        hybrid(("gdn", "small"), mixers={"small": small}, **SIZES)
    with pytest.raises(ValueError, match="dense_layers has 2, but the pattern has 2 layers"):
        hybrid(("attn", "attn"), dense_layers=[2], **SIZES)
    with pytest.raises(ValueError, match="no layer with routed experts"):
        hybrid(("attn",), dense_layers=[0], **SIZES)
    model = random_model(hybrid(("attn",), **SIZES), "float32")
    with pytest.raises(ValueError, match="weights in float32, but dtype is bfloat16; set it to float32"):
        Engine(model, dtype="bfloat16", page_pool_bytes=1 << 20)
    Engine(model, dtype="float32", page_pool_bytes=1 << 20, max_model_len=64)
    with pytest.raises(ValueError, match="model is a ModelConfig, it must be a folder or a model in memory"):
        Engine(hybrid(("attn",), **SIZES), dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="given to an engine before"):
        Engine(model, dtype="float32", page_pool_bytes=1 << 20)
    engine = Engine(
        random_model(hybrid(("attn",), **SIZES), "float32"),
        dtype="float32",
        page_pool_bytes=1 << 20,
        max_model_len=64,
    )
    with pytest.raises(ValueError, match="a model in memory has no tokenizer"):
        engine.generate("text", use_tqdm=False)
