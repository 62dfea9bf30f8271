"""The selective scan of Mamba-2 over packed tokens, whose states live in pages."""

from rimuru_jax.pallas.selective_scan.api import selective_scan

__all__ = ["selective_scan"]
