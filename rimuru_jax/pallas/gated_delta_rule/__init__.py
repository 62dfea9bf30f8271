"""The gated delta rule over packed tokens, whose states live in pages."""

from rimuru_jax.pallas.gated_delta_rule.api import gated_delta_rule

__all__ = ["gated_delta_rule"]
