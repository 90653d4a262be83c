"""Rows that are written past the caches: nobody looks at them soon.

A processor that writes part of a line fetches the line first, even if all of it is about to be
written. Where whole lines are written once, half of what memory is asked for is saved.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from emberkeep.kernels._lanes import _INDEX, _LANES, _VECTOR, _row

_LINE = 64


@intrinsic
def fills_lines(typing_context: Any, array: Any) -> Any:
    """Whether the rows of an array are whole lines, so that `stream_row` can write them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        columns = cgutils.unpack_tuple(builder, view.shape)[1]
        begin = builder.ptrtoint(view.data, _INDEX)
        rest = builder.or_(builder.mul(columns, _INDEX(4)), begin)
        return builder.icmp_unsigned("==", builder.and_(rest, _INDEX(_LINE - 1)), _INDEX(0))

    return types.boolean(array), generate


@intrinsic
def stream_row(typing_context: Any, out: Any, o: Any, x: Any, i: Any) -> Any:
    """out[o] = x[i], where out `fills_lines`; others see it after `fence`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, columns = _row(context, builder, signature.args[0], args[0], args[1])
        source, _ = _row(context, builder, signature.args[2], args[2], args[3])
        once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        vector = _VECTOR.as_pointer()
        with cgutils.for_range_slice(builder, _INDEX(0), columns, _INDEX(_LANES), intp=_INDEX) as (
            at,
            _,
        ):
            value = builder.load(builder.bitcast(builder.gep(source, [at]), vector), align=4)
            place = builder.bitcast(builder.gep(target, [at]), vector)
            builder.store(value, place, align=4 * _LANES).set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.void(out, types.int64, x, types.int64), generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """What was written before is written for everybody."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
