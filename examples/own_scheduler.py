"""Jitted steps driven by hand: a scheduler of one's own around `serving_loop`.

The policy here is the simplest there is: every prompt gets all its pages at once, all prompts are computed in one step,
and then everybody decodes in step until all are done. Experts stay in host memory but for the first of each layer.

    python examples/own_scheduler.py
"""

import numpy as np

from rimuru_jax.host.allocator import EXPERTS, PageAllocator
from rimuru_jax.host.expert_cache import HOST, ExpertCopy
from rimuru_jax.host.page_layout import EXPERT
from rimuru_jax.host.page_tables import PageTables
from rimuru_jax.host.pool_plan import choose_layout
from rimuru_jax.models.checkpoint import LoadedModel
from rimuru_jax.models.config import ElementBytes, Moe
from rimuru_jax.models.context import ModelSpec
from rimuru_jax.models.hybrid import hybrid, random_model
from rimuru_jax.models.stack import stack_params
from rimuru_jax.serving_loop import Chunk, ServingLoop, pack

POOL_BYTES = 8 << 20


def model() -> LoadedModel:
    config = hybrid(
        ("mamba2", "mamba2", "attn") * 2,
        hidden_size=128,
        vocab_size=512,
        moe=Moe(num_experts=16, num_experts_per_tok=4, intermediate_size=64, normalize=True),
    )
    return random_model(config, "float32")


def generate(loaded: LoadedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations of `max_tokens` tokens."""
    config = loaded.config
    limit = max(map(len, prompts)) + max_tokens
    size = ElementBytes(weight=4, state=4, recurrent=4)
    layout = choose_layout(lambda tokens: config.page_kinds(size, tokens))
    allocator = PageAllocator(layout, layout.num_huge_pages(POOL_BYTES))
    tables = PageTables(layout, len(prompts), limit)
    loop = ServingLoop(
        ModelSpec.create(config, layout, "float32"),
        stack_params(config, loaded.params),
        loaded.host_pages,
        layout,
        num_huge_pages=allocator.num_huge_pages,
        max_num_seqs=len(prompts),
        max_model_len=limit,
    )

    # Expert 0 of every layer moves into the pool; all others are read from the host in place.
    moe, layers = config.moe, len(config.moe_layers)
    experts = np.full((layers, moe.num_experts, moe.matrices), HOST, np.int32)
    if pages := allocator.allocate(EXPERTS, {EXPERT: layers * moe.matrices}):
        experts[:, 0] = pages[EXPERT].reshape(layers, moe.matrices)
        loop.copy_experts(
            [ExpertCopy(layer, 0, tuple(experts[layer, 0].tolist())) for layer in range(layers)]
        )
    no_loads, no_buffers = np.zeros((layers, 0), np.int32), np.zeros((2, 0, moe.matrices), np.int32)
    loop.set_experts(experts, no_loads, no_buffers)

    # Slot i belongs to prompt i. Its pages of all kinds are taken together, for all tokens it will ever have.
    for slot, prompt in enumerate(prompts):
        demand = {p.kind.name: p.units_for(len(prompt) + max_tokens) for p in layout.sequence_kinds}
        units = allocator.allocate(slot, demand)
        if units is None:
            raise ValueError(
                f"prompt {slot} does not fit into the pool of {POOL_BYTES} bytes: raise POOL_BYTES"
            )
        tables.append(slot, units)
    loop.update_tables(tables.take_updates())

    outputs: list[list[int]] = [[] for _ in prompts]
    chunks = [Chunk(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
    while len(outputs[0]) < max_tokens:
        logits = loop.run(pack(chunks)).logits
        tokens = np.asarray(logits.argmax(axis=-1))[: len(prompts)].tolist()
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
        starts = [len(prompt) + len(output) - 1 for prompt, output in zip(prompts, outputs, strict=True)]
        chunks = [Chunk(slot, [tokens[slot]], start) for slot, start in enumerate(starts)]
    return outputs


def main() -> None:
    for tokens in generate(model(), [[1, 2, 3], list(range(40))], max_tokens=8):
        print(tokens)


if __name__ == "__main__":
    main()
