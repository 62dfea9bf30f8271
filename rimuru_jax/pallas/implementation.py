"""Which implementation of an operator runs."""

import functools
import logging
from typing import Literal

import jax

type Implementation = Literal["reference", "mosaic_gpu"]

HOPPER = "9.0"
"""The compute capability whose matrix instructions the Mosaic kernels use."""


@functools.cache
def device_refusal() -> str | None:
    """Why the default device runs no Mosaic kernel, or None; says so once if it is a GPU."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs a GPU, but this device is a {device.platform}"
    capability = device.compute_capability
    if capability != HOPPER:
        reason = f"it needs a GPU of compute capability {HOPPER}, but {device.device_kind} has {capability}"
        logging.getLogger(__name__).warning(
            "the reference operators run instead of the GPU kernels: %s", reason
        )
        return reason
    return None


def resolve(
    operator: str,
    implementation: Implementation | None,
    available: tuple[str, ...],
    *,
    refusal: str | None = None,
) -> str:
    """The implementation to run: the named one, else the best that this device and operator have.

    `refusal` says why the operands have no Mosaic kernel. Raises ValueError when a named implementation does not
    exist for `operator`, or cannot run on this device or these operands.
    """
    if implementation is None:
        if "mosaic_gpu" in available and refusal is None and device_refusal() is None:
            return "mosaic_gpu"
        return "reference"
    if implementation not in available:
        raise ValueError(
            f"{operator} has no implementation {implementation!r}; it has {', '.join(available)}"
        )
    if implementation == "mosaic_gpu" and (reason := device_refusal() or refusal):
        raise ValueError(f"{operator} cannot run as 'mosaic_gpu': {reason}")
    return implementation
