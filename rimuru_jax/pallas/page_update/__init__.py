"""Writes into pages: new keys and values of a step, expert pages from host memory or from elsewhere in the pool."""

from rimuru_jax.pallas.page_update.api import load_pages, move_pages, write_kv

__all__ = ["load_pages", "move_pages", "write_kv"]
