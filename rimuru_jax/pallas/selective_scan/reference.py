"""Selective scan in plain jnp: the specification (`step`), and the path on a CPU.

Prefill runs in chunks (the SSD form): inside a chunk the recurrence is attention with scores (C_i . B_j) decay_ij dt_j,
and between chunks it is the state.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.ragged import decays, scan_rows


def selective_scan(
    x: Float[Array, "T nh p"],
    dt: Float32[Array, "T nh"],
    A: Float32[Array, " nh"],
    B: Float[Array, "T g n"],
    C: Float[Array, "T g n"],
    D: Float[Array, " nh"],
    pool: Pool,
    view: MemoryView,
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    max_query_len: int,
) -> tuple[Float[Array, "T nh p"], Pool]:
    heads, groups = x.shape[1], B.shape[1]
    D = D.astype(jnp.float32)

    def step(states, x, dt, B, C):
        """One token of each of r rows: states `[r, nh, p, n]`."""
        x, B, C = x.astype(jnp.float32), _by_head(B, heads), _by_head(C, heads)
        states = states * jnp.exp(dt * A[None, :])[:, :, None, None]
        states = states + (dt[:, :, None] * x)[:, :, :, None] * B[:, :, None, :]
        return states, jnp.einsum("rhpn,rhn->rhp", states, C) + D[None, :, None] * x

    def chunk(state, x, dt, B, C):
        """c consecutive tokens of one row: state `[nh, p, n]`. An all-zero token has dt 0: it changes nothing."""
        x = x.astype(jnp.float32)
        from_start, to_end, between = decays(dt * A[None, :])
        pairs = jnp.einsum("ign,jgn->gij", C.astype(jnp.float32), B.astype(jnp.float32))
        scores = jnp.repeat(pairs, heads // groups, axis=0) * between
        B, C, inputs = _by_head(B, heads), _by_head(C, heads), dt[:, :, None] * x
        out = jnp.einsum("hij,jhp->ihp", scores, inputs) + D[None, :, None] * x
        out = out + jnp.einsum("chn,hpn->chp", C * from_start[:, :, None], state)
        state = state * from_start[-1][:, None, None]
        return state + jnp.einsum("jhp,jhn->hpn", inputs * to_end[:, :, None], B), out

    return scan_rows(
        step,
        chunk,
        (x, dt, B, C),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        pool,
        view,
        pages,
        query_start,
        has_state,
        max_query_len=max_query_len,
    )


def _by_head(values: Float[Array, "c g n"], heads: int) -> Float32[Array, "c nh n"]:
    return jnp.repeat(values.astype(jnp.float32), heads // values.shape[1], axis=1)
