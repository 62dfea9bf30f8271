"""`rimuru plan`: what a model's page pool holds, from its config.json alone."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from rimuru_jax.cli.console import table
from rimuru_jax.cli.options import (
    DEFAULTS,
    MEMORY_POLICIES,
    AdjusterChoice,
    BlockSize,
    Dtype,
    LoadingBufferExperts,
    MaxModelLen,
    OffloadLimit,
    PoolBytes,
    RecurrentDtype,
)
from rimuru_jax.host.page_layout import EXPERT, PageLayout, format_bytes
from rimuru_jax.host.pool_plan import MemoryPolicy, PoolPlan, choose_layout, plan_pool
from rimuru_jax.models.config import ElementBytes, ModelConfig
from rimuru_jax.models.registry import host_embedding_bytes, parse_config, read_config, resident_bytes

SHARES = (0.25, 0.5, 1.0, 1.25)
"""Pool sizes that are shown when the user names none, in bytes of all experts."""
LENGTHS = (512, 2048)
"""Request lengths, in tokens, beside the longest."""
_BYTES = {"float32": 4, "bfloat16": 2}


def plan(
    model: Annotated[Path, typer.Argument(help="Model folder, or a config.json of any size.")],
    dtype: Dtype = "bfloat16",
    mamba_ssm_cache_dtype: RecurrentDtype = DEFAULTS.mamba_ssm_cache_dtype,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = None,
    memory_policy: Annotated[
        Literal["static", "fixed", "elastic"] | None,
        typer.Option(help=f"{MEMORY_POLICIES} Default: all three.", show_default=False),
    ] = None,
    page_pool_bytes: PoolBytes = None,
    expert_offload_limit: OffloadLimit = "auto",
    loading_buffer_experts: LoadingBufferExperts = DEFAULTS.loading_buffer_experts,
    adjuster_policy: AdjusterChoice = DEFAULTS.adjuster_policy,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, sizes in bytes.")] = False,
) -> None:
    """Show what a model's page pool would hold. Reads config.json only, no weights."""
    described = parse_config(read_config(model))
    size = _BYTES[dtype]
    elements = ElementBytes(weight=size, state=size, recurrent=_BYTES[mamba_ssm_cache_dtype])
    layout = choose_layout(lambda tokens: described.page_kinds(elements, tokens), block_size)
    classes = byte_classes(described, layout, size)
    pools = [page_pool_bytes] if page_pool_bytes is not None else _pool_sizes(layout, classes["experts"])
    policies = [memory_policy] if memory_policy else list(get_args(MemoryPolicy.__value__))
    rows = []
    for pool_bytes in pools:
        for policy in policies:
            arguments: dict[str, Any] = {
                "pool_bytes": pool_bytes,
                "memory_policy": policy,
                "num_experts": described.moe.num_experts,
                "num_experts_per_tok": described.moe.num_experts_per_tok,
                "matrices": described.moe.matrices,
                # "static" knows no limit: one that is given is about the other policies.
                "expert_offload_limit": "auto"
                if policy == "static" and not memory_policy
                else expert_offload_limit,
                "loading_buffer_experts": loading_buffer_experts,
                "max_model_len": max_model_len,
                "model_len_limit": described.max_position_embeddings,
                "adjuster_policy": adjuster_policy,
            }
            try:
                rows.append(_row(plan_pool(layout, **arguments), classes))
            except ValueError as error:
                if len(pools) == len(policies) == 1:
                    raise
                rows.append({"pool_bytes": pool_bytes, "memory_policy": policy, "error": str(error)})
    if as_json:
        content = {
            "model_type": described.model_type,
            "dtype": dtype,
            "bytes": classes,
            "layout": layout.to_json(),
            "pools": rows,
        }
        print(json.dumps(content, indent=2))
    else:
        _print(described, layout, classes, rows)


