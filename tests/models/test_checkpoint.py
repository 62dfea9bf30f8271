"""Reading Hugging Face folders: contents against the written tensors, and a sentence for whatever is wrong."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rimuru_jax.models import checkpoint
from rimuru_jax.models.checkpoint import Checkpoint, load_checkpoint
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint, write_weights

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# What the architectures' published checkpoints call the tensors of layer 0 and those outside the layers
# (transformers' modelling code and hub indices), with x for the number of an expert.
ATTENTION = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
QWEN_EXPERTS = [f"mlp.experts.x.{p}_proj.weight" for p in ("gate", "up", "down")]
QK_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
PUBLISHED_LAYER = {
    "mixtral": [*ATTENTION, *NORMS, "block_sparse_moe.gate.weight"]
    + [f"block_sparse_moe.experts.x.w{i}.weight" for i in (1, 2, 3)],
    "olmoe": [*ATTENTION, *NORMS, *QK_NORMS, "mlp.gate.weight", *QWEN_EXPERTS],
    "qwen2_moe": [*ATTENTION, *NORMS, "mlp.gate.weight", *QWEN_EXPERTS]
    + [f"self_attn.{p}_proj.bias" for p in "qkv"]
    + [f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")]
    + ["mlp.shared_expert_gate.weight"],
    "qwen3_moe": [*ATTENTION, *NORMS, *QK_NORMS, "mlp.gate.weight", *QWEN_EXPERTS],
}
QWEN_MATRICES = [f"mlp.experts.{{}}.{p}_proj.weight" for p in ("gate", "up", "down")]
MATRICES = {  # gate, up, down
    "mixtral": [f"block_sparse_moe.experts.{{}}.{w}.weight" for w in ("w1", "w3", "w2")],
    "olmoe": QWEN_MATRICES,
    "qwen2_moe": QWEN_MATRICES,
    "qwen3_moe": QWEN_MATRICES,
}
MOE_LAYERS = {"mixtral": [0, 1, 2], "olmoe": [0, 1, 2], "qwen2_moe": [0, 2], "qwen3_moe": [0, 1, 2]}


def expected_pages(model_type: str, tensors: dict[str, np.ndarray], num_experts: int) -> np.ndarray:
    """Host pages by loops over literal names."""
    return np.stack(
        [
            tensors[f"model.layers.{layer}.{name.format(expert)}"].reshape(-1)
            for layer in MOE_LAYERS[model_type]
            for expert in range(num_experts)
            for name in MATRICES[model_type]
        ]
    )


def num_experts(model_type: str) -> int:
    config = CONFIGS[model_type]
    return config.get("num_experts") or config["num_local_experts"]


@pytest.mark.parametrize("model_type", PUBLISHED_LAYER)
def test_tensor_names_are_the_published_ones(tmp_path: Path, model_type: str) -> None:
    names = write_checkpoint(tmp_path, model_type)
    layer = {
        re.sub(r"experts\.\d+", "experts.x", name.removeprefix("model.layers.0."))
        for name in names
        if name.startswith("model.layers.0.")
    }
    outside = {name for name in names if ".layers." not in name}
    assert layer == set(PUBLISHED_LAYER[model_type])
    assert outside == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def test_dense_layer_of_qwen2_moe_has_published_names(tmp_path: Path) -> None:
    names = write_checkpoint(tmp_path, "qwen2_moe")
    assert {n for n in names if n.startswith("model.layers.1.mlp.")} == {
        f"model.layers.1.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model_type", MATRICES)
def test_bfloat16_is_loaded_bit_by_bit(tmp_path: Path, model_type: str, shards: int) -> None:
    tensors = write_checkpoint(tmp_path, model_type, shards=shards)
    model = load_checkpoint(tmp_path, "bfloat16")
    assert model.raw_config["model_type"] == model.config.model_type == model_type
    want = expected_pages(model_type, tensors, num_experts(model_type)).view(np.uint16)
    np.testing.assert_array_equal(model.host_pages, want, strict=True)
    assert model.params["embedding"].dtype == BFLOAT16
    for key, name in (
        ("embedding", "model.embed_tokens.weight"),
        ("final_norm", "model.norm.weight"),
        ("head", "lm_head.weight"),
    ):
        np.testing.assert_array_equal(model.params[key], tensors[name], strict=True)
    attention = "model.layers.2.self_attn."
    stacked = np.concatenate([tensors[f"{attention}{p}_proj.weight"] for p in "qkv"])
    assert len(model.params["layers"]) == 3
    np.testing.assert_array_equal(model.params["layers"][2]["qkv"], stacked, strict=True)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "qwen3_5_moe"])
def test_fused_experts_become_pages(tmp_path: Path, model_type: str) -> None:
    """`[E, 2 f, d]`, gate first, and `[E, d, f]`."""
    tensors = write_checkpoint(tmp_path, model_type)
    prefix, gate_up, down = {
        "granitemoehybrid": ("model.layers.", "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        "qwen3_5_moe": ("model.language_model.layers.", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    }[model_type]  # fmt: skip
    pages = load_checkpoint(tmp_path, "bfloat16").host_pages.view(BFLOAT16)
    want = []
    for layer in range(CONFIGS[model_type]["num_hidden_layers"]):
        first, second = tensors[f"{prefix}{layer}.{gate_up}"], tensors[f"{prefix}{layer}.{down}"]
        for expert in range(num_experts(model_type)):
            want += [first[expert, :16], first[expert, 16:], second[expert]]
    np.testing.assert_array_equal(pages, np.stack([matrix.reshape(-1) for matrix in want]))


def test_experts_of_gpt_oss_are_transposed_and_taken_apart(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "gpt_oss")
    model = load_checkpoint(tmp_path, "bfloat16")
    pages = model.host_pages.view(BFLOAT16).reshape(3, 4, 3, -1)
    for layer, expert in ((0, 0), (2, 3)):
        both = tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"][expert]  # [d, 2 f]
        down = tensors[f"model.layers.{layer}.mlp.experts.down_proj"][expert]  # [f, d]
        gate, up, last = pages[layer, expert]
        for row in range(16):
            assert (gate.reshape(16, 32)[row] == both[:, 2 * row]).all()
            assert (up.reshape(16, 32)[row] == both[:, 2 * row + 1]).all()
            assert (last.reshape(32, 16)[:, row] == down[row]).all()
        bias = tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj_bias"][expert]
        loaded = model.params["layers"][layer]["expert_gate_up_bias"][expert]
        assert (loaded[0] == bias[::2]).all() and (loaded[1] == bias[1::2]).all()


def test_experts_of_nemotron_have_two_matrices(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "nemotron_h")
    pages = load_checkpoint(tmp_path, "bfloat16").host_pages.view(BFLOAT16).reshape(2, 6, 2, -1)
    for index, layer in enumerate((1, 3)):  # ME*EM-
        for matrix, name in enumerate(("up_proj", "down_proj")):
            tensor = tensors[f"backbone.layers.{layer}.mixer.experts.5.{name}.weight"]
            assert (pages[index, 5, matrix] == tensor.reshape(-1)).all()


def test_projections_of_qwen3_next_are_sorted(tmp_path: Path) -> None:
    """Grouped by key head in the file (2 heads of 8, each for 2 value heads of 12), by kind in the parameter."""
    tensors = write_checkpoint(tmp_path, "qwen3_next")
    loaded = load_checkpoint(tmp_path, "bfloat16").params["layers"][0]["delta_in"]
    qkvz = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"].reshape(2, 8 + 8 + 24 + 24, 32)
    ba = tensors["model.layers.0.linear_attn.in_proj_ba.weight"].reshape(2, 2 + 2, 32)
    parts = [qkvz[:, :8], qkvz[:, 8:16], qkvz[:, 16:40], qkvz[:, 40:], ba[:, :2], ba[:, 2:]]
    want = np.concatenate([part.reshape(-1, 32) for part in parts])
    np.testing.assert_array_equal(loaded, want, strict=True)


def test_parameters_of_recurrences_stay_in_float32(tmp_path: Path) -> None:
    for model_type in ("qwen3_next", "granitemoehybrid"):
        write_checkpoint(tmp_path / model_type, model_type)
        layer = load_checkpoint(tmp_path / model_type, "bfloat16").params["layers"][0]
        wide = {name for name, leaf in layer.items() if leaf.dtype == np.float32}
        assert wide == {"A_log", "dt_bias"} | ({"D"} if model_type == "granitemoehybrid" else set())


def test_qwen3_5_is_read_in_every_layout(tmp_path: Path) -> None:
    """As published, and as a language model saved by itself; with other towers beside it."""
    tensors = write_checkpoint(tmp_path / "published", "qwen3_5_moe")
    single: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.")
        if name.endswith("gate_up_proj"):
            for expert in range(6):
                stem = name.replace("experts.gate_up_proj", f"experts.{expert}.")
                single[f"{stem}gate_proj.weight"], single[f"{stem}up_proj.weight"] = np.split(
                    tensor[expert], 2
                )
        elif name.endswith("experts.down_proj"):
            for expert in range(6):
                single[name.replace("experts.", f"experts.{expert}.") + ".weight"] = tensor[expert]
        else:
            single[name] = tensor
    write_checkpoint(tmp_path / "single", "qwen3_5_moe_text")
    write_weights(
        tmp_path / "single", {name: np.ascontiguousarray(tensor) for name, tensor in single.items()}
    )
    raw = json.loads((tmp_path / "published" / "config.json").read_text())
    (tmp_path / "published" / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5_moe", "vision_config": {}, "text_config": raw})
    )
    others = {"model.visual.patch_embed.proj.bias": tensors["model.language_model.norm.weight"]}
    others["mtp.norm.weight"] = others["model.visual.patch_embed.proj.bias"]
    write_weights(tmp_path / "published", tensors | others)
    one, two = (load_checkpoint(tmp_path / name, "bfloat16") for name in ("published", "single"))
    np.testing.assert_array_equal(one.host_pages, two.host_pages)
    assert one.params["layers"][0].keys() == two.params["layers"][0].keys()
    for name, leaf in one.params["layers"][0].items():
        np.testing.assert_array_equal(leaf, two.params["layers"][0][name])


def test_float32_pages_hold_two_words_per_weight(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "qwen3_moe")
    model = load_checkpoint(tmp_path, "float32")
    want = expected_pages("qwen3_moe", tensors, 6).astype(np.float32)
    assert model.host_pages.shape == (3 * 6 * 3, 2 * 16 * 32)
    np.testing.assert_array_equal(model.host_pages.view(np.float32), want, strict=True)
    assert {leaf.dtype for leaf in model.params["layers"][0].values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("stored", [np.float16, np.float32])
def test_other_float_types_are_rounded_to_bfloat16(tmp_path: Path, stored: type) -> None:
    tensors = write_checkpoint(tmp_path, "olmoe")
    noise = np.random.default_rng(5)
    stored_tensors = {
        n: noise.standard_normal(t.shape, np.float32).astype(stored) for n, t in tensors.items()
    }
    write_weights(tmp_path, stored_tensors)
    model = load_checkpoint(tmp_path, "bfloat16")
    exact = expected_pages("olmoe", stored_tensors, 6).astype(np.float64)
    loaded = model.host_pages.view(BFLOAT16).astype(np.float64)
    assert (loaded != exact).any()
    np.testing.assert_allclose(
        loaded, exact, rtol=2**-8, atol=0
    )  # bfloat16 keeps 8 bits: half a unit of the last


def test_host_pages_start_at_an_os_page(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral")
    pages = load_checkpoint(tmp_path, "bfloat16").host_pages
    assert pages.ctypes.data % 4096 == 0
    assert pages.flags.c_contiguous
    assert pages.flags.writeable


def test_tied_model_has_no_head_and_tolerates_a_stored_one(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    write_weights(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "head" not in load_checkpoint(tmp_path, "bfloat16").params


def test_ignored_tensors_may_be_there(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "mixtral")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_weights(tmp_path, tensors | {name: np.ones(4, np.float32)})
    load_checkpoint(tmp_path, "bfloat16")


def test_progress_goes_from_zero_to_one_in_this_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PART_BYTES", 4096)
    write_checkpoint(tmp_path, "qwen2_moe", shards=2)
    seen: list[float] = []
    load_checkpoint(tmp_path, "bfloat16", progress=lambda fraction, _text: seen.append(fraction))
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert 0 < seen[0] < 0.5
    assert seen[-1] == 1.0


def test_a_failing_progress_callback_ends_the_load(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral")

    def interrupt(_fraction: float, _text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(tmp_path, "bfloat16", progress=interrupt)


def refusal(folder: Path, dtype: Any = "bfloat16") -> str:
    """The message with which loading is refused, which has to be one sentence that names the folder's file."""
    with pytest.raises(ValueError) as caught:
        load_checkpoint(folder, dtype)
    message = str(caught.value)
    assert "\n" not in message
    assert not message.endswith(".")
    return message


