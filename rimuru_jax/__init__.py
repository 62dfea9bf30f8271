"""rimuru_jax: Mixture-of-Experts models served from one page pool."""

from rimuru_jax.config import EngineConfig
from rimuru_jax.engine import Engine
from rimuru_jax.outputs import CompletionOutput, RequestOutput
from rimuru_jax.sampling_params import SamplingParams

__all__ = ["CompletionOutput", "Engine", "EngineConfig", "RequestOutput", "SamplingParams"]
