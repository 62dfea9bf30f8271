"""Every kernel at the sizes of a real model, compiled for an H200 on a machine without a GPU.

`data/h200_target_config.txtpb` describes the card, as XLA read it off one. Needs the dependency group `h200` (the CUDA
plugin of JAX without CUDA's own libraries). What must hold: no registers are spilled, a pool of 25 GB stays where it is,
temporaries are bounded.
"""

import functools
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from rimuru_jax.models.registry import parse_config
from rimuru_jax.pallas import implementation
from rimuru_jax.pallas.causal_conv1d import mosaic_gpu as conv
from rimuru_jax.pallas.gated_delta_rule import mosaic_gpu as delta
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import Scoring, group_tokens
from rimuru_jax.pallas.moe_routing import mosaic_gpu as routing_kernels
from rimuru_jax.pallas.moe_routing.api import most_tiles
from rimuru_jax.pallas.page_loads import PageLoads
from rimuru_jax.pallas.page_update import mosaic_gpu as pages
from rimuru_jax.pallas.paged_attention import mosaic_gpu as attention
from rimuru_jax.pallas.paged_moe import mosaic_gpu as moe
from rimuru_jax.pallas.paged_moe.activations import activation_named
from rimuru_jax.pallas.qk_norm_rope_cache import HeadNorm
from rimuru_jax.pallas.qk_norm_rope_cache import mosaic_gpu as heads
from rimuru_jax.pallas.selective_scan import mosaic_gpu as scan
from rimuru_jax.serving_loop import GPU_COMPILER_OPTIONS, Bucket
from rimuru_jax.serving_loop import step as serving_step
from tests.pallas.paged import view
from tests.test_compiled_step import Shapes as ModelShapes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the dependency group h200"
)

HUGE_PAGES = 8000
EXPERT = view("expert", (768, 2048), "bfloat16")  # Qwen3-30B-A3B
KV = view("kv", (2, 4, 16, 128), "bfloat16")
DELTA = view("ssm", (32, 128, 128), "float32")  # Qwen3-Next
SCAN = view("ssm", (64, 64, 128), "float32")  # Nemotron-3-Nano
CONV = view("conv", (1, 8192), "bfloat16")