def _pool_sizes(layout: PageLayout, expert_bytes: int) -> list[int]:
    """Shares of all experts, up to whole pools."""
    step = layout.huge_page_multiple * layout.huge_page_bytes
    least = 2 if layout.huge_page_multiple == 1 else 1
    return list(dict.fromkeys(max(least, -int(-share * expert_bytes // step)) * step for share in SHARES))


def byte_classes(model: ModelConfig, layout: PageLayout, weight_bytes: int) -> dict[str, int]:
    """What each class takes, in bytes. Sequences are counted in strides, padding included."""
    expert = layout[EXPERT]
    one = model.moe.matrices * expert.stride_bytes
    per_token = per_sequence = least = 0
    for placed in layout.sequence_kinds:
        unit = placed.kind.run * placed.stride_bytes
        least += placed.units_for(1) * unit
        if placed.kind.page_tokens:
            per_token += placed.tables * unit // placed.kind.page_tokens
        else:
            per_sequence += placed.tables * unit
    return {
        "resident_weights": resident_bytes(model, weight_bytes),
        "embeddings_on_host": host_embedding_bytes(model, weight_bytes),
        "expert": one,
        "experts": one * model.moe.num_experts * expert.kind.layers,
        "kv_per_token": per_token,
        "state_per_sequence": per_sequence,
        "shortest_sequence": least,
    }


def _row(pool: PoolPlan, classes: dict[str, int]) -> dict[str, Any]:
    """A pool in numbers."""
    layout, one = pool.layout, classes["expert"]
    layers = layout[EXPERT].kind.layers
    capacity = (pool.num_huge_pages - 1) * layout.pages_per_huge(EXPERT)
    room = capacity - pool.buffer_pages - pool.pages_kept_free
    resident = min(pool.num_experts * layers, max(pool.floor_pages, room) // pool.matrices)
    lengths = sorted({length for length in LENGTHS if length < pool.max_model_len} | {pool.max_model_len})
    return {
        "pool_bytes": pool.pool_bytes,
        "memory_policy": pool.memory_policy,
        "device_bytes": pool.pool_bytes + classes["resident_weights"] - classes["embeddings_on_host"],
        "expert_offload_limit": pool.expert_offload_limit,
        "max_model_len": pool.max_model_len,
        "resident_experts_at_start": resident,
        "resident_bytes_at_start": resident * one,
        "floor_bytes": pool.floor_pages * pool.page_bytes,
        "loading_buffer_bytes": pool.buffer_pages * pool.page_bytes,
        "pages": {
            # Of one kind alone: what the whole pool would hold.
            placed.kind.name: pool.pages(placed.kind.name)
            for placed in layout.kinds
        },
        "concurrency": {
            length: {
                "all_experts": pool.concurrency(length, resident_experts=pool.num_experts),
                "floor": pool.concurrency(length),
            }
            for length in lengths
        },
    }


def _print(
    model: ModelConfig, layout: PageLayout, classes: dict[str, int], rows: list[dict[str, Any]]
) -> None:
    layers = layout[EXPERT].kind.layers
    print(
        f"{model.model_type}: {layers} layers of {model.moe.num_experts} experts, {model.moe.num_experts_per_tok} per token"
    )
    print("\nBytes")
    print(table([(name.replace("_", " "), format_bytes(count)) for name, count in classes.items()]))
    print("\nPage layout")
    print("\n".join("  " + line for line in layout.describe().splitlines()))
    print("\nPools (requests at once: beside all experts / beside the floor)")
    header = (
        "pool",
        "with weights",
        "policy",
        "may be away",
        "floor",
        "buffers",
        "resident at start",
        "longest",
    )
    fitting = [row for row in rows if "error" not in row]
    lengths = sorted({length for row in fitting for length in row["concurrency"] if length in LENGTHS})
    cells: list[tuple[str, ...]] = [(*header, *(f"at {length}" for length in lengths), "at the longest")]
    for row in fitting:
        at = {k: f"{v['all_experts']} / {v['floor']}" for k, v in row["concurrency"].items()}
        cells.append(
            (
                format_bytes(row["pool_bytes"]),
                format_bytes(row["device_bytes"]),
                row["memory_policy"],
                f"{row['expert_offload_limit']} of {model.moe.num_experts}",
                format_bytes(row["floor_bytes"]),
                format_bytes(row["loading_buffer_bytes"]),
                f"{row['resident_experts_at_start'] / (layers * model.moe.num_experts):.0%}",
                str(row["max_model_len"]),
                *(at.get(length, "-") for length in lengths),
                at[row["max_model_len"]],
            )
        )
    if fitting:
        print(table(cells))
    # One sentence per policy is enough: of the largest pool that is too small.
    refused = {row["memory_policy"]: row for row in rows if "error" in row}
    for policy, row in refused.items():
        print(f"  {policy} not within {format_bytes(row['pool_bytes'])}: {row['error']}")
    if not fitting:
        return
    print("\nPages if the pool held one kind alone")
    kinds = [placed.kind.name for placed in layout.kinds]
    sizes = {row["pool_bytes"]: row["pages"] for row in fitting}
    print(
        table(
            [
                ("pool", *kinds),
                *(
                    (format_bytes(size), *(str(pages[kind]) for kind in kinds))
                    for size, pages in sizes.items()
                ),
            ]
        )
    )
