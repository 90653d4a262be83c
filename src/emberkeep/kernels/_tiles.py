"""Arithmetic on a tile of sixteen rows that lie column by lane, one vector for each column.

Left to itself the compiler takes half of the widest registers, goes through memory for each lane's
sums, and turns rows into columns one value at a time. Here rows are turned sixteen at a time, and
then worked on in as many lanes as a register holds, so that sums and grids stay in registers. Each
lane sees the same float32 operations in the same order however wide the machine's registers are,
and each operation is rounded correctly (a product and a sum in one where one is written), so every
machine gets the same bits.

The tile is `x[LANES * column + lane]`. What is known of each lane lies in `s`, in groups of LANES:
a group is named by the index of its first lane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
SPLIT = 2**15 + 1
"""Keeps 9 significant bits, to nearest: c·x − (c·x − x) with this c (Veltkamp's splitting)."""

_FLOAT = ir.FloatType()
_INDEX = ir.IntType(64)
_WORD = ir.IntType(32)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    kind = ir.VectorType(value.type, lanes)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _WORD(0))
    mask = ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes)
    return builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), mask)


def _words(value: int, lanes: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(_WORD, lanes), [value] * lanes)


def _called(builder: Any, name: str, *values: Any) -> Any:
    """What a function of LLVM for vectors of floats gives."""
    kind = values[0].type
    function = ir.FunctionType(kind, [kind] * len(values))
    name = f"llvm.{name}.v{kind.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), values)


@functools.cache
def _register_lanes() -> int:
    """How many floats a vector register of this machine holds, eight at least: where they are
    fewer, there are many registers."""
    return 16 if get_host_cpu_features().get("avx512f") else 8


class _Tile:
    """The code around an operation on some lanes, from the `first`: columns of the tile, groups,
    loops over columns."""

    def __init__(
        self, context: Any, builder: Any, signature: Any, args: Any, *, first: int = 0,
        lanes: int = LANES,
    ) -> None:  # fmt: skip
        self.builder = builder
        self._first, self._kind = first, ir.VectorType(_FLOAT, lanes)
        self.lanes, self.words = lanes, ir.VectorType(_WORD, lanes)
        self._x, self._s = (
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip(signature.args[:2], args[:2], strict=True)
        )

    def place(self, first: Any, at: Any, kind: Any = None) -> Any:
        kind = self._kind if kind is None else kind
        return self.builder.bitcast(self.builder.gep(first, [at]), kind.as_pointer())

    def _column_place(self, index: Any) -> Any:
        at = self.builder.add(self.builder.mul(index, _INDEX(LANES)), _INDEX(self._first))
        return self.place(self._x, at)

    def column(self, index: Any) -> Any:
        return self.builder.load(self._column_place(index), align=4)

    def put_column(self, index: Any, value: Any) -> None:
        self.builder.store(value, self._column_place(index), align=4)

    def group(self, at: Any) -> Any:
        at = self.builder.add(at, _INDEX(self._first))
        return self.builder.load(self.place(self._s, at), align=4)

    def put(self, at: Any, value: Any) -> None:
        at = self.builder.add(at, _INDEX(self._first))
        self.builder.store(value, self.place(self._s, at, value.type), align=4)

    def splat(self, value: Any) -> Any:
        return _splat(self.builder, value, self.lanes)

    def constant(self, value: float) -> Any:
        return ir.Constant(self._kind, [float(value)] * self.lanes)

    def loop(self, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> None:
        with cgutils.for_range_slice(self.builder, start, stop, _INDEX(step), intp=_INDEX) as (
            at,
            _,
        ):
            body(at)

    def placed(self, column: Any, inverse: Any, shift: Any) -> Any:
        """Where values lie on a grid, in steps from its lowest point."""
        return _called(self.builder, "fma", column, inverse, self.builder.fneg(shift))

    def code(self, placed: Any, top: Any) -> Any:
        """The codes of such places: the nearest of 0, 1, … top."""
        builder = self.builder
        # A zero that the compiler cannot see: with one that it sees it takes two instructions.
        zero = builder.fsub(top, top)
        above = builder.select(builder.fcmp_ordered(">", placed, zero), placed, zero)
        within = builder.select(builder.fcmp_ordered("<", above, top), above, top)
        return _called(builder, "rint", within)


def _by_register(
    context: Any, builder: Any, signature: Any, args: Any, emit: Callable[[_Tile], None]
) -> Any:
    """Emits an operation for as many lanes at a time as one register holds: then all that a column
    needs is in registers, while sixteen lanes in several of them would go through memory."""
    lanes = _register_lanes()
    for first in range(0, LANES, lanes):
        emit(_Tile(context, builder, signature, args, first=first, lanes=lanes))
    return context.get_dummy_value()


@intrinsic
def packed(
    typing_context: Any,
    x: Any,
    s: Any,
    start: Any,
    stop: Any,
    bits: Any,
    inverse: Any,
    shift: Any,
    word: Any,
    top: Any,
) -> Any:
    """Puts the codes of columns `start..stop` into each lane's word, the first one lowest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, stop, bits, inverse, shift, word, top = args[2:]

        def emit(tile: _Tile) -> None:
            grid, most = (tile.group(inverse), tile.group(shift)), tile.splat(top)
            total = cgutils.alloca_once(builder, tile.words)
            builder.store(_words(0, tile.lanes), total)

            def single(at: Any) -> None:
                code = tile.code(tile.placed(tile.column(at), *grid), most)
                place = builder.trunc(builder.mul(builder.sub(at, start), bits), _WORD)
                code = builder.shl(builder.fptosi(code, tile.words), tile.splat(place))
                builder.store(builder.or_(builder.load(total), code), total)

            tile.loop(start, stop, 1, single)
            tile.put(word, builder.load(total))

        return _by_register(context, builder, signature, args, emit)

    indices = [types.int64] * 6
    return types.void(x, s, *indices, types.float32), generate
