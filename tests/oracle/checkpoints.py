"""Random weights for `transformers` models of the oracle, and their checkpoints as published ones look. Needs torch."""

import json
import math
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.oracle.cases import VOCAB


def init_weights(model, seed):
    """Fan-in scaled weights; every bias, norm and gate parameter made non-trivial."""
    g = torch.Generator().manual_seed(seed)
    cfg = model.config

    def n(t, std, mean=0.0):
        return torch.randn(t.shape, generator=g, dtype=torch.float32) * std + mean

    def u(t, lo, hi):
        return torch.rand(t.shape, generator=g, dtype=torch.float32) * (hi - lo) + lo

    owners = {}
    for mod_name, mod in model.named_modules():
        for pn, _ in list(mod.named_parameters(recurse=False)) + list(mod.named_buffers(recurse=False)):
            owners[(mod_name + "." if mod_name else "") + pn] = type(mod).__name__

    zero_centred = any(k in type(model).__name__ for k in ("Qwen3Next", "Qwen3_5"))
    tied = bool(getattr(cfg, "tie_word_embeddings", False))
    emb_mult = float(getattr(cfg, "embedding_multiplier", 1.0) or 1.0)
    logit_div = float(getattr(cfg, "logits_scaling", 1.0) or 1.0)
    d = cfg.hidden_size

    tensors = dict(model.named_parameters())
    for name, buf in model.named_buffers():
        if "inv_freq" not in name:
            tensors[name] = buf
    with torch.no_grad():
        for name, t in tensors.items():
            owner, leaf = owners.get(name, ""), name.split(".")[-1]
            if "embed" in name and t.ndim == 2:
                std = 3.0 * logit_div / math.sqrt(d) if tied else 1.0 / emb_mult
                v = n(t, std)
            elif name.startswith("lm_head"):
                v = n(t, 4.0 * logit_div / math.sqrt(d))
            elif leaf == "A_log":
                v = torch.log(u(t, 0.05, 4.0))
            elif leaf == "dt_bias":
                dt = torch.exp(u(t, math.log(0.01), math.log(0.5)))
                v = dt + torch.log(-torch.expm1(-dt))
            elif leaf == "D":
                v = n(t, 0.3, 1.0)
            elif leaf in ("e_score_correction_bias", "expert_bias"):
                v = n(t, 0.15)
            elif leaf == "sinks":
                v = n(t, 1.0)
            elif "conv" in name and leaf == "weight":
                v = n(t, 1.0 / math.sqrt(t.shape[-1]))
            elif leaf == "bias" or leaf.endswith("_bias"):
                v = n(t, 0.3)
            elif t.ndim == 1 and ("Norm" in owner or "norm" in name):
                plain = "Gated" in owner or not zero_centred
                v = n(t, 0.2, 1.0 if plain else 0.0)
            elif "Router" in owner or (leaf == "weight" and name.endswith("gate.weight")):
                v = n(t, 2.0 / math.sqrt(t.shape[-1]))
            elif t.ndim >= 2:
                v = n(t, 1.4 / math.sqrt(fan_in(owner, leaf, t)))
            else:
                raise SystemExit(f"no rule for {name} {tuple(t.shape)} in {owner}")
            t.copy_(v.to(torch.bfloat16).to(t.dtype))  # exact in bfloat16
    return model


def fan_in(owner, leaf, t):
    if owner == "GptOssExperts":
        return t.shape[1]  # stored (experts, in, out)
    return t.shape[-1]


# config.json in the words of transformers 4 (rope_theta, torch_dtype, ...), which is
# how most published checkpoints of these kinds still look
OLD_STYLE_CONFIG = ("qwen2_moe", "qwen3_moe_tied", "qwen3_next", "granitemoehybrid", "mixtral")
KEEP_F32 = ("A_log", "dt_bias", ".D", "e_score_correction_bias", "expert_bias")


def read_safetensors(path):
    with safe_open(path, framework="pt") as f:
        names = f.keys()
        return {k: f.get_tensor(k) for k in names}


