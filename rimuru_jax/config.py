"""Engine arguments, with the names and meanings that users of vLLM know; ours only for what is new."""

from dataclasses import dataclass
from typing import Literal

from rimuru_jax.host.adjuster import AdjusterPolicy
from rimuru_jax.host.pool_plan import MemoryPolicy
from rimuru_jax.host.prefetch import Prefetch
from rimuru_jax.host.residency import CachePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that can be set about an engine. `Engine(model, **config)` takes these as keyword arguments."""

    tokenizer: str | None = None
    """Folder of the tokenizer, when it is not the model's."""
    load_format: Literal["auto", "dummy"] = "auto"
    """"auto" reads the model's weights; "dummy" makes random ones, from a config.json alone."""
    dummy_router_skew: float = 0.0
    """How unequally often dummy weights choose experts: exponent of their popularity by rank. 0 is uniform, 0.3 realistic."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights, activations and cached keys and values."""
    seed: int = 0
    """Seed of requests that bring none."""
    max_model_len: int | None = None
    """Tokens of the longest request, prompt and output together. None: the model's limit, or as much as fits."""
    max_num_seqs: int = 128
    """Requests that run at once, at most."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step, at most; longer prompts are computed in chunks."""
    block_size: int | None = None
    """Tokens of one KV page. None: 16, or less where 16 would waste pool."""
    mamba_ssm_cache_dtype: Literal["float32", "bfloat16"] = "float32"
    """Stored recurrent states of linear attention and state-space layers; computed in float32 in any case."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Who is served first: who came first, or lower priority values before higher ones."""
    memory_policy: MemoryPolicy = "elastic"
    """"static": all experts resident. "fixed": each layer at its floor. "elastic": residency moves with the load."""
    gpu_memory_utilization: float = 0.92
    """Share of a GPU's memory that may be used in all; the pool gets what weights and the largest step leave of it."""
    page_pool_bytes: int | None = None
    """Bytes of the page pool. None: on a GPU by `gpu_memory_utilization`; else all experts and a few long requests, at
    most half of the free memory."""
    expert_offload_limit: int | Literal["auto"] = "auto"
    """Experts of a layer that may be away from the pool, at most."""
    loading_buffer_experts: int = 32
    """Experts of one loading-buffer set, at most; what does not fit is read from the host in place."""
    expert_prefetch: Prefetch = "auto"
    """Absent experts that a step copies into loading buffers ahead of their layer: all that these hold, none, or all
    if most of them will be chosen. The others are read from the host in place."""
    expert_cache_policy: CachePolicy = "online"
    """Which experts stay: by the profile, corrected by what requests choose ("online"); by the profile alone ("hotset");
    or the last used ("lru")."""
    expert_hotset_path: str | None = None
    """Profile written by `rimuru hotset record`. None: all experts count as equally likely."""
    adjuster_policy: AdjusterPolicy = "throughput"
    """How far "elastic" goes: "throughput" gives up experts as far as it pays, by what steps cost on the device; "watermark"
    for whoever needs pages. Without measured costs, as on a CPU, the first does as the second; its "auto" limit is higher."""
    expand_patience: int = 0
    """Passes with a surplus of pages before experts are taken back."""
    compile_ahead: bool | None = None
    """Compile all shapes of steps before serving, rather than when they first come. None: on a GPU."""
    verify_checkpoint: bool = True
    """Compare a packed checkpoint with its checksums while loading."""

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, it must be a positive integer")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can decode: raise it or lower max_num_seqs"
            )
        for name, wanted in (
            ("dtype", ("float32", "bfloat16")),
            ("mamba_ssm_cache_dtype", ("float32", "bfloat16")),
            ("scheduling_policy", ("fcfs", "priority")),
            ("expert_cache_policy", ("online", "hotset", "lru")),
            ("expert_prefetch", ("auto", "all", "none")),
            ("adjuster_policy", ("watermark", "throughput")),
        ):
            if getattr(self, name) not in wanted:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(map(repr, wanted))}"
                )
        if self.page_pool_bytes is not None and self.page_pool_bytes < 1:
            raise ValueError(f"page_pool_bytes is {self.page_pool_bytes}, it must be positive")
