"""What stands between the projection of queries, keys and values and attention: norms, rotation, and the cache."""

from rimuru_jax.pallas.qk_norm_rope_cache.api import HeadNorm, qk_norm_rope_cache

__all__ = ["HeadNorm", "qk_norm_rope_cache"]
