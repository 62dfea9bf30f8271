"""What XLA makes of a step: for every bucket the pool stays in place and temporaries stay small.

Nothing runs and nothing is allocated: shapes are enough to compile.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from rimuru_jax.host.pool_plan import choose_layout
from rimuru_jax.models.config import ElementBytes, ModelConfig
from rimuru_jax.models.context import ModelSpec
from rimuru_jax.models.registry import parse_config
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.serving_loop import Bucket, _load_pages, _move_pages, buckets, step, step_shapes
from tests.models.tiny_checkpoints import CONFIGS

IN_PLACE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "while",
    "conditional",
    "call",
    "bitcast",
    "opt-barrier",
}
WRITES = {"dynamic-update-slice", "scatter"}


def makers_of_second_pools(text: str, pool: jax.ShapeDtypeStruct) -> list[str]:
    """Instructions of a compiled module whose result is a pool other than the one they were given.

    Allowed are those that pass the pool on, those that write some of it, and fusions that end in such a write.
    """
    shape = f"u16[{pool.shape[0]},{pool.shape[1]}]"
    roots, found, computation = {}, [], ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            computation = header[1]
        if not (match := re.match(r"\s+(ROOT )?%[\w.\-]+ = (.+?) ([\w\-]+)\(", line)):
            continue
        root, result, opcode = match.groups()
        if root:
            roots[computation] = opcode
        if shape in result:
            called = re.search(r"calls=%([\w.\-]+)", line)
            found.append((opcode, result.count(shape), called and called[1], line.strip()[:200]))
    assert found
    return [
        line
        for opcode, pools, called, line in found
        if pools > 1 or (roots.get(called) if opcode == "fusion" else opcode) not in IN_PLACE | WRITES
    ]


def check_in_place(compiled: jax.stages.Compiled, pool: jax.ShapeDtypeStruct) -> None:
    text = compiled.as_text() or ""
    assert not makers_of_second_pools(text, pool)
    alias = re.search(r"input_output_alias=\{ \{0?\}: \((\d+), \{\}", text)
    assert alias, "the pool that comes back is not the one that was given"
    entry = text[text.index("\nENTRY ") :]
    assert re.search(rf"= u16\[{pool.shape[0]},{pool.shape[1]}\]\S* parameter\({alias[1]}\)", entry)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.1 * 2 * pool.size


# Code generation is what takes long and what these tests do not look at.
QUICK = {"xla_backend_optimization_level": 0}
POOL_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A model that exists only as shapes, in a pool of 256 MiB."""

    config: ModelConfig
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 2048

    def shapes(self, bucket: Bucket, unrolled: bool = False) -> tuple[ModelSpec, tuple[Any, ...]]:
        """What `step` takes."""
        size = jnp.dtype(self.dtype).itemsize
        elements = ElementBytes(weight=size, state=size)
        layout = choose_layout(lambda tokens: self.config.page_kinds(elements, tokens))
        spec = ModelSpec.create(self.config, layout, self.dtype)
        limits = {"max_num_seqs": self.max_num_seqs, "max_model_len": self.max_model_len}
        return spec, step_shapes(spec, layout, bucket, pool_bytes=POOL_BYTES, unrolled=unrolled, **limits)

    def compile(self, bucket: Bucket) -> tuple[jax.stages.Compiled, jax.ShapeDtypeStruct]:
        spec, shapes = self.shapes(bucket)
        lowered = step.lower(*shapes, spec=spec, decode=bucket.decode)
        return lowered.compile(compiler_options=QUICK), shapes[1]


# The default model, with the limits it has unless told otherwise, but fewer layers: they run in one loop.
DEFAULT_MODEL = {
    "model_type": "mixtral", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 4,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96, "num_local_experts": 16,
    "num_experts_per_tok": 16, "max_position_embeddings": 8192, "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    # Every kind of state.
    **{
        name: Shapes(parse_config({"model_type": name, **CONFIGS[name]}), "bfloat16", 2, 16, 256)
        for name in ("qwen3_next", "nemotron_h", "lfm2_moe", "gpt_oss")
    },
    "default": Shapes(parse_config(DEFAULT_MODEL), "bfloat16", 128, 2048),
    # Layers with a shared expert, and one without experts between them.
    "mixed-float32": Shapes(
        parse_config({"model_type": "qwen2_moe", **CONFIGS["qwen2_moe"]}), "float32", 2, 32, 256
    ),
}


@pytest.mark.parametrize(
    ("name", "bucket"),
    [
        pytest.param(name, bucket, id=f"{name}-{bucket.tokens}x{bucket.rows}{'d' * bucket.decode}")
        for name, shapes in MODELS.items()
        for bucket in buckets(shapes.max_num_batched_tokens, shapes.max_num_seqs)
    ],
)
def test_every_bucket_leaves_the_pool_in_place(name, bucket):
    check_in_place(*MODELS[name].compile(bucket))


def test_copies_of_experts_leave_the_pool_in_place():
    pool, host = (jax.ShapeDtypeStruct((n, 55296), jnp.uint16) for n in (1200, 192))
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    check_in_place(_load_pages.lower(pool, host, ids, ids, count).compile(compiler_options=QUICK), pool)
    view = MemoryView(kind="expert", page_shape=(96, 576), dtype=jnp.dtype("bfloat16"), stride=55296)
    check_in_place(_move_pages.lower(pool, view, ids, ids, count).compile(compiler_options=QUICK), pool)


@pytest.mark.parametrize(
    "fault", ["reads the pool from before the write", "gives the pool away twice", "sums it"]
)
def test_the_check_sees_a_second_pool(fault):
    def bad(pool, x):
        new = pool.at[jnp.asarray([2, 3])].set(x)
        if fault == "gives the pool away twice":
            return new, pool
        if fault == "sums it":
            return new + jnp.uint16(1), x
        return new, lax.fori_loop(0, 4096, lambda i, total: total + pool[i] * new[i], x[0])

    pool = jax.ShapeDtypeStruct((4096, 2048), jnp.uint16)
    x = jax.ShapeDtypeStruct((2, 2048), jnp.uint16)
    compiled = jax.jit(bad, donate_argnums=0).lower(pool, x).compile()
    with pytest.raises(AssertionError):
        check_in_place(compiled, pool)
