"""Copies and sums of whole rows of 32-bit words, eight words at a time.

As in `_lanes`: rows are short, so the loop is written as it should come out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_LANES = 8
_WORD = ir.IntType(32)
_VECTOR = ir.VectorType(_WORD, _LANES)
_INDEX = ir.IntType(64)

Combine = Callable[[Any, Any, Any], Any]


def _at(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any) -> Any:
    view = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, view, [row, column], wraparound=False)


def _operation(out: Any, rows: Any, combine: Combine) -> Any:
    """(out, its row, its column, rows, row): every word of the row meets one of `out`."""
    signature = types.void(out, types.int64, types.int64, rows, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = context.get_constant(types.intp, 0)
        target = _at(context, builder, signature.args[0], args[0], args[1], args[2])
        source = _at(context, builder, signature.args[3], args[3], args[4], zero)
        view = context.make_array(signature.args[3])(context, builder, args[3])
        width = cgutils.unpack_tuple(builder, view.shape)[1]
        whole = builder.and_(width, _INDEX(-_LANES))

        def emit(start: Any, stop: Any, step: int, kind: Any) -> None:
            with cgutils.for_range_slice(builder, start, stop, _INDEX(step), intp=_INDEX) as (
                at,
                _,
            ):
                places = [
                    builder.bitcast(builder.gep(first, [at]), kind.as_pointer())
                    for first in (target, source)
                ]
                old, new = (builder.load(place, align=4) for place in places)
                builder.store(combine(builder, old, new), places[0], align=4)

        emit(_INDEX(0), whole, _LANES, _VECTOR)
        emit(whole, width, 1, _WORD)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_words(typing_context: Any, out: Any, o: Any, column: Any, rows: Any, i: Any) -> Any:
    """out[o, column:column + width] = rows[i]"""
    return _operation(out, rows, lambda builder, old, new: new)


@intrinsic
def xor_words(typing_context: Any, out: Any, o: Any, column: Any, rows: Any, i: Any) -> Any:
    """out[o, column:column + width] ^= rows[i]"""
    return _operation(out, rows, lambda builder, old, new: builder.xor(old, new))
