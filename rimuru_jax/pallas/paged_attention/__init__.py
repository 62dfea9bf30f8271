"""Attention of packed query tokens over paged keys and values."""

from rimuru_jax.pallas.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
