"""Gated delta rule in plain jnp: the specification (`step`), and the path on a CPU.

Prefill runs in chunks. What a token adds to the state, u = beta (v - k^T S), depends on the tokens before it in its
chunk through S, which makes the u of a chunk the solution of one unit triangular system (the WY or UT form):

    u_i + sum_{j < i} beta_i decay_ij (k_i . k_j) u_j = beta_i (v_i - decay_i k_i^T S)

with S the state before the chunk, decay_ij the decay from token j to token i and decay_i that from the chunk's start.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.ragged import decays, scan_rows

EPSILON = 1e-6


def gated_delta_rule(
    q: Float[Array, "T Hk dk"],
    k: Float[Array, "T Hk dk"],
    v: Float[Array, "T Hv dv"],
    log_decay: Float32[Array, "T Hv"],
    beta: Float32[Array, "T Hv"],
    pool: Pool,
    view: MemoryView,
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    max_query_len: int,
) -> tuple[Float[Array, "T Hv dv"], Pool]:
    return scan_rows(
        step,
        chunk,
        (q, k, v, log_decay, beta),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        pool,
        view,
        pages,
        query_start,
        has_state,
        max_query_len=max_query_len,
    )


def step(
    states: Float32[Array, "n Hv dk dv"],
    q: Float[Array, "n Hk dk"],
    k: Float[Array, "n Hk dk"],
    v: Float[Array, "n Hv dv"],
    log_decay: Float32[Array, "n Hv"],
    beta: Float32[Array, "n Hv"],
) -> tuple[Float32[Array, "n Hv dk dv"], Float32[Array, "n Hv dv"]]:
    """One token of each of n rows."""
    q, k, v = _by_value_head(q, k, v)
    states = states * jnp.exp(log_decay)[:, :, None, None]
    added = (v - jnp.einsum("nhk,nhkv->nhv", k, states)) * beta[:, :, None]
    states = states + k[:, :, :, None] * added[:, :, None, :]
    return states, jnp.einsum("nhk,nhkv->nhv", q, states)


def chunk(
    state: Float32[Array, "Hv dk dv"],
    q: Float[Array, "c Hk dk"],
    k: Float[Array, "c Hk dk"],
    v: Float[Array, "c Hv dv"],
    log_decay: Float32[Array, "c Hv"],
    beta: Float32[Array, "c Hv"],
) -> tuple[Float32[Array, "Hv dk dv"], Float32[Array, "c Hv dv"]]:
    """c consecutive tokens of one row. An all-zero token has beta 0 and decay 1: it changes nothing."""
    q, k, v = _by_value_head(q, k, v)
    from_start, to_end, between = decays(log_decay)
    seen = jnp.einsum("chk,hkv->chv", k * from_start[:, :, None], state)
    wanted = ((v - seen) * beta[:, :, None]).transpose(1, 0, 2)
    overlap = jnp.einsum("ihk,jhk->hij", k, k) * between * beta.T[:, :, None]
    # The solver takes the diagonal as ones and looks at nothing above it.
    added = jax.lax.linalg.triangular_solve(
        overlap, wanted, left_side=True, lower=True, unit_diagonal=True
    )  # [Hv, c, dv]
    out = jnp.einsum("chk,hkv->chv", q * from_start[:, :, None], state)
    out = out + jnp.einsum("hij,hjv->ihv", jnp.einsum("ihk,jhk->hij", q, k) * between, added)
    state = state * from_start[-1][:, None, None]
    return state + jnp.einsum("jhk,hjv->hkv", k * to_end[:, :, None], added), out


def _by_value_head(
    q: Float[Array, "n Hk dk"], k: Float[Array, "n Hk dk"], v: Float[Array, "n Hv dv"]
) -> tuple[Float32[Array, "n Hv dk"], Float32[Array, "n Hv dk"], Float32[Array, "n Hv dv"]]:
    """q normalised and scaled, k normalised, both repeated for the value heads they serve; all in float32."""
    group = v.shape[1] // q.shape[1]
    q, k = unit(q) * q.shape[2] ** -0.5, unit(k)
    return jnp.repeat(q, group, axis=1), jnp.repeat(k, group, axis=1), v.astype(jnp.float32)


def unit(x: Float[Array, "n Hk dk"]) -> Float32[Array, "n Hk dk"]:
    return x.astype(jnp.float32) * inverse_norm(x)[..., None]


def inverse_norm(x: Float[Array, "*heads dk"]) -> Float32[Array, "*heads"]:
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(x * x, axis=-1) + EPSILON)
