"""The host's side of an engine: the pool that its arguments ask for, and who decides about the pages. No device, no weights."""

import os
from dataclasses import dataclass
from pathlib import Path

from rimuru_jax.config import EngineConfig
from rimuru_jax.host.allocator import PageAllocator
from rimuru_jax.host.expert_cache import ExpertCache
from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint
from rimuru_jax.host.metrics import Metrics
from rimuru_jax.host.page_layout import EXPERT, PageLayout
from rimuru_jax.host.page_tables import PageTables
from rimuru_jax.host.pool_plan import PoolPlan, choose_layout, plan_pool
from rimuru_jax.host.residency import residency_policy
from rimuru_jax.host.scheduler import Scheduler, SchedulerConfig
from rimuru_jax.models.config import ElementBytes, ModelConfig


@dataclass(frozen=True, slots=True)
class HostController:
    """Everything that plans steps, wired together. `experts` holds nothing until its `fill`."""

    allocator: PageAllocator
    page_tables: PageTables
    experts: ExpertCache
    scheduler: Scheduler
    metrics: Metrics

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        plan: PoolPlan,
        profile: HotsetProfile,
        allocator: PageAllocator | None = None,
    ) -> "HostController":
        """Over an `allocator` of the plan's pool, if it is not the usual one."""
        allocator, metrics = allocator or PageAllocator(plan.layout, plan.num_huge_pages), Metrics()
        page_tables = PageTables(plan.layout, config.max_num_seqs, plan.max_model_len)
        experts = ExpertCache(
            num_layers=len(model.moe_layers),
            num_experts=model.moe.num_experts,
            matrices=model.moe.matrices,
            allocator=allocator,
            policy=residency_policy(config.expert_cache_policy, profile),
            expert_offload_limit=plan.expert_offload_limit,
            buffer_experts=plan.buffer_experts,
        )
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
            memory_policy=config.memory_policy,
            expand_patience=config.expand_patience,
            adjuster_policy=config.adjuster_policy,
        )
        scheduler = Scheduler(limits, allocator, page_tables, experts, metrics)
        return cls(allocator, page_tables, experts, scheduler, metrics)


def element_bytes(config: EngineConfig) -> ElementBytes:
    """Bytes per element of what lies in the pool under these arguments."""
    size, recurrent = (
        4 if dtype == "float32" else 2 for dtype in (config.dtype, config.mamba_ssm_cache_dtype)
    )
    return ElementBytes(weight=size, state=size, recurrent=recurrent)


def layout_for(model: ModelConfig, config: EngineConfig) -> PageLayout:
    """The page layout of a model under these arguments."""
    elements = element_bytes(config)
    return choose_layout(lambda tokens: model.page_kinds(elements, tokens), config.block_size)


def plan_for(model: ModelConfig, config: EngineConfig, default_pool_bytes: int | None = None) -> PoolPlan:
    """The pool of a model under these arguments; needs no weights."""
    layout = layout_for(model, config)
    return plan_pool(
        layout,
        pool_bytes=config.page_pool_bytes or default_pool_bytes or _default_pool_bytes(model, layout),
        memory_policy=config.memory_policy,
        num_experts=model.moe.num_experts,
        num_experts_per_tok=model.moe.num_experts_per_tok,
        matrices=model.moe.matrices,
        expert_offload_limit=config.expert_offload_limit,
        loading_buffer_experts=config.loading_buffer_experts,
        max_model_len=config.max_model_len,
        model_len_limit=model.max_position_embeddings,
        adjuster_policy=config.adjuster_policy,
    )


def fingerprint(model: ModelConfig) -> ModelFingerprint:
    return ModelFingerprint(
        model_type=model.model_type,
        num_layers=len(model.moe_layers),
        num_experts=model.moe.num_experts,
        experts_per_token=model.moe.num_experts_per_tok,
    )


def hotset_profile(model: ModelConfig, path: str | Path | None) -> HotsetProfile:
    """The profile at `path`, or the uniform one."""
    return HotsetProfile.load(path, fingerprint(model)) if path else HotsetProfile.uniform(fingerprint(model))


def expert_bytes(model: ModelConfig, layout: PageLayout) -> int:
    """Of all experts, on pages."""
    return len(model.moe_layers) * model.moe.num_experts * model.moe.matrices * layout[EXPERT].stride_bytes


def _default_pool_bytes(model: ModelConfig, layout: PageLayout) -> int:
    """All experts and the pages of eight requests of up to 4096 tokens, at most half of the memory that is free."""
    tokens = min(4096, model.max_position_embeddings)
    states = sum(placed.units_for(tokens) * placed.stride_bytes for placed in layout.sequence_kinds)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = expert_bytes(model, layout) + 8 * states + 2 * layout.huge_page_multiple * layout.huge_page_bytes
    return max(min(wanted, free // 2), 2 * layout.huge_page_multiple * layout.huge_page_bytes)