type Shapes = Mapping[str, Any]
"""(shape, dtype) of each argument, or a tuple of such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    operator: Callable[..., Any]
    """Of a pool and more named arguments; gives a pool back unless it only reads it."""
    arguments: Shapes
    words: int = EXPERT.stride
    """Of a huge page."""
    reads_only: bool = False
    kernels: int = 1
    """Mosaic kernels that are compiled, at least."""
    temporaries: int = 1
    """Megabytes, at most."""


def rows_of(rows: int) -> Shapes:
    """Metadata of the operators with a state per row."""
    return {
        "pages": ((rows,), jnp.int32),
        "query_start": ((rows + 1,), jnp.int32),
        "has_state": ((rows,), jnp.bool_),
    }


def copies(n: int) -> Shapes:
    return {"sources": ((n,), jnp.int32), "targets": ((n,), jnp.int32), "count": ((), jnp.int32)}


LAYERS = 3
LOADS = (((LAYERS + 1, 384), jnp.int32),) * 2 + (((LAYERS + 1,), jnp.int32), ((), jnp.int32))

HOST_PAGES: Shapes = {"host_pages": ((48 * 128 * 3, EXPERT.words), jnp.uint16)}


def qk_norm_rope_cache(tokens: int, rows: int) -> Case:
    def operator(pool, weights, cos, sin, **rest):
        norm = HeadNorm(weights, 1e-6, "plain")
        return heads.qk_norm_rope_cache(
            pool=pool, view=KV, num_heads=32, head_norm=norm, rotation=(cos, sin), **rest
        )

    return Case(
        operator=operator,
        arguments={
            "qkv": ((tokens, 40 * 128), jnp.float32),
            "page_table": ((rows, 1024), jnp.int32),
            "rows": ((tokens,), jnp.int32),
            "positions": ((tokens,), jnp.int32),
            "query_start": ((rows + 1,), jnp.int32),
            "weights": ((256,), jnp.bfloat16),
            "cos": ((tokens, 64), jnp.float32),
            "sin": ((tokens, 64), jnp.float32),
        },
    )


def paged_attention(tokens: int, rows: int) -> Case:
    return Case(
        operator=functools.partial(
            attention.paged_attention, view=KV, scale=128**-0.5, max_query_len=tokens // rows
        ),
        arguments={
            "queries": ((tokens, 32, 128), jnp.bfloat16),
            "page_table": ((rows, 1024), jnp.int32),
            "query_start": ((rows + 1,), jnp.int32),
            "context_len": ((rows,), jnp.int32),
        },
        reads_only=True,
        kernels=2 if tokens > rows else 1,
        temporaries=64,
    )


def routing(tokens: int, experts: int, top_k: int, groups: int = 1) -> Case:
    tile = moe.token_tile(tokens * top_k, experts)

    def operator(logits, valid, bias, pool):
        return routing_kernels.route_and_group(
            logits,
            valid,
            bias,
            top_k,
            tile,
            most_tiles(tokens * top_k, experts, tile),
            Scoring(
                normalize=True,
                function="sigmoid",
                num_groups=groups,
                top_groups=(groups + 1) // 2,
            ),
        )

    return Case(
        operator=operator,
        arguments={
            "logits": ((tokens, experts), jnp.float32),
            "valid": ((tokens,), jnp.bool_),
            "bias": ((experts,), jnp.float32),
        },
        reads_only=True,
        kernels=1 if tokens <= routing_kernels.ONE_LAUNCH else 2,
    )


def moe_layer(
    x, mix, chosen, valid, pool, host_pages, tables, layer, loads, *, view: MemoryView, from_host=False
):
    experts = tables.shape[1]
    tile = moe.token_tile(chosen.size, experts, from_host=from_host)
    routing = group_tokens(chosen, valid, experts, tile=tile)
    return moe.paged_moe(
        x,
        mix,
        routing,
        pool,
        view,
        host_pages,
        tables,
        layer,
        PageLoads(*loads),
        activation=activation_named("silu"),
        config=moe.choose_config(tile, *view.page_shape, multiprocessors=132),
    )


def moe_shapes(tokens: int) -> Shapes:
    return {
        "x": ((tokens, 2048), jnp.bfloat16),
        "mix": ((tokens, 8), jnp.float32),
        "chosen": ((tokens, 8), jnp.int32),
        "valid": ((tokens,), jnp.bool_),
        "tables": ((LAYERS, 128, 3), jnp.int32),
        **HOST_PAGES,
    }


def paged_moe(tokens: int, *, from_host: bool = False) -> Case:
    return Case(
        operator=functools.partial(moe_layer, view=EXPERT, from_host=from_host),
        arguments={**moe_shapes(tokens), "layer": ((), jnp.int32), "loads": LOADS},
        kernels=2,
        temporaries=1 + tokens * 8 * (2 * 2048 + 768) * 2 * 4 // 10**6,
    )


def gated_delta_rule(tokens: int, rows: int) -> Case:
    return Case(
        operator=functools.partial(delta.gated_delta_rule, view=DELTA, max_query_len=tokens // rows),
        arguments={
            "q": ((tokens, 16, 128), jnp.bfloat16),
            "k": ((tokens, 16, 128), jnp.bfloat16),
            "v": ((tokens, 32, 128), jnp.bfloat16),
            "log_decay": ((tokens, 32), jnp.float32),
            "beta": ((tokens, 32), jnp.float32),
            **rows_of(rows),
        },
        words=DELTA.stride,
        kernels=2 if tokens > rows else 1,
        temporaries=350 if tokens > rows else 8,
    )


def selective_scan(tokens: int, rows: int) -> Case:
    return Case(
        operator=functools.partial(scan.selective_scan, view=SCAN, max_query_len=tokens // rows),
        arguments={
            "x": ((tokens, 64, 64), jnp.bfloat16),
            "dt": ((tokens, 64), jnp.float32),
            "A": ((64,), jnp.float32),
            "B": ((tokens, 8, 128), jnp.bfloat16),
            "C": ((tokens, 8, 128), jnp.bfloat16),
            "D": ((64,), jnp.bfloat16),
            **rows_of(rows),
        },
        words=SCAN.stride,
        kernels=2 if tokens > rows else 1,
        temporaries=300 if tokens > rows else 8,
    )


def causal_conv1d(tokens: int, rows: int) -> Case:
    return Case(
        operator=functools.partial(
            conv.causal_conv1d, view=CONV, bias=None, activation="silu", max_query_len=tokens // rows
        ),
        arguments={
            "x": ((tokens, 8192), jnp.bfloat16),
            "weight": ((8192, 4), jnp.bfloat16),
            **rows_of(rows),
        },
        words=3 * CONV.stride,
        kernels=2 if tokens > rows else 1,
    )


def layers(x, mix, chosen, valid, pool, host_pages, tables, qkv, rows, positions, page_table, query_start, context_len, cos, sin, loads):  # fmt: skip
    """A scan over layers, each with all that a layer of attention and experts does to the pool."""

    def layer(carry, index):
        x, pool = carry
        queries, pool = heads.qk_norm_rope_cache(
            qkv,
            pool,
            KV,
            page_table,
            rows,
            positions,
            query_start,
            num_heads=32,
            head_norm=None,
            rotation=(cos, sin),
        )
        mixed = attention.paged_attention(
            queries, pool, KV, page_table, query_start, context_len, scale=0.1, max_query_len=2
        )
        x += mixed.reshape(x.shape[0], -1)[:, : x.shape[1]]
        out, pool = moe_layer(x, mix, chosen, valid, pool, host_pages, tables, index, loads, view=EXPERT)
        return (x + out, pool), ()

    pool = pages.load_pages(pool, host_pages, *(part[0] for part in loads[:3]))
    (x, pool), _ = lax.scan(layer, (x, pool), jnp.arange(LAYERS))
    return x, pool


def step(tokens: int, rows: int) -> Case:
    projected = qk_norm_rope_cache(tokens, rows).arguments
    return Case(
        operator=layers,
        arguments={
            **moe_shapes(tokens),
            **{name: shape for name, shape in projected.items() if "weight" not in name},
            "context_len": ((rows,), jnp.int32),
            "loads": LOADS,
        },
        kernels=6,
        temporaries=200 + paged_moe(tokens).temporaries,
    )


CASES = {
    "qk_norm_rope_cache, 64 decodes": qk_norm_rope_cache(64, 64),
    "qk_norm_rope_cache, 4 prefills": qk_norm_rope_cache(8192, 4),
    "load_pages": Case(
        operator=pages.load_pages, arguments={**copies(384), **HOST_PAGES}
    ),
    "move_pages": Case(operator=functools.partial(pages.move_pages, view=EXPERT), arguments=copies(64)),
    "paged_attention, 64 decodes": paged_attention(64, 64),
    "paged_attention, 4 prefills": paged_attention(8192, 4),
    "moe_routing, 16 tokens": routing(16, 256, 8, groups=8),
    "moe_routing, 8192 tokens": routing(8192, 512, 10),
    "paged_moe, 64 tokens": paged_moe(64),
    "paged_moe, 8192 tokens": paged_moe(8192),
    "paged_moe, 8192 tokens, experts on the host": paged_moe(8192, from_host=True),
    "gated_delta_rule, 64 decodes": gated_delta_rule(64, 64),
    "gated_delta_rule, 4 prefills": gated_delta_rule(8192, 4),
    "selective_scan, 64 decodes": selective_scan(64, 64),
    "selective_scan, 4 prefills": selective_scan(8192, 4),
    "causal_conv1d, 64 decodes": causal_conv1d(64, 64),
    "causal_conv1d, 4 prefills": causal_conv1d(8192, 4),
    "a scan over layers": step(2048, 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def h200() -> NamedSharding:
    """An H200 to compile for."""
    description = Path(__file__).parents[1] / "data" / "h200_target_config.txtpb"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description.read_text(), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    return NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled(case, h200, monkeypatch, capfd):
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=h200)
    arguments = jax.tree.map(
        lambda shape: struct(*shape),
        dict(case.arguments),
        is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2,
    )
    pool = struct((HUGE_PAGES, case.words), jnp.uint16)
    jitted = jax.jit(case.operator, donate_argnames=() if case.reads_only else "pool")
    compiled = jitted.trace(**arguments, pool=pool).lower().compile()

    ptxas = "".join(capfd.readouterr()).splitlines()
    assert sum("Compiling entry function" in line for line in ptxas) >= case.kernels
    for line in ptxas:
        if "spill" in line:
            assert "0 bytes spill stores, 0 bytes spill loads" in line

    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert not [line for line in text.splitlines() if " copy" in line and f"[{HUGE_PAGES}," in line]
    assert memory.temp_size_in_bytes <= case.temporaries * 10**6
    if not case.reads_only:
        assert memory.alias_size_in_bytes >= pool.size * 2, (
            "the pool that comes back is not the one that was given"
        )


LAUNCHES = {"fusion", "custom-call", "copy", "while", "conditional", "sort", "scatter", "gather", "call"}


@pytest.mark.parametrize(
    "bucket", [Bucket(64, 64, True), Bucket(1024, 16, False)], ids=["64 decodes", "1024 tokens of 16"]
)
def test_a_whole_step(bucket, h200, monkeypatch):
    """Qwen3-30B-A3B with fewer layers: kernels everywhere, the pool in place, few launches for a layer."""
    monkeypatch.setattr(implementation, "device_refusal", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    raw = json.loads((Path(__file__).parents[1] / "data" / "configs" / "Qwen3-30B-A3B.json").read_text())

    def compiled(layers: int) -> str:
        model = ModelShapes(parse_config({**raw, "num_hidden_layers": layers}), "bfloat16", 64, 1024)
        spec, shapes = model.shapes(bucket, unrolled=bucket.decode)
        on_card = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200), shapes)
        lowered = serving_step.trace(*on_card, spec=spec, decode=bucket.decode).lower(
            lowering_platforms=("cuda",)
        )
        result = lowered.compile(GPU_COMPILER_OPTIONS)
        text, memory, pool = result.as_text() or "", result.memory_analysis(), shapes[1]
        assert not [line for line in text.splitlines() if " copy" in line and f"[{pool.shape[0]}," in line]
        assert memory is not None and memory.alias_size_in_bytes >= pool.size * 2
        assert memory.temp_size_in_bytes < 200 << 20
        if bucket.decode:  # an operand cut from a larger array has its graph node made anew at every step
            assert "dynamic_slice_fusion" not in text and "remat" not in text
        return text

    def launches(text: str, computation: str) -> tuple[int, int]:
        """Of everything, and of Mosaic kernels."""
        body = text[text.index(computation) :].split("\n}\n")[0]
        opcodes = re.findall(r"^\s+(?:ROOT )?%\S+ = .+? ([\w\-]+)\(", body, re.M)
        return sum(opcode in LAUNCHES for opcode in opcodes), body.count('"mosaic_gpu')

    if bucket.decode:
        counts = np.array([launches(compiled(layers), "\nENTRY ") for layers in (2, 3)])
        total, kernels = counts[1] - counts[0]
    else:
        text = compiled(3)
        loop = re.search(r" while\(.*body=(%[\w.\-]+)", text)
        assert loop
        total, kernels = launches(text, f"\n{loop[1]} (")
    # What is between projection and attention in one launch, attention and experts in two each, routing in two of
    # which one may lie in a fusion, as what takes a layer's weights may in a loop.
    assert kernels >= (6 if bucket.decode else 5) and total <= (15 if bucket.decode else 28), (total, kernels)
