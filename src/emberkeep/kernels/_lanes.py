"""Arithmetic on whole rows, eight columns at a time.

Rows are short: what the compiler adds around a loop over 16 columns (tests for overlap, wide main
loops that are never entered, remainders) costs as much as the loop. Here the loop is written as it
should come out: full vectors, then single columns. Every column is computed by the same float32
operations in the same order either way, so results are those of the plain loop, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_LANES = 8
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_INDEX = ir.IntType(64)
_LANE = ir.IntType(32)

Compute = Callable[[Any, list[Any], list[Any]], dict[int, Any]]


def _splat(builder: Any, value: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, _LANE(0))
    mask = ir.Constant(ir.VectorType(_LANE, _LANES), [0] * _LANES)
    return builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), mask)


def _sqrt(builder: Any, value: Any) -> Any:
    name = "llvm.sqrt.v8f32" if value.type == _VECTOR else "llvm.sqrt.f32"
    kind = ir.FunctionType(value.type, [value.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])


def _row(context: Any, builder: Any, array_type: Any, array: Any, row: Any) -> tuple[Any, Any]:
    """The address of a row's first column, and the number of columns."""
    view = context.make_array(array_type)(context, builder, array)
    zero = context.get_constant(types.intp, 0)
    first = cgutils.get_item_pointer(
        context, builder, array_type, view, [row, zero], wraparound=False
    )
    return first, cgutils.unpack_tuple(builder, view.shape)[1]


def _over_columns(
    context: Any, builder: Any, signature: Any, args: Any, *, rows: int, compute: Compute
) -> Any:
    """Emits `compute` for every column of `rows` rows.

    The first arguments are (array, row) pairs, the rest scalars. `compute` gets one value per row
    and one per scalar, and says what is stored to which of the rows.
    """
    found = [
        _row(context, builder, signature.args[2 * i], args[2 * i], args[2 * i + 1])
        for i in range(rows)
    ]
    columns = found[0][1]
    scalars = list(args[2 * rows :])
    whole = builder.and_(columns, _INDEX(-_LANES))

    def emit(start: Any, stop: Any, step: int, kind: Any, constants: Sequence[Any]) -> None:
        with cgutils.for_range_slice(builder, start, stop, _INDEX(step), intp=_INDEX) as (at, _):
            places = [
                builder.bitcast(builder.gep(first, [at]), kind.as_pointer()) for first, _ in found
            ]
            values = [builder.load(place, align=4) for place in places]
            for target, result in compute(builder, values, list(constants)).items():
                builder.store(result, places[target], align=4)

    emit(_INDEX(0), whole, _LANES, _VECTOR, [_splat(builder, scalar) for scalar in scalars])
    emit(whole, columns, 1, _FLOAT, scalars)
    return context.get_dummy_value()


def _operation(rows: int, scalars: int, compute: Compute) -> Any:
    """A typed signature and generator for `rows` (array, row) pairs and float32 scalars."""

    def typed(*arguments: Any) -> Any:
        kinds = [kind for array in arguments[: 2 * rows : 2] for kind in (array, types.int64)]
        signature = types.void(*kinds, *([types.float32] * scalars))

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _over_columns(context, builder, signature, args, rows=rows, compute=compute)

        return signature, generate

    return typed


_COPY = _operation(2, 0, lambda b, v, s: {0: v[1]})
_ADD = _operation(2, 0, lambda b, v, s: {0: b.fadd(v[0], v[1])})
_ADD_SCALED = _operation(2, 1, lambda b, v, s: {0: b.fadd(v[0], b.fmul(s[0], v[1]))})
_SUBTRACT_SCALED = _operation(2, 1, lambda b, v, s: {0: b.fsub(v[0], b.fmul(s[0], v[1]))})


def _adagrad(b: Any, v: list[Any], s: list[Any]) -> dict[int, Any]:
    weight, accumulator, grad = v
    total = b.fadd(accumulator, b.fmul(grad, grad))
    change = b.fmul(s[0], b.fdiv(grad, b.fadd(_sqrt(b, total), s[1])))
    return {0: b.fsub(weight, change), 1: total}


def _adam(b: Any, v: list[Any], s: list[Any]) -> dict[int, Any]:
    weight, first, second, grad = v
    rate, keep1, keep2, eps = s
    first_now = b.fadd(b.fmul(b.fsub(grad, first), keep1), first)
    second_now = b.fadd(b.fmul(b.fsub(b.fmul(grad, grad), second), keep2), second)
    change = b.fmul(rate, b.fdiv(first_now, b.fadd(_sqrt(b, second_now), eps)))
    return {0: b.fsub(weight, change), 1: first_now, 2: second_now}


_ADAGRAD = _operation(3, 2, _adagrad)
_ADAM = _operation(4, 4, _adam)


@intrinsic
def copy_row(typing_context: Any, out: Any, o: Any, x: Any, i: Any) -> Any:
    """out[o] = x[i]"""
    return _COPY(out, o, x, i)


@intrinsic
def add_row(typing_context: Any, out: Any, o: Any, x: Any, i: Any) -> Any:
    """out[o] += x[i]"""
    return _ADD(out, o, x, i)


@intrinsic
def add_scaled_row(typing_context: Any, out: Any, o: Any, x: Any, i: Any, scale: Any) -> Any:
    """out[o] += scale * x[i]"""
    return _ADD_SCALED(out, o, x, i, scale)


@intrinsic
def subtract_scaled_row(typing_context: Any, out: Any, o: Any, x: Any, i: Any, scale: Any) -> Any:
    """out[o] -= scale * x[i]"""
    return _SUBTRACT_SCALED(out, o, x, i, scale)


@intrinsic
def adagrad_row(
    typing_context: Any, weight: Any, w: Any, accumulator: Any, a: Any, grad: Any, g: Any, lr: Any,
    eps: Any,
) -> Any:  # fmt: skip
    """accumulator[a] += grad[g]²; weight[w] -= lr * (grad[g] / (√accumulator[a] + eps))"""
    return _ADAGRAD(weight, w, accumulator, a, grad, g, lr, eps)


@intrinsic
def adam_row(
    typing_context: Any, weight: Any, w: Any, first: Any, f: Any, second: Any, s: Any, grad: Any,
    g: Any, rate: Any, keep1: Any, keep2: Any, eps: Any,
) -> Any:  # fmt: skip
    """Both moments move towards the gradient and its square; the weight moves by their ratio."""
    return _ADAM(weight, w, first, f, second, s, grad, g, rate, keep1, keep2, eps)
