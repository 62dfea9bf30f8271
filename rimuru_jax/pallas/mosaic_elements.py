"""Reads and writes at computed places, element by element, for which Pallas has no words on a GPU.

On a card each is a few lines of Mosaic GPU: a thread loads or stores the elements of its registers. The interpreter runs
no such lines: there a read takes the whole Ref, and a write is a loop. With the race detector reads are loops as well,
so that it sees nothing but what is read.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector


def read(ref: Any, index: Any, layout: Any, interpret: Any = None) -> Any:
    """`ref[index]` of a one-dimensional Ref; every index must be inside. `layout` is that of the index and the result.

    Where it gives a thread several neighbours, their places must follow each other, the first at a multiple of their
    number: they are one access.
    """
    if interpret:
        return (
            _read_one_by_one(ref, index, _neighbours(layout)) if interpret.detect_races else ref[...][index]
        )
    signed = mgpu.utils.is_signed(ref.dtype)

    def load(_, ref, index):
        start, kind, registers = _start(ref), ref.type.element_type, np.empty_like(index.registers)
        for i, register in np.ndenumerate(index.registers):
            pointer = mgpu.utils.getelementptr(start, [_element(register)], kind)
            registers[i] = llvm.load(ir.VectorType.get(register.type.shape, kind), pointer)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=signed)

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout=layout),
    )(load)(ref, plgpu.layout_cast(index, layout))


def write(ref: Any, index: Any, values: Any, mask: Any, layout: Any, interpret: Any = None) -> None:
    """`ref[index] = values` where the mask holds; no place may be there twice.

    Neighbours of a thread as in `read`; the mask of the first is that of all. Of a Ref of pages `[P, words]`, whose
    elements int32 does not count, the index is a pair.
    """
    page, place = index if isinstance(index, tuple) else (None, index)
    if interpret:
        n = _neighbours(layout)
        mask = mask.reshape(-1)[::n]
        last = jnp.argsort(~mask, stable=True)
        place, values = place.reshape(-1)[::n][last], values.reshape(-1, n)[last]
        pages = () if page is None else (page.reshape(-1)[::n][last],)

        @pl.loop(0, jnp.sum(mask, dtype=jnp.int32))
        def _one(i):
            ref[(*(page[i] for page in pages), pl.ds(place[i], n))] = values[i]

        return

    def store(_, ref, place, values, mask, page=None):
        start, kind = _start(ref), ref.type.element_type
        int64 = ir.IntegerType.get_signless(64)
        for i, register in np.ndenumerate(place.registers):
            branch = scf.IfOp(_element(mask.registers[i]))
            with ir.InsertionPoint(branch.then_block):
                pointer = start
                if page is not None:
                    words = mgpu.utils.c(ref.type.shape[1], int64)
                    first = arith.muli(arith.extsi(int64, _element(page.registers[i])), words)
                    pointer = mgpu.utils.getelementptr(pointer, [first], kind)
                llvm.store(values.registers[i], mgpu.utils.getelementptr(pointer, [_element(register)], kind))
                scf.yield_([])

    pages = () if page is None else (plgpu.layout_cast(page, layout),)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(layout for _ in range(3 + len(pages)))))(store)(
        ref, plgpu.layout_cast(place, layout), plgpu.layout_cast(values, layout), mask, *pages
    )


def sums_in_warps(x: Any, layout: Any, interpret: Any = None) -> Any:
    """`[n]` of int32, n a multiple of 32: the inclusive prefix sums of each 32 neighbours, which `layout` gives to a warp."""
    if interpret:
        return jnp.cumsum(x.reshape(-1, 32), axis=1).reshape(-1)

    def shuffle(_, x):
        int32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(32, int32))
        everyone, first = mgpu.utils.c(-1, int32), mgpu.utils.c(0, int32)
        registers = np.empty_like(x.registers)
        for i, register in np.ndenumerate(x.registers):
            value = _element(register)
            for distance in (1, 2, 4, 8, 16):
                step = mgpu.utils.c(distance, int32)
                other = nvvm.shfl_sync(everyone, value, step, first, nvvm.ShflKind.up)
                has_other = arith.cmpi(arith.CmpIPredicate.uge, lane, step)
                value = arith.select(has_other, arith.addi(value, other), value)
            registers[i] = vector.broadcast(register.type, value)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)

    result = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.int32), layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(shuffle)(x)


def _element(register: ir.Value) -> ir.Value:
    return vector.extract(register, [], [0])


def _start(ref: ir.Value) -> ir.Value:
    """Address of a Ref's first element.

    LLVM knows dynamic shared memory as an array of no elements, and takes accesses that an object has no room for to
    concern different memory: it moved loads past stores to the same address. Hence the empty instruction, past which
    it does not know what an address points to.
    """
    pointer = mgpu.utils.memref_ptr(ref)
    if not mgpu.utils.is_smem_ref(ref):
        return pointer
    integer = ir.IntegerType.get_signless(64)
    address = llvm.inline_asm(
        integer, [llvm.ptrtoint(integer, pointer)], "mov.b64 $0, $1;", "=l,l", has_side_effects=True
    )
    return llvm.inttoptr(pointer.type, address)


def _neighbours(layout: Any) -> int:
    """Elements next to each other that a thread has together."""
    return layout.to_mgpu().vector_length


def _read_one_by_one(ref: Any, index: Any, neighbours: int) -> Any:
    """Each place is read once, `neighbours` together, whoever reads it."""
    starts = index.reshape(-1)[::neighbours]
    order = jnp.argsort(starts)

    def one(i, carry):
        values, place, value = carry
        wanted = starts[order[i]]
        value = lax.cond(wanted == place, lambda: value, lambda: ref[pl.ds(wanted, neighbours)])
        return values.at[order[i]].set(value), wanted, value

    shape = starts.size, neighbours
    nothing = jnp.zeros(shape, ref.dtype), jnp.int32(-1), jnp.zeros(shape[1:], ref.dtype)
    return lax.fori_loop(0, starts.size, one, nothing)[0].reshape(index.shape)
