"""From router logits to chosen experts, their weights, and the order in which their tokens are computed."""

from rimuru_jax.pallas.moe_routing.api import Routing, group_tokens, route, route_and_group
from rimuru_jax.pallas.moe_routing.scoring import Scoring

__all__ = ["Routing", "Scoring", "group_tokens", "route", "route_and_group"]
