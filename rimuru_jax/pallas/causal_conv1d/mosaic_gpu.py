"""Causal convolution on Hopper: one Mosaic GPU kernel convolves the tokens, another does what needs a row's state.

A token at least `past = kernel - 1` tokens into its row sees tokens alone: `mosaic_tokens` serves all of these. The kernel
here overwrites the outputs of the first `past` tokens of each row and renews the states; rows of one token take it alone:

    block = (row, up to 1024 channels)   one warpgroup
    seen         s s s t t t            the old state and the first tokens: they give `past` outputs
    new state          ^ ^ ^            of a row of at most `past` tokens; else its last tokens

One block reads the old state of its channels and writes the new one, so no other can see half of each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from rimuru_jax.array_types import Pool
from rimuru_jax.pallas.causal_conv1d.mosaic_tokens import activate, convolve_tokens
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.ragged import update_in_place

LANES = 128
"""Channels are handled in runs of so many: one for each thread."""
BLOCK_RUNS = (8, 4, 2, 1)
"""Runs of a block, the first of these that fits: eight make the accesses of a thread 16 bytes wide."""
MOST_TAPS = 8


def refusal(x: Float[Array, "T c"], weight: Float[Array, "c kernel"], view: MemoryView) -> str | None:
    """Why these operands have no kernel, or None."""
    if x.dtype != view.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"inputs are {x.dtype} and pages {view.dtype}, but both must be bfloat16 or both float32"
    if x.shape[1] % LANES or view.stride % view.words:
        return (
            f"there are {x.shape[1]} channels in pages {view.stride} words apart, "
            f"but the first must be a multiple of {LANES} and the second of {view.words}"
        )
    if weight.shape[1] > MOST_TAPS:
        return f"the kernel has {weight.shape[1]} columns, but at most {MOST_TAPS} are unrolled"
    return None


def causal_conv1d(
    x: Float[Array, "T c"],
    weight: Float[Array, "c kernel"],
    bias: Float[Array, " c"] | None,
    pool: Pool,
    view: MemoryView,
    pages: Int32[Array, " S"],
    query_start: Int32[Array, " S+1"],
    has_state: Bool[Array, " S"],
    *,
    activation: str | None,
    max_query_len: int,
    interpret: Any = None,
) -> tuple[Float[Array, "T c"], Pool]:
    """The operator behind `api.causal_conv1d`, for operands without a `refusal`.

    `interpret`: an `InterpretGPUParams` runs the kernel on a CPU, slowly.
    """
    tokens, channels = x.shape
    bias = jnp.zeros(channels, jnp.float32) if bias is None else bias.astype(jnp.float32)
    taps = jnp.concatenate([weight.astype(jnp.float32).T, bias[None]])
    start, end = query_start[:-1], query_start[-1]
    rows = jnp.stack(
        [pages, start, query_start[1:] - start, has_state.astype(jnp.int32), jnp.full_like(start, end)]
    )
    x_runs, taps_runs = (values.reshape(-1, channels // LANES, LANES) for values in (x, taps))

    def kernel(states: Any) -> Array:
        out = None
        if max_query_len > 1:
            convolved = convolve_tokens(x, taps, end, activation=activation, interpret=interpret)
            out = jax.new_ref(convolved.reshape(x_runs.shape))
        decoded = _row_starts(
            out, states, rows, x_runs, taps_runs, activation=activation, interpret=interpret
        )
        return (decoded if out is None else jax.freeze(out)).reshape(tokens, channels)

    return update_in_place(pool, view, (channels // LANES, LANES), kernel)


def _row_starts(
    out: Any | None,
    states: Any,
    rows: Int32[Array, "5 S"],
    x: Float[Array, "T runs 128"],
    taps: Float32[Array, "taps runs 128"],
    *,
    activation: str | None,
    interpret: Any,
) -> Any:
    """Write the first outputs of each row to `out`, a Ref of `[T, runs, 128]`, and the new states to `states`.

    Without `out` rows have at most one token, and the outputs come back, zeros for padding. `states` is a Ref of
    `[pages, rows of a page, runs, 128]`; `rows` has (first page, first token, tokens, whether there is a state, tokens of
    all rows). The last of `taps` is the bias.
    """
    past = taps.shape[0] - 2
    is_decode = out is None
    firsts = 1 if is_decode else past  # tokens of a row that see its state, at most
    (tokens, runs, _), num_rows = x.shape, rows.shape[1]
    block_runs = next(n for n in BLOCK_RUNS if runs % n == 0)

    def body(
        rows,  # [5, S]
        x,  # [T, runs, 128]
        taps,  # [kernel + 1, runs, 128]
        states,  # [P, page rows, runs, 128]
        out,  # [T, runs, 128]
        seen,  # [past + firsts, block runs, 128]: the old state and the first tokens
        newest,  # [past, block runs, 128]: the last tokens of a longer row
        taps_smem,  # [kernel + 1, block runs, 128]
        o_smem,  # [firsts, block runs, 128]
        state_ready,
        taps_ready,
        x_ready,  # [firsts] barriers
        newest_ready,
    ):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        page, first, count, has_state = (rows[i, row] for i in range(4))
        own = pl.ds(part * block_runs, block_runs)

        def in_page(i):
            return states.at[page + i, 0, own]

        @pl.when(count > 0)
        def _():
            plgpu.copy_gmem_to_smem(taps.at[:, own], taps_smem, taps_ready)

            @pl.when(has_state == 1)
            def _():
                for i in range(past):
                    plgpu.copy_gmem_to_smem(in_page(i), seen.at[i], state_ready)

            for i in range(firsts):

                @pl.when(i < count)
                def _(i=i):
                    plgpu.copy_gmem_to_smem(x.at[first + i, own], seen.at[past + i], x_ready.at[i])

            @pl.when(count > past)
            def _():
                for i in range(past):
                    token = first + count - past + i
                    plgpu.copy_gmem_to_smem(x.at[token, own], newest.at[i], newest_ready)

            @pl.when(has_state == 0)
            def _():
                for i in range(past):
                    seen[i] = jnp.zeros(seen.shape[1:], seen.dtype)

            pl.when(has_state == 1)(lambda: plgpu.barrier_wait(state_ready))
            plgpu.barrier_wait(taps_ready)
            for i in range(firsts):

                @pl.when(i < count)
                def _(i=i):
                    plgpu.barrier_wait(x_ready.at[i])
                    total = taps_smem[past + 1]
                    for j in range(past + 1):  # in the order of `convolve_tokens`
                        total += seen[i + j].astype(jnp.float32) * taps_smem[j]
                    o_smem[i] = activate(total, activation).astype(o_smem.dtype)

            plgpu.commit_smem()
            for i in range(firsts):
                pl.when(i < count)(lambda i=i: plgpu.copy_smem_to_gmem(o_smem.at[i], out.at[first + i, own]))

            @pl.when(count > past)
            def _():
                plgpu.barrier_wait(newest_ready)
                for i in range(past):
                    plgpu.copy_smem_to_gmem(newest.at[i], in_page(i))

            @pl.when(count <= past)
            def _():
                for i in range(past):
                    plgpu.copy_smem_to_gmem(seen.at[count + i], in_page(i))

            plgpu.wait_smem_to_gmem(0)

        if is_decode:  # otherwise the outputs of padding are there

            @pl.loop(0, pl.cdiv(tokens, num_rows))
            def _(turn):
                token = row + turn * num_rows

                @pl.when((token >= rows[4, row]) & (token < tokens))
                def _():
                    o_smem[0] = jnp.zeros(o_smem.shape[1:], o_smem.dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(o_smem.at[0], out.at[token, own])
                    plgpu.wait_smem_to_gmem(0)

    block = (block_runs, LANES)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype) if is_decode else (),
        grid=(runs // block_runs, num_rows),
        grid_names=("part", "row"),
        scratch_types=[
            plgpu.SMEM((past + firsts, *block), x.dtype),
            plgpu.SMEM((past, *block), x.dtype),
            plgpu.SMEM((past + 2, *block), jnp.float32),
            plgpu.SMEM((firsts, *block), x.dtype),
            plgpu.Barrier(num_arrivals=past),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=firsts),
            plgpu.Barrier(num_arrivals=past),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(rows, x, taps, states, *(() if is_decode else (out,)))
