"""Routed experts whose weights are pages, in the pool or in host memory."""

from rimuru_jax.pallas.paged_moe.api import paged_moe, token_tile

__all__ = ["paged_moe", "token_tile"]