def write_checkpoint(model, folder):
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    path = os.path.join(folder, "model.safetensors")
    tensors = read_safetensors(path)
    out = {}
    kimi = model.config.model_type == "kimi_linear"
    for k, v in tensors.items():
        if (
            kimi
            and ".block_sparse_moe." in k
            and k.split(".block_sparse_moe.")[1].split(".")[0] in ("gate_proj", "up_proj", "down_proj")
        ):
            k = k.replace(".block_sparse_moe.", ".mlp.")  # dense layers, as published
        if v.is_floating_point() and not k.endswith(KEEP_F32):
            b = v.to(torch.bfloat16)
            assert torch.equal(b.float(), v.float()), k
            v = b
        out[k] = v.contiguous()
    save_file(out, path, metadata={"format": "pt"})
    cfg_path = os.path.join(folder, "config.json")
    cfg = json.loads(Path(cfg_path).read_text())
    cfg["dtype"] = "bfloat16"
    cfg.pop("transformers_version", None)
    cfg.pop("time_step_limit", None)  # (0, inf), the default
    if cfg["model_type"] == "granitemoehybrid":  # the words published configs use
        cfg["layer_types"] = [
            {"linear_attention": "mamba", "full_attention": "attention"}[t] for t in cfg["layer_types"]
        ]
    if cfg["model_type"] == "nemotron_h":
        kinds = cfg.pop("layers_block_type", None) or cfg.pop("layer_types")
        cfg.pop("layer_types", None)
        cfg["hybrid_override_pattern"] = "".join(
            {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}[t] for t in kinds
        )
        cfg["num_hidden_layers"] = len(kinds)
    if os.path.basename(folder) in OLD_STYLE_CONFIG:
        rope = cfg.pop("rope_parameters")
        cfg["rope_theta"], cfg["rope_scaling"] = rope["rope_theta"], None
        if "partial_rotary_factor" in rope:
            cfg["partial_rotary_factor"] = rope["partial_rotary_factor"]
        cfg["torch_dtype"] = cfg.pop("dtype")
    if cfg["model_type"] == "qwen3_next":  # published files give only the interval
        cfg.pop("layer_types")
        cfg["full_attention_interval"] = 3
    Path(cfg_path).write_text(json.dumps(cfg, indent=1, sort_keys=True))
    gen = os.path.join(folder, "generation_config.json")
    if os.path.exists(gen):
        os.remove(gen)
    return out


def write_multimodal_layout(src, dst, num_experts):
    """The layout of the published Qwen3.5-MoE files: text tower under
    model.language_model., fused 3-D experts without a `.weight` suffix, nested
    text_config, plus tensors a text-only loader has to skip."""
    shutil.rmtree(dst, ignore_errors=True)
    os.makedirs(dst)
    tensors = read_safetensors(os.path.join(src, "model.safetensors"))
    out, experts = {}, {}
    for k, v in tensors.items():
        k = k.replace("model.language_model.", "model.") if k.startswith("model.language_model.") else k
        new = k.replace("model.", "model.language_model.", 1) if k.startswith("model.") else k
        if ".mlp.experts." in new and new.endswith(".weight"):
            head, tail = new.split(".mlp.experts.")
            e, proj, _ = tail.split(".")
            experts.setdefault(head, {})[(int(e), proj)] = v
        else:
            out[new] = v
    for head, parts in experts.items():
        gu = [torch.cat([parts[(e, "gate_proj")], parts[(e, "up_proj")]]) for e in range(num_experts)]
        out[head + ".mlp.experts.gate_up_proj"] = torch.stack(gu).contiguous()
        out[head + ".mlp.experts.down_proj"] = torch.stack(
            [parts[(e, "down_proj")] for e in range(num_experts)]
        ).contiguous()
    out["model.visual.patch_embed.proj.bias"] = torch.full((8,), 7.0, dtype=torch.bfloat16)
    out["mtp.fc.weight"] = torch.full((4, 8), 7.0, dtype=torch.bfloat16)
    save_file(out, os.path.join(dst, "model.safetensors"), metadata={"format": "pt"})
    text = json.loads(Path(src, "config.json").read_text())
    for k in ("architectures", "transformers_version"):
        text.pop(k, None)
    text["attn_output_gate"] = True
    text["mamba_ssm_dtype"] = "float32"
    cfg = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "image_token_id": VOCAB - 1,
        "video_token_id": VOCAB - 2,
        "vision_start_token_id": VOCAB - 3,
        "vision_end_token_id": VOCAB - 4,
        "text_config": text,
        "tie_word_embeddings": False,
    }
    Path(dst, "config.json").write_text(json.dumps(cfg, indent=1, sort_keys=True))
