"""What an expert does between its first matrices and its last, for the reference and inside the kernel."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

type Activation = Callable[..., Array]
"""From the products of all matrices but the last, in float32."""

MATRICES = {"silu": 3, "clamped_swiglu": 3, "relu2": 2}
"""Matrices of an expert, by activation."""


def activation_named(name: str, swiglu_alpha: float = 1.702, swiglu_limit: float = 7.0) -> Activation:
    """The activation of one of MATRICES; only "clamped_swiglu" has the two numbers."""

    def silu(gate: Array, up: Array) -> Any:
        return gate / (1 + jnp.exp(-gate)) * up

    def clamped_swiglu(gate: Array, up: Array) -> Any:
        gate = jnp.minimum(gate, swiglu_limit)
        up = jnp.maximum(jnp.minimum(up, swiglu_limit), -swiglu_limit)
        return gate / (1 + jnp.exp(-swiglu_alpha * gate)) * (up + 1)

    def relu2(inner: Array) -> Any:
        positive = jnp.maximum(inner, 0)
        return positive * positive

    return {"silu": silu, "clamped_swiglu": clamped_swiglu, "relu2": relu2}[name]
