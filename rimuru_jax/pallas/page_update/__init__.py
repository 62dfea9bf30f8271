"""Copies of whole pages into the pool, from host memory or from elsewhere in it."""

from rimuru_jax.pallas.page_update.api import load_pages, move_pages

__all__ = ["load_pages", "move_pages"]
