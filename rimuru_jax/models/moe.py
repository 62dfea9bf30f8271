"""Routed experts: where each token goes, what is loaded ahead of it, and the shared expert beside them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rimuru_jax.array_types import Hidden, Pool
from rimuru_jax.models.config import Moe
from rimuru_jax.models.context import LayerParams, StepContext
from rimuru_jax.models.layers import linear, mlp
from rimuru_jax.pallas.moe_routing import Scoring, route_and_group
from rimuru_jax.pallas.page_update import load_pages
from rimuru_jax.pallas.paged_moe import paged_moe, token_tile


@jax.named_scope("moe")
def moe(
    step: StepContext, layer: Moe, params: LayerParams, x: Hidden, pool: Pool, index: Array
) -> tuple[Hidden, Pool, tuple[Array, Array, Array]]:
    """MoE layer number `index`. Also returns its router counts, chosen experts and their weights."""
    pairs = x.shape[0] * layer.num_experts_per_tok
    scoring = Scoring(
        normalize=layer.normalize,
        function=layer.scoring,
        num_groups=layer.num_groups,
        top_groups=layer.top_groups,
        normalize_epsilon=layer.normalize_epsilon,
        scale=layer.scale,
    )
    chosen, weights, routing = route_and_group(
        linear(x, params["router"], params.get("router_bias"), jnp.float32),
        step.valid,
        layer.num_experts_per_tok,
        scoring,
        tile=token_tile(
            pairs,
            layer.num_experts,
            step.spec.expert_view,
            layer.matrices,
            from_host=step.spec.experts_on_host,
        ),
        selection_bias=params.get("selection_bias"),
    )
    biases = None
    if layer.expert_bias:
        biases = params["expert_gate_up_bias"], params["expert_down_bias"]
    mixed, pool = paged_moe(
        x,
        weights,
        routing,
        pool,
        step.spec.expert_view,
        step.host_pages,
        step.experts.pages,
        index,
        step.experts.loads,
        activation=layer.activation,
        biases=biases,
        swiglu_alpha=layer.swiglu_alpha,
        swiglu_limit=layer.swiglu_limit,
    )
    if layer.shared_intermediate_size:
        shared = mlp(x, params, "shared")
        if layer.shared_gate:
            gate = jax.nn.sigmoid(linear(x, params["shared_expert_gate"]).astype(jnp.float32))
            shared = (shared.astype(jnp.float32) * gate).astype(x.dtype)
        mixed = mixed + shared
    return mixed, pool, (routing.counts, chosen, weights)


def load_first_experts(step: StepContext, pool: Pool) -> Pool:
    """Fill the loading buffers of the first MoE layer; each layer fills those of the next."""
    sources, targets, counts, _ = step.experts.loads
    # Whole, not row 0 of them, with which they begin: a kernel on a cut operand is launched anew at every step.
    return load_pages(pool, step.host_pages, sources.reshape(-1), targets.reshape(-1), counts[0])
