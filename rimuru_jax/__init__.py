"""rimuru_jax: Mixture-of-Experts models served from one page pool."""

from typing import TYPE_CHECKING, Any

from rimuru_jax.config import EngineConfig
from rimuru_jax.outputs import CompletionOutput, RequestOutput
from rimuru_jax.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from rimuru_jax.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # The engine brings JAX, which takes seconds to import: those who only plan or ask for help do not wait for it.
    if name == "Engine":
        from rimuru_jax.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
