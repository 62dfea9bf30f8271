"""Routed experts over pages on Hopper GPUs (Mosaic GPU).

Two launches of one persistent kernel between two small XLA fusions:

    hidden [T, d] --gather--> x [rows, d] --gate/up, SiLU--> h [rows, f] --down--> y [rows, d] --weighted sum--> [T, d]

Rows are the (token, expert) pairs sorted by expert, each expert's share padded to whole tiles. A work item is one tile
of tokens times one block of weight rows; block b of the grid takes items b, b + blocks, ... In a block one warpgroup
fetches: it walks through the k steps of all its items and keeps `stages` of them in flight, across items, so that
memory does not wait for epilogues. The other warpgroups multiply:

    fetching     | w(0) x(0) | w(1) x(1) | ...      slots of shared memory, `full` when they have arrived,
    multiplying  |           | w(0) x(0) | ...      `empty` once every multiplying warpgroup has read them

Where a page lies, in the pool or in page-locked host memory, only the fetching warpgroup sees. The products and their
order stay the same, hence the bits.

With page loads the first blocks of both grids take no items: they copy host pages into pool pages, through the same
Ref of the pool that the others read their weights from. The loads are shared out between the launches as the weights
are, so that neither waits for its loads while the other has none.

Few tokens per expert: the weights are the M side of wgmma (64 rows per warpgroup), the tokens its N side, and the
result is turned on its way to shared memory. Many: the tokens are the M side, and a warpgroup whose rows only fill
the tile skips its products. A result is stored while the first products of the next item run.

Rows of a product do not depend on each other, and rows that only fill a tile are never read in the end: they hold
whatever the gather finds, which may be NaN. Tiles past `num_tiles` cost nothing but their share of the gather.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from rimuru_jax.array_types import Hidden, HostPages, Pool
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.moe_routing import Routing
from rimuru_jax.pallas.page_loads import PageLoads
from rimuru_jax.pallas.paged_moe.activations import Activation
from rimuru_jax.pallas.paged_moe.tuning import ExpertShape, tuned

TILES = (8, 16, 32, 64, 128, 256)
"""Token tiles the kernel has a form for. The last is for experts in host memory, whose weights cross PCIe once for each
tile: with it half as often, for products that are slower."""

TOKENS_FIRST = 128
"""From this tile on the tokens are the M side, not the weights."""

GRANULE = 64
"""Rows of the M side of one wgmma; also what widths must be multiples of."""

WGMMA_COLUMNS = 256
"""The most columns of the N side; with larger tiles fewer fit a warpgroup's registers."""

STORE = 64
"""Columns staged at a time: rows of 128 bytes, the widest swizzle."""

STEP_BYTES = 48 * 1024
"""A k step copies at most this much: long rows suit memory, four steps in flight fit shared memory."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory a block may use."""

FETCH_REGISTERS = 32
"""Of a thread of the warpgroup that only copies."""

FULL_TILE = 0.75
"""Mean tokens of an expert, as a share of a tile, beyond which many experts need a second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Tile sizes of one launch."""

    weights_first: bool
    """The weights, not the tokens, are the M side of the products."""
    block: int
    """Weight rows of a work item, of each matrix."""
    depth: int
    """Elements of the contracted axis per k step."""
    stages: int
    """k steps in flight."""
    warpgroups: int
    """Multiplying warpgroups: they share the M side, 64 rows each."""
    store: int
    """Columns of the result that a warpgroup stages in shared memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one call of `paged_moe` is computed."""

    gate_up: Launch
    down: Launch
    blocks: int
    """Blocks of either grid, at most one for each multiprocessor."""


