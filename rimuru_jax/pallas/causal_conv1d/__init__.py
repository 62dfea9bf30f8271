"""Short causal convolutions over packed tokens, whose last inputs live in pages."""

from rimuru_jax.pallas.causal_conv1d.api import causal_conv1d

__all__ = ["causal_conv1d"]
