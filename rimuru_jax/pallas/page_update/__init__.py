"""Writes into pages: new keys and values of a step, expert pages from host memory."""

from rimuru_jax.pallas.page_update.api import load_pages, write_kv

__all__ = ["load_pages", "write_kv"]
