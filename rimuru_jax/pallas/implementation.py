"""Which implementation of an operator runs."""

from typing import Literal

import jax

type Implementation = Literal["reference", "mosaic_gpu"]


def resolve(operator: str, implementation: Implementation | None, available: tuple[str, ...]) -> str:
    """The implementation to run: the named one, else the best that this device and operator have.

    Raises ValueError when a named implementation does not exist for `operator` or cannot run on this device.
    """
    if implementation is None:
        return "mosaic_gpu" if "mosaic_gpu" in available and jax.default_backend() == "gpu" else "reference"
    if implementation not in available:
        raise ValueError(
            f"{operator} has no implementation {implementation!r}; it has {', '.join(available)}"
        )
    return implementation