def token_tile(pairs: int, num_experts: int, *, from_host: bool = False) -> int:
    """Rows of a tile: twice the mean number of tokens per expert, so that most experts are read for one tile only.

    `from_host`: many experts are read from host memory in place.
    """
    mean = max(1, pairs // num_experts)
    # The last tile is mostly empty rows where an expert's tokens would fit the one before.
    largest = TILES[-1] if from_host and mean > FULL_TILE * TILES[-2] else TILES[-2]
    return min(largest, max(TILES[0], 1 << (2 * mean - 1).bit_length()))


def multiply_registers(warpgroups: int) -> int:
    """Registers of a thread of each multiplying warpgroup, once the one that copies has given up all but its own.

    A block has what it started with, the same number for all threads and a multiple of 8; asking for more waits for ever.
    """
    at_start = 65536 // (128 * (warpgroups + 1)) // 8 * 8
    return min(248, (at_start * (warpgroups + 1) - FETCH_REGISTERS) // warpgroups // 8 * 8)


def refusal(view: MemoryView, hidden_dtype: jnp.dtype, tile: int, host_words: int) -> str | None:
    """Why these operands have no kernel, or None."""
    f, d = view.page_shape
    if view.dtype != jnp.bfloat16 or hidden_dtype != jnp.bfloat16:
        return f"weights are {view.dtype} and hidden states {hidden_dtype}, but bfloat16 is wanted"
    if f % GRANULE or d % GRANULE:
        return f"expert matrices are {f} x {d}, but multiples of {GRANULE} are wanted"
    if any(words % row for words in (view.stride, host_words) for row in (f, d)):
        return f"pages of {view.stride} and {host_words} words are no multiples of rows of {f} and {d}"
    if tile not in TILES:
        return f"tiles have {tile} tokens, but one of {', '.join(map(str, TILES))} is wanted"
    return None


def config_for(tile: int, pairs: int, experts: ExpertShape, multiprocessors: int) -> Config:
    """The sizes that were measured to be best, if they are of this tile, else those that `choose_config` thinks of."""
    sizes = tuned(experts, pairs)
    if sizes is None or sizes["tile"] != tile:
        return choose_config(tile, experts.f, experts.d, multiprocessors, inner=experts.matrices - 1)
    return Config(gate_up=Launch(**sizes["gate_up"]), down=Launch(**sizes["down"]), blocks=multiprocessors)


def choose_config(tile: int, f: int, d: int, multiprocessors: int, *, inner: int = 2) -> Config:
    """A good configuration for tiles of `tile` tokens of experts of `f` x `d` with `inner` matrices before the last."""

    def launch(matrices: int, width: int, contracted: int) -> Launch:
        weights_first = tile < TOKENS_FIRST
        if weights_first:
            warpgroups, block = 1, GRANULE
        else:
            warpgroups = tile // GRANULE
            columns = WGMMA_COLUMNS * TOKENS_FIRST // tile
            block = next(b for b in (256, 128, 64) if width % b == 0 and matrices * b <= columns)
        row_bytes = (matrices * block + tile) * 2
        depth = next(k for k in (256, 128, 64) if contracted % k == 0 and k * row_bytes <= STEP_BYTES)
        result_bytes = tile * min(block, 2 * STORE) * 2
        return Launch(
            weights_first=weights_first,
            block=block,
            depth=depth,
            stages=min(8, (SHARED_MEMORY - result_bytes - 1024) // (depth * row_bytes)),
            warpgroups=warpgroups,
            store=STORE,
        )

    return Config(gate_up=launch(inner, f, d), down=launch(1, d, f), blocks=multiprocessors)


def paged_moe(
    hidden: Hidden,
    weights: Float[Array, "T K"],
    routing: Routing,
    pool: Pool,
    view: MemoryView,
    host_pages: HostPages,
    table: Int32[Array, "L E M"],
    layer: Int32[Array, ""],
    loads: PageLoads | None = None,
    *,
    activation: Activation,
    biases: tuple[Float[Array, "E 2 f"], Float[Array, "E d"]] | None = None,
    config: Config | None = None,
    contiguous: bool = False,
) -> tuple[Hidden, Pool]:
    """See `paged_moe.paged_moe`; `contiguous` as in `_grouped_product`."""
    f, d = view.page_shape
    tokens, rows, inner = hidden.shape[0], routing.row_tokens.shape[0], table.shape[2] - 1
    tile = rows // routing.tile_experts.shape[0]
    if config is None:
        experts = ExpertShape.of(view, table.shape[1], table.shape[2])
        config = config_for(tile, weights.size, experts, getattr(jax.devices()[0], "core_count", 132))

    def pages(words: Array, shape: tuple[int, int], stride: int) -> Array:
        return MemoryView(kind=view.kind, page_shape=shape, dtype=view.dtype, stride=stride).typed(words)

    def product(x, pool, matrices, shape, launch, activation, bias) -> tuple[Array, Pool]:
        # A kernel that writes into the pool gets a Ref of it; one that only reads gets the array.
        target: Any = pages(pool, shape, view.stride)
        if loads is not None:
            target = jax.new_ref(target)
        out = _grouped_product(
            x,
            routing,
            target,
            pages(host_pages, shape, host_pages.shape[1]),
            table,
            layer,
            loads,
            bias,
            matrices=matrices,
            activation=activation,
            width=shape[0],
            launch=launch,
            blocks=config.blocks,
            contiguous=contiguous,
        )
        return out, pool if loads is None else view.untyped(jax.freeze(target), pool.shape[1])

    pair_rows = routing.pair_rows
    if tokens <= tile:
        # Every tile has all tokens, each in its own row, those that did not choose the expert too: nothing to gather.
        x = jnp.pad(hidden, ((0, tile - tokens), (0, 0)))
        own = pair_rows // tile * tile + jnp.arange(tokens, dtype=jnp.int32)[:, None]
        pair_rows = jnp.where(pair_rows < rows, own, rows)
    else:
        x = hidden.at[routing.row_tokens].get(mode="clip")
    gate_up, down = (None, None) if biases is None else (biases[0], biases[1][:, None])
    h, pool = product(x, pool, range(inner), (f, d), config.gate_up, activation, gate_up)
    y, pool = product(h, pool, range(inner, inner + 1), (d, f), config.down, None, down)

    # One choice after the other: a token's sum never depends on where weights are or who else is there. Padding tokens
    # have no row, and their weights may be anything.
    mixed = jnp.zeros(hidden.shape, jnp.float32)
    for k in range(weights.shape[1]):
        row = pair_rows[:, k]
        part = weights[:, k, None] * y.at[row].get(mode="clip").astype(jnp.float32)
        mixed += jnp.where((row < rows)[:, None], part, 0)
    return mixed.astype(hidden.dtype), pool


def _grouped_product(
    x: Float[Array, "_ k"],
    routing: Routing,
    pool: Any,
    host: Float[Array, "host_pages host_rows k"],
    table: Int32[Array, "L E M"],
    layer: Int32[Array, ""],
    loads: PageLoads | None,
    bias: Float[Array, "E N width"] | None,
    *,
    matrices: range,
    activation: Activation | None,
    width: int,
    launch: Launch,
    blocks: int,
    contiguous: bool = False,
) -> Float[Array, "rows width"]:
    """`x @ w^T` with the matrix of each tile's expert, or an activation of such products.

    `x` has a row for each of the routing's, or those of one tile, which all tiles then share.
    `pool` is `[pages, page rows, k]`, a Ref of it if there are loads. Pages hold `width` rows of weights, and possibly
    more that are padding. `contiguous` is for measurements: a kernel that knows no table and finds every page in
    `host`, in order.
    """
    contracted = x.shape[1]
    rows, tiles = routing.row_tokens.shape[0], routing.tile_experts.shape[0]
    tile = rows // tiles
    shared = x.shape[0] < rows
    tokens, (_, experts, matrices_per_expert) = routing.pair_rows.shape[0], table.shape
    warpgroups, stages, depth, block = launch.warpgroups, launch.stages, launch.depth, launch.block
    column_blocks, k_steps = width // block, contracted // depth
    # What one warpgroup computes. With the tokens first all matrices are the N side of one product: each product reads
    # its M side from shared memory again, whose bandwidth is what limits them.
    if launch.weights_first:
        part_rows, part_cols = tile, block // warpgroups
        accumulators = [plgpu.WGMMAAccumulatorRef((part_cols, part_rows))] * len(matrices)
    else:
        part_rows, part_cols = tile // warpgroups, block
        accumulators = [plgpu.WGMMAAccumulatorRef((part_rows, len(matrices) * part_cols))]
    slots = min(2, part_cols // launch.store)

    def slot(turn):
        return lax.rem(turn, jnp.int32(stages))

    operands = {
        "tile_experts": routing.tile_experts,  # [tiles]
        "row_tokens": routing.row_tokens,  # [rows]
        "num_tiles": routing.num_tiles.reshape(1),
        "table": table,  # [L, E, M]
        "layer": layer.reshape(1),
        "x": x,  # [rows or tile, k]
        "pool": pool,  # [pages, page rows, k]
        "host": host,  # [host pages, host rows, k]
    }
    if bias is not None:
        operands["bias"] = bias  # [E, N, width]
    if loads is not None:
        operands |= loads._replace(blocks=loads.blocks.reshape(1))._asdict()

    def body(
        ref,  # of each operand
        out,  # [rows, width]
        w_smem,  # [stages, matrices * block, depth]
        x_smem,  # [stages, tile, depth]
        out_smem,  # [warpgroups, slots, part rows, store]
        full,  # [stages] barriers: one arrival per copy
        empty,  # [stages] barriers: one arrival per multiplying warpgroup
        loaded,  # [stages] barriers: one arrival per part of a page that is loaded
    ):
        grid_index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        layer = ref["layer"][0]
        loaders = count = jnp.int32(0)
        if loads is not None:
            count = ref["counts"][layer + 1]
            loaders = jnp.where(count > 0, jnp.minimum(ref["blocks"][0], blocks - 1), 0)
        # A loading block gets a number below zero here, and no items.
        block_index, workers = grid_index - loaders, blocks - loaders
        items = jnp.where(block_index >= 0, ref["num_tiles"][0] * column_blocks, block_index)
        mine = lax.div(items - block_index + (workers - 1), workers)

        def item(i):
            """Token tile and column block of the i-th item of this block."""
            index = block_index + i * workers
            return lax.div(index, jnp.int32(column_blocks)), lax.rem(index, jnp.int32(column_blocks))

        def expert_of(i):
            """Expert of the i-th item; past the last one any that can be read."""
            tile_index = jnp.clip(item(i)[0], 0, tiles - 1)
            return jnp.minimum(ref["tile_experts"][tile_index], experts - 1)

        def load_pages():
            """This loading block's share of the pages that this launch loads: parts of `block` rows, `depth` wide."""
            share = lax.div(count * matrices.start, jnp.int32(matrices_per_expert))
            end = lax.div(count * matrices.stop, jnp.int32(matrices_per_expert))
            per_page = column_blocks * k_steps
            parts = lax.div((end - share) * per_page - grid_index + (loaders - 1), loaders)
            ahead = max(1, stages - 2)

            def part(i, pages):
                """Where the i-th part of this block is in the pages that `pages` lists."""
                index = grid_index + i * loaders
                page, rest = share + lax.div(index, jnp.int32(per_page)), lax.rem(index, jnp.int32(per_page))
                row, column = lax.div(rest, jnp.int32(k_steps)), lax.rem(rest, jnp.int32(k_steps))
                return pages[layer + 1, page], pl.ds(row * block, block), pl.ds(column * depth, depth)

            def staged(i):
                return w_smem.at[slot(i), pl.ds(0, block)]

            @pl.loop(0, parts + ahead)
            def _turn(i):
                @pl.when(i < parts)
                def _():
                    plgpu.wait_smem_to_gmem(stages - 1 - ahead, wait_read_only=True)  # this slot's last part
                    source = ref["host"].at[part(i, ref["sources"])]
                    plgpu.copy_gmem_to_smem(source, staged(i), loaded.at[slot(i)])

                @pl.when(i >= ahead)
                def _():
                    plgpu.barrier_wait(loaded.at[slot(i - ahead)])
                    plgpu.copy_smem_to_gmem(
                        staged(i - ahead), ref["pool"].at[part(i - ahead, ref["targets"])]
                    )

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            if loads is not None:
                pl.when(block_index < 0)(load_pages)

            def wait_for_slot(turn):
                @pl.when(turn >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot(turn)])

            def places(i):
                """Where the matrices of item i are: a page of the pool, or -1 - a page of the host."""
                expert = expert_of(i)
                found = []
                for m in matrices:
                    place = -1 - ((layer * experts + expert) * matrices_per_expert + m)
                    if not contiguous:
                        page = ref["table"][layer, expert, m]
                        place = jnp.where(page >= 0, page, place)
                    found.append(place)
                return found

            def fetch(i, carry):
                turn, here_places = carry
                next_places = places(i + 1)  # read an item ahead: two loads, one after the other
                item_tile, column_block = item(i)
                x_rows = pl.ds(0 if shared else item_tile * tile, tile)
                w_rows = pl.ds(column_block * block, block)

                def step(k, turn):
                    wait_for_slot(turn)
                    here, columns = slot(turn), pl.ds(k * depth, depth)

                    def copy(source, target):
                        plgpu.copy_gmem_to_smem(source, target.at[here], full.at[here])

                    def copy_weights(place, target):
                        def from_host():
                            copy(ref["host"].at[-1 - place, w_rows, columns], target)

                        if contiguous:
                            from_host()
                        else:
                            pl.when(place >= 0)(lambda: copy(ref["pool"].at[place, w_rows, columns], target))
                            pl.when(place < 0)(from_host)

                    for j, place in enumerate(here_places):
                        copy_weights(place, w_smem.at[:, pl.ds(j * block, block)])
                    copy(ref["x"].at[x_rows, columns], x_smem)
                    return turn + 1

                return lax.fori_loop(0, k_steps, step, turn), next_places

            turns, _ = lax.fori_loop(jnp.int32(0), mine, fetch, (jnp.int32(0), places(0)))
            pl.loop(turns, turns + stages)(wait_for_slot)  # every phase of a barrier is waited for

        @pl.when(warpgroup < warpgroups)
        def _multiply():
            plgpu.set_max_registers(multiply_registers(warpgroups), action="increase")

            def sides(here, j):
                if launch.weights_first:
                    part = pl.ds(j * block + warpgroup * part_cols, part_cols)
                    return w_smem.at[here, part], x_smem.at[here].transpose((1, 0))
                part = pl.ds(warpgroup * part_rows, part_rows)
                return x_smem.at[here, part], w_smem.at[here].transpose((1, 0))

            def first_of_part(i):
                """Row and column of `out` where this warpgroup's part of item i begins."""
                item_tile, column_block = item(i)
                row, col = item_tile * tile, column_block * block
                if launch.weights_first:
                    return row, col + warpgroup * part_cols
                return row + warpgroup * part_rows, col

            def has_tokens(i):
                # Tiles are filled from the first row on, so the first row of a part tells of all.
                row = jnp.minimum(first_of_part(i)[0], rows - 1)
                return jnp.where(ref["row_tokens"][row] < tokens, 1, 0)

            def results(i, values):
                """What item i gives, from its products."""
                if not launch.weights_first:
                    values = [values[0][:, j * block : (j + 1) * block] for j in range(len(matrices))]
                if bias is not None:
                    expert, first_col = expert_of(i), first_of_part(i)[1]
                    for j, value in enumerate(values):
                        part = ref["bias"].at[expert, j, pl.ds(first_col, part_cols)]
                        part = plgpu.load(part, optimized=False).astype(jnp.float32)
                        axis = 0 if launch.weights_first else 1
                        values[j] = value + lax.broadcast_in_dim(part, value.shape, (axis,))
                return values[0] if activation is None else activation(*values)

            def store(result, first_row, first_col):
                for i, col in enumerate(range(0, part_cols, launch.store)):
                    staged = out_smem.at[warpgroup, i % slots]
                    # What this slot held may still be on its way out.
                    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                    if launch.weights_first:
                        staged.transpose((1, 0))[...] = result
                    else:
                        staged[...] = result[:, col : col + launch.store]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        staged, out.at[pl.ds(first_row, part_rows), pl.ds(first_col + col, launch.store)]
                    )

            def multiply(i, carry):
                # `result` is the part of the item before, if it is `waiting`: it is stored while the first products of
                # this item run. `live`: some row of this part has a token.
                turn, live, waiting, result = carry
                live_next = has_tokens(i + 1)  # read an item ahead

                def store_result():
                    store(result, *first_of_part(i - 1))

                def products(*accumulators):
                    @pl.loop(0, live * k_steps)
                    def _step(k):
                        here = slot(turn + k)
                        plgpu.barrier_wait(full.at[here])
                        for j, acc in enumerate(accumulators):
                            plgpu.wgmma(acc, *sides(here, j))
                        pl.when((k == min(1, k_steps - 1)) & (waiting == 1))(store_result)
                        plgpu.wgmma_wait(len(accumulators))  # all but this step's products are done

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[slot(turn + k - 1)])

                    return [acc[...] for acc in accumulators]

                values = pl.run_scoped(products, *accumulators)
                pl.when(live == 1)(lambda: plgpu.barrier_arrive(empty.at[slot(turn + (k_steps - 1))]))

                @pl.when(live == 0)
                def _skip():
                    pl.when(waiting == 1)(store_result)

                    @pl.loop(0, k_steps)
                    def _step(k):
                        here = slot(turn + k)
                        plgpu.barrier_wait(full.at[here])
                        plgpu.barrier_arrive(empty.at[here])

                return turn + k_steps, live_next, live, results(i, values).astype(out.dtype)

            nothing = jnp.zeros(
                (*accumulators[0].shape[:1], part_rows if launch.weights_first else part_cols), out.dtype
            )
            start = (jnp.int32(0), has_tokens(0), jnp.int32(0), nothing)
            _, _, waiting, result = lax.fori_loop(jnp.int32(0), mine, multiply, start)
            pl.when(waiting == 1)(lambda: store(result, *first_of_part(mine - 1)))
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        lambda *refs: body(dict(zip(operands, refs, strict=False)), *refs[len(operands) :]),
        out_type=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages, len(matrices) * block, depth), x.dtype),
            plgpu.SMEM((stages, tile, depth), x.dtype),
            plgpu.SMEM((warpgroups, slots, part_rows, launch.store), x.dtype),
            plgpu.Barrier(num_arrivals=len(matrices) + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )
    return kernel(*operands.values())
