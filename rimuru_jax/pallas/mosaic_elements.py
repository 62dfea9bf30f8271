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
    """`ref[index]` of a one-dimensional Ref; every index must be inside. `layout` is that of the index and the result."""
    if interpret:
        return _read_one_by_one(ref, index) if interpret.detect_races else ref[...][index]
    signed = mgpu.utils.is_signed(ref.dtype)

    def load(_, ref, index):
        start, kind, registers = _start(ref), ref.type.element_type, np.empty_like(index.registers)
        for i, register in np.ndenumerate(index.registers):
            value = llvm.load(kind, mgpu.utils.getelementptr(start, [_element(register)], kind))
            registers[i] = vector.broadcast(ir.VectorType.get((1,), kind), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=signed)

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout=layout),
    )(load)(ref, plgpu.layout_cast(index, layout))


def write(ref: Any, index: Any, values: Any, mask: Any, layout: Any, interpret: Any = None) -> None:
    """`ref[index] = values` where the mask holds; no place may be there twice."""
    if interpret:
        last = jnp.argsort(~mask.reshape(-1), stable=True)
        index, values = index.reshape(-1)[last], values.reshape(-1)[last]

        @pl.loop(0, jnp.sum(mask, dtype=jnp.int32))
        def _one(i):
            ref[index[i]] = values[i]

        return

    def store(_, ref, index, values, mask):
        start, kind = _start(ref), ref.type.element_type
        for i, register in np.ndenumerate(index.registers):
            branch = scf.IfOp(_element(mask.registers[i]))
            with ir.InsertionPoint(branch.then_block):
                place = mgpu.utils.getelementptr(start, [_element(register)], kind)
                llvm.store(_element(values.registers[i]), place)
                scf.yield_([])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, layout))(store)(
        ref, index, plgpu.layout_cast(values, layout), mask
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


def _read_one_by_one(ref: Any, index: Any) -> Any:
    flat = index.reshape(-1)
    order = jnp.argsort(flat)

    def one(i, carry):
        values, place, value = carry
        wanted = flat[order[i]]
        value = lax.cond(wanted == place, lambda: value, lambda: ref[wanted])
        return values.at[order[i]].set(value), wanted, value

    nothing = jnp.zeros(flat.shape, ref.dtype), jnp.int32(-1), jnp.zeros((), ref.dtype)
    return lax.fori_loop(0, flat.size, one, nothing)[0].reshape(index.shape)
