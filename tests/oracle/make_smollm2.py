#!/usr/bin/env python3
"""Reference logits of the dense SmolLM2-135M-Instruct, which the embedded default model must reproduce.

Usage:  python make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2_dense.npz

`transformers` dequantises the GGUF file itself; the weights are then rounded to bfloat16, as our folder stores them,
and everything is computed in float32. Needs torch, transformers, gguf. Kept per prompt: token ids, the logits of
every position for each 64th token of the vocabulary, and the most probable token of every position.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water evaporates from the oceans, rises, cools down and condenses into clouds. When the drops grow heavy enough, "
    "they fall as rain or snow; rivers bring the water back to the sea, and the cycle starts again. " * 3,
)


def main(gguf: str, out: str) -> None:
    path = Path(gguf)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).to(torch.float32))
        values = {}
        for i, prompt in enumerate(PROMPTS):
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
            logits = model(ids).logits[0]
            values[f"prompt.{i}"] = ids[0].numpy().astype(np.int32)
            values[f"logits.{i}"] = logits[:, ::64].numpy()
            values[f"best.{i}"] = logits.argmax(-1).numpy().astype(np.int32)
            top = logits.topk(2).values
            values[f"margin.{i}"] = (top[:, 0] - top[:, 1]).numpy()
    np.savez_compressed(out, **values)


if __name__ == "__main__":
    main(*sys.argv[1:])
