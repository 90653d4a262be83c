"""What Python cannot say: fetch a cache line early, set a bit or read a counter atomically."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.types.misc import CPointer
from numba.extending import intrinsic

from emberkeep.kernels._jit import inline

_BYTE = ir.IntType(8)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)


def _item_pointer(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    zeros = [context.get_constant(types.intp, 0)] * (array_type.ndim - 1)
    pointer = cgutils.get_item_pointer(
        context, builder, array_type, view, [at, *zeros], wraparound=False
    )
    return builder.bitcast(pointer, _BYTE.as_pointer())


@intrinsic
def _prefetch(typing_context: Any, array: Any, row: Any, byte: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.gep(pointer, [args[2]])
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT32, _INT32, _INT32]),
            "llvm.prefetch.p0",
        )
        builder.call(function, [pointer, _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@inline
def prefetch_row(array_RD: np.ndarray, row: int) -> None:
    """Asks for the first cache lines of a row of floats ahead of their use; changes nothing.

    Straight code, not a loop: LLVM unrolls the loop so far that it costs more than it saves. The
    processor itself follows a row that is longer than four lines.
    """
    columns = array_RD.shape[1]
    _prefetch(array_RD, row, 0)
    if columns > 16:
        _prefetch(array_RD, row, 64)
    if columns > 32:
        _prefetch(array_RD, row, 128)
        _prefetch(array_RD, row, 192)


@inline
def prefetch_bit(bits: np.ndarray, row: int) -> None:
    """Asks for the word of a bitmap that holds the bit of a row, ahead of its use."""
    _prefetch(bits, row >> 6, 0)


@intrinsic
def _atomic_or(typing_context: Any, bits: Any, word: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(pointer, _INT64.as_pointer())
        builder.atomic_rmw("or", pointer, args[2], "monotonic")
        return context.get_dummy_value()

    return types.void(bits, types.int64, types.uint64), generate


@intrinsic
def fetch_or(typing_context: Any, bits: Any, word: Any, value: Any) -> Any:
    """Sets bits of a word and returns what it was, in one step for all threads; what this thread
    did before is done for those who see the bits, and what it does after comes after."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _item_pointer(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(pointer, _INT64.as_pointer())
        return builder.atomic_rmw("or", pointer, args[2], "seq_cst")

    return types.uint64(bits, types.int64, types.uint64), generate


@inline
def set_bit(bits: np.ndarray, row: int) -> None:
    """Sets a bit; ranges of rows that share a word may be worked on by several threads."""
    word = row >> 6
    bit = np.uint64(1) << np.uint64(row & 63)
    # Most rows of a step were marked by an earlier one: reading is cheaper than a locked write.
    if not bits[word] & bit:
        _atomic_or(bits, word, bit)


@inline
def test_bit(bits: np.ndarray, row: int) -> bool:
    return (bits[row >> 6] >> np.uint64(row & 63)) & np.uint64(1) != np.uint64(0)


def _pointer(kind: Any) -> Any:
    def typed(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target = context.get_value_type(signature.return_type)
            return builder.inttoptr(args[0], target)

        return CPointer(kind)(types.int64), generate

    return typed


words_at = intrinsic(_pointer(types.uint32))
"""The 32-bit words at an address; the caller keeps the array."""
numbers_at = intrinsic(_pointer(types.int64))
"""The 64-bit numbers at an address; the caller keeps the array."""