def test_missing_tensors_are_counted_and_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "mixtral")
    gone = [f"model.layers.{i}.block_sparse_moe.experts.1.w3.weight" for i in range(3)]
    gone += ["model.norm.weight", "lm_head.weight"]
    write_weights(tmp_path, {name: t for name, t in tensors.items() if name not in gone})
    message = refusal(tmp_path)
    assert "5 tensors missing (model.norm.weight, lm_head.weight, model.layers.0." in message
    assert ", ...)" in message


def test_all_kinds_of_misfit_are_told_at_once(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "qwen2_moe")
    del tensors["model.layers.0.mlp.gate.weight"]
    tensors["model.layers.2.mlp.experts.3.down_proj.weight"] = np.zeros((32, 15), BFLOAT16)
    tensors["model.layers.9.input_layernorm.weight"] = np.zeros(32, BFLOAT16)
    write_weights(tmp_path, tensors)
    message = refusal(tmp_path)
    assert "1 tensor missing (model.layers.0.mlp.gate.weight)" in message
    assert (
        "1 tensor of another shape (model.layers.2.mlp.experts.3.down_proj.weight: got [32, 15], wanted [32, 16])"
        in message
    )
    assert "1 tensor that this architecture does not have (model.layers.9.input_layernorm.weight)" in message


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_checkpoint(tmp_path, "mixtral", shards=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(tmp_path)
    assert str(file) in message
    assert "damaged or incomplete" in message
    assert "download it again" in message


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "lacks 1 of the 3 files" in (message := refusal(tmp_path))
    assert "model-00002-of-00003.safetensors" in message


def test_index_that_names_a_tensor_of_no_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    message = refusal(tmp_path)
    assert "names 1 tensor that the files do not hold" in message
    assert "model.ghost.weight in model-00001-of-00002.safetensors" in message


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"metadata": {}}', "{"])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, "mixtral", shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "holds no weight_map that can be read" in refusal(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path)
    assert "no config.json" in refusal(tmp_path / "nowhere")


def test_quantised_checkpoints_are_not_supported_yet(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", quantization_config={"quant_method": "fp8"})
    message = refusal(tmp_path)
    assert "'fp8'" in message
    assert "not supported yet" in message


@pytest.mark.parametrize(("stored", "label"), [(ml_dtypes.float8_e4m3fn, "F8_E4M3"), (np.int8, "I8")])
def test_weights_in_eight_bits_are_not_supported_yet(tmp_path: Path, stored: type, label: str) -> None:
    tensors = write_checkpoint(tmp_path, "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    tensors[name] = np.zeros(tensors[name].shape, stored)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert f"stores 1 tensor in a type that is not supported yet ({name}: {label})" in message


def test_unknown_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral")
    assert "dtype is 'float16', but weights are served in one of float32, bfloat16" in refusal(
        tmp_path, "float16"
    )


def test_headers_are_compared_before_any_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = write_checkpoint(tmp_path, "mixtral")
    del tensors["model.norm.weight"]
    write_weights(tmp_path, tensors)

    def read(*_args: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(Checkpoint, "_read", read)
    assert "model.norm.weight" in refusal(tmp_path)
