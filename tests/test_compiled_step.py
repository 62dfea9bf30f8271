"""What XLA makes of a step: for every bucket the pool stays in place and temporaries stay small.

A model of the default model's shape with its default limits, in a pool that holds all of its experts. Nothing runs
and nothing is allocated: shapes are enough to compile.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from rimuru_jax.host.pool_plan import choose_layout
from rimuru_jax.models.config import Attention, LayerSpec, ModelConfig, Moe, Rotary
from rimuru_jax.models.stack import Batch, ExpertTables, ModelSpec
from rimuru_jax.serving_loop import Bucket, buckets, step

LAYERS, HIDDEN, VOCAB, EXPERTS, WIDTH = 30, 576, 49152, 16, 96
MAX_TOKENS, MAX_SEQS, MAX_LEN = 2048, 128, 2048
POOL_BYTES = 256 << 20

CONFIG = ModelConfig(
    model_type="mixtral",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    layers=(
        LayerSpec(
            mixer=Attention(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, rotary=Rotary(theta=1e5)),
            ffn=Moe(num_experts=EXPERTS, num_experts_per_tok=16, intermediate_size=WIDTH, normalize=True),
        ),
    )
    * LAYERS,
)
LAYOUT = choose_layout(lambda tokens: CONFIG.page_kinds(weight_bytes=2, kv_bytes=2, page_tokens=tokens))


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def weights(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def words(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint16)


def arguments(bucket: Bucket):
    tokens, rows, _ = bucket
    params = {
        "embedding": weights(VOCAB, HIDDEN),
        "final_norm": weights(HIDDEN),
        "segments": (
            (
                {
                    "input_norm": weights(LAYERS, HIDDEN),
                    "ffn_norm": weights(LAYERS, HIDDEN),
                    "qkv": weights(LAYERS, 15 * 64, HIDDEN),
                    "attention_output": weights(LAYERS, HIDDEN, HIDDEN),
                    "router": weights(LAYERS, EXPERTS, HIDDEN),
                },
            ),
        ),
    }
    experts = ExpertTables(
        pages=ints(LAYERS, EXPERTS, 3),  # type: ignore[arg-type]
        load_sources=ints(LAYERS + 1, EXPERTS * 3),  # type: ignore[arg-type]
        load_targets=ints(LAYERS + 1, EXPERTS * 3),  # type: ignore[arg-type]
        load_counts=ints(LAYERS + 1),  # type: ignore[arg-type]
    )
    batch = Batch(
        token_ids=ints(tokens),  # type: ignore[arg-type]
        positions=ints(tokens),  # type: ignore[arg-type]
        rows=ints(tokens),  # type: ignore[arg-type]
        slots=ints(rows),  # type: ignore[arg-type]
        query_start=ints(rows + 1),  # type: ignore[arg-type]
        context_len=ints(rows),  # type: ignore[arg-type]
        logit_tokens=ints(rows),  # type: ignore[arg-type]
    )
    pool = words(LAYOUT.num_huge_pages(POOL_BYTES), LAYOUT.huge_page_bytes // 2)
    host = words(LAYERS * EXPERTS * 3, WIDTH * HIDDEN)
    kv_tables = ints(LAYOUT["kv"].tables, MAX_SEQS, MAX_LEN // LAYOUT["kv"].kind.page_tokens)
    return ModelSpec.create(CONFIG, LAYOUT, "bfloat16"), params, pool, host, kv_tables, experts, batch


def pool_copies(text: str, pool: jax.ShapeDtypeStruct) -> list[str]:
    """Copies as large as the pool in a compiled module."""
    shape = f"u16[{pool.shape[0]},{pool.shape[1]}]"
    assert shape in text
    return [
        line for line in text.splitlines() if f"= {shape}" in line and re.search(r"\} copy[-.\w]*\(", line)
    ]


@pytest.mark.parametrize(
    "bucket", list(buckets(MAX_TOKENS, MAX_SEQS)), ids=lambda b: f"{b.tokens}x{b.rows}{'d' * b.decode}"
)
def test_the_pool_stays_in_place(bucket: Bucket):
    args = arguments(bucket)
    pool = args[2]
    # Code generation is what takes long and what this does not look at.
    options = {"xla_backend_optimization_level": 0}
    compiled = step.lower(*args, decode=bucket.decode).compile(compiler_options=options)
    assert not pool_copies(compiled.as_text() or "", pool)
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = 2 * pool.shape[0] * pool.shape[1]
    assert memory.alias_size_in_bytes >= pool_bytes, "the pool that comes back is not the one that was given"
    assert memory.temp_size_in_bytes < 0.1 * pool_bytes


def test_the_check_sees_a_copy():
    """A read of the old pool that nothing orders before the write: what the check is there to find."""

    def bad(pool, x):
        old = pool[3]
        return pool.at[jnp.asarray([2, 3])].set(x), pool.sum(axis=1), old

    pool = words(4096, 2048)
    compiled = jax.jit(bad, donate_argnums=0).lower(pool, words(2, 2048)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert pool_copies(compiled.as_text() or "", pool) or memory.temp_size_in_bytes >= pool.size * 2
