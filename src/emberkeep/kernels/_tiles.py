"""Arithmetic on a tile of sixteen rows that lie column by lane, one vector for each column.

Left to itself the compiler takes half of the widest registers, goes through memory for each lane's
sums, and turns rows into columns one value at a time. Here a tile's column is one vector of
sixteen (one register with AVX-512, two with AVX2, four on ARM) and sums stay in registers. Each
lane sees the same float32 operations in the same order however wide the machine's registers are,
so every machine gets the same bits.

The tile is `x[LANES * column + lane]`. What is known of each lane lies in `s`, in groups of LANES:
a group is named by the index of its first lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16

_FLOAT = ir.FloatType()
_INDEX = ir.IntType(64)
_WORD = ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_WORD, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


def _splat(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _WORD(0))
    mask = ir.Constant(_WORDS, [0] * LANES)
    return builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), mask)


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


class _Tile:
    """The code around an operation: columns of the tile, groups of lanes, loops over columns."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self._x, self._s = (
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip(signature.args[:2], args[:2], strict=True)
        )

    def _place(self, first: Any, at: Any, kind: Any = _VECTOR) -> Any:
        return self.builder.bitcast(self.builder.gep(first, [at]), kind.as_pointer())

    def _column_place(self, index: Any) -> Any:
        return self._place(self._x, self.builder.mul(index, _INDEX(LANES)))

    def column(self, index: Any) -> Any:
        return self.builder.load(self._column_place(index), align=4)

    def put_column(self, index: Any, value: Any) -> None:
        self.builder.store(value, self._column_place(index), align=4)

    def group(self, at: Any) -> Any:
        return self.builder.load(self._place(self._s, at), align=4)

    def put(self, at: Any, value: Any) -> None:
        self.builder.store(value, self._place(self._s, at, value.type), align=4)

    def sums(self, count: int) -> list[Any]:
        places = [cgutils.alloca_once(self.builder, _VECTOR) for _ in range(count)]
        for place in places:
            self.builder.store(_ZERO, place)
        return places

    def add(self, place: Any, value: Any) -> None:
        self.builder.store(self.builder.fadd(self.builder.load(place), value), place)

    def loop(self, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> None:
        with cgutils.for_range_slice(self.builder, start, stop, _INDEX(step), intp=_INDEX) as (
            at,
            _,
        ):
            body(at)

    def placed(self, column: Any, inverse: Any, shift: Any) -> Any:
        """Where values lie on a grid, in steps from its lowest point."""
        return self.builder.fsub(self.builder.fmul(column, inverse), shift)

    def code(self, placed: Any, top: Any) -> Any:
        """The codes of such places: the nearest of 0, 1, … top."""
        builder = self.builder
        above = builder.select(builder.fcmp_ordered(">", placed, _ZERO), placed, _ZERO)
        within = builder.select(builder.fcmp_ordered("<", above, top), above, top)
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        nearest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{LANES}f32")
        return builder.call(nearest, [within])


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen, columns for rows: blocks of 1, 2, 4 and 8 change places."""
    for size in (1, 2, 4, 8):
        upper = [j if not j & size else LANES + j - size for j in range(LANES)]
        lower = [j + size if not j & size else LANES + j for j in range(LANES)]
        turned = list(rows)
        for i in range(LANES):
            if not i & size:
                a, b = rows[i], rows[i + size]
                turned[i] = builder.shuffle_vector(a, b, ir.Constant(_WORDS, upper))
                turned[i + size] = builder.shuffle_vector(a, b, ir.Constant(_WORDS, lower))
        rows = turned
    return rows


@intrinsic
def load_rows(
    typing_context: Any, x: Any, s: Any, values_RD: Any, first: Any, last: Any, low: Any, high: Any
) -> Any:
    """Fills the tile with rows `first..last`, the last one as often as lanes are left, and the
    groups `low` and `high` with the ends of each lane's range.

    The ends are words that sort as the floats do, found on integers: those need no care for NaN,
    tell -0.0 from 0.0, and show NaN and infinities as the outermost ends. Rows that do not follow
    each other in memory are refused when a kernel is compiled for them.
    """
    if values_RD.layout != "C":
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args)
        view = context.make_array(signature.args[2])(context, builder, args[2])
        first, last, low, high = args[3:]
        width = cgutils.unpack_tuple(builder, view.shape)[1]
        rows = []
        for lane in range(LANES):
            row = builder.add(first, _INDEX(lane))
            end = builder.sub(last, _INDEX(1))
            row = builder.select(builder.icmp_signed("<", row, end), row, end)
            rows.append(builder.gep(view.data, [builder.mul(row, width)]))
        least = cgutils.alloca_once(builder, _WORDS)
        most = cgutils.alloca_once(builder, _WORDS)
        builder.store(_words(0x7FFFFFFF), least)
        builder.store(_words(-0x80000000), most)

        def put(index: Any, column: Any) -> None:
            tile.put_column(index, column)
            word = builder.bitcast(column, _WORDS)
            sign = builder.and_(builder.ashr(word, _words(31)), _words(0x7FFFFFFF))
            key = builder.xor(word, sign)
            for place, order in ((least, "<"), (most, ">")):
                known = builder.load(place)
                further = builder.icmp_signed(order, key, known)
                builder.store(builder.select(further, key, known), place)

        def block(at: Any) -> None:
            vectors = [
                builder.load(tile._place(row, at), align=4)  # 16 columns of one row
                for row in rows
            ]
            for i, column in enumerate(_turned(builder, vectors)):
                put(builder.add(at, _INDEX(i)), column)

        def single(at: Any) -> None:
            column = ir.Constant(_VECTOR, ir.Undefined)
            for lane, row in enumerate(rows):
                value = builder.load(builder.gep(row, [at]))
                column = builder.insert_element(column, value, _WORD(lane))
            put(at, column)

        whole = builder.and_(width, _INDEX(-LANES))
        tile.loop(_INDEX(0), whole, LANES, block)
        tile.loop(whole, width, 1, single)
        tile.put(low, builder.load(least))
        tile.put(high, builder.load(most))
        return context.get_dummy_value()

    indices = [types.int64] * 4
    return types.void(x, s, values_RD, *indices), generate


def _errors(tile: _Tile, width: Any, grids: Sequence[tuple[Any, Any]], top: Any) -> list[Any]:
    """The squared errors of each grid (inverse, shift), in steps, summed over the columns: four
    columns at a time, `(e0² + e1²) + (e2² + e3²)`, then one by one."""
    builder = tile.builder
    sums = tile.sums(len(grids))

    def square(column: Any, grid: tuple[Any, Any]) -> Any:
        placed = tile.placed(column, *grid)
        error = builder.fsub(placed, tile.code(placed, top))
        return builder.fmul(error, error)

    def four(at: Any) -> None:
        columns = [tile.column(builder.add(at, _INDEX(i))) for i in range(4)]
        for grid, total in zip(grids, sums, strict=True):
            a, b, c, d = (square(column, grid) for column in columns)
            tile.add(total, builder.fadd(builder.fadd(a, b), builder.fadd(c, d)))

    def single(at: Any) -> None:
        column = tile.column(at)
        for grid, total in zip(grids, sums, strict=True):
            tile.add(total, square(column, grid))

    whole = builder.and_(width, _INDEX(-4))
    tile.loop(_INDEX(0), whole, 4, four)
    tile.loop(whole, width, 1, single)
    return [builder.load(total) for total in sums]


@intrinsic
def errors(
    typing_context: Any, x: Any, s: Any, width: Any, inverse: Any, shift: Any, error: Any, top: Any
) -> Any:
    """Sums each lane's squared errors, in steps, into the group `error`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args)
        width, inverse, shift, error, top = args[2:]
        grid = tile.group(inverse), tile.group(shift)
        tile.put(error, _errors(tile, width, [grid], _splat(builder, top))[0])
        return context.get_dummy_value()

    indices = [types.int64] * 4
    return types.void(x, s, *indices, types.float32), generate


@intrinsic
def errors_of_two(typing_context: Any, x: Any, s: Any, width: Any, a: Any, b: Any, top: Any) -> Any:
    """As `errors`, for the two grids at `a` and `b`: four groups each, scale, inverse, shift and
    error. The tile is read once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args)
        width, a, b, top = args[2:]

        def group(place: Any, index: int) -> Any:
            return builder.add(place, _INDEX(index * LANES))

        grids = [(tile.group(group(place, 1)), tile.group(group(place, 2))) for place in (a, b)]
        totals = _errors(tile, width, grids, _splat(builder, top))
        for place, total in zip((a, b), totals, strict=True):
            tile.put(group(place, 3), total)
        return context.get_dummy_value()

    indices = [types.int64] * 3
    return types.void(x, s, *indices, types.float32), generate


@intrinsic
def moments(
    typing_context: Any, x: Any, s: Any, width: Any, inverse: Any, shift: Any, out: Any, top: Any
) -> Any:
    """Sums codes, their squares, places, and places times codes into four groups from `out`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(context, builder, signature, args)
        width, inverse, shift, out, top = args[2:]
        grid, top = (tile.group(inverse), tile.group(shift)), _splat(builder, top)
        sums = tile.sums(4)

        def single(at: Any) -> None:
            placed = tile.placed(tile.column(at), *grid)
            code = tile.code(placed, top)
            values = (code, builder.fmul(code, code), placed, builder.fmul(placed, code))
            for total, value in zip(sums, values, strict=True):
                tile.add(total, value)

        tile.loop(_INDEX(0), width, 1, single)
        for i, total in enumerate(sums):
            tile.put(builder.add(out, _INDEX(i * LANES)), builder.load(total))
        return context.get_dummy_value()

    indices = [types.int64] * 4
    return types.void(x, s, *indices, types.float32), generate


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
        tile = _Tile(context, builder, signature, args)
        start, stop, bits, inverse, shift, word, top = args[2:]
        grid, top = (tile.group(inverse), tile.group(shift)), _splat(builder, top)
        total = cgutils.alloca_once(builder, _WORDS)
        builder.store(_words(0), total)

        def single(at: Any) -> None:
            code = builder.fptosi(tile.code(tile.placed(tile.column(at), *grid), top), _WORDS)
            place = builder.trunc(builder.mul(builder.sub(at, start), bits), _WORD)
            code = builder.shl(code, _splat(builder, place))
            builder.store(builder.or_(builder.load(total), code), total)

        tile.loop(start, stop, 1, single)
        tile.put(word, builder.load(total))
        return context.get_dummy_value()

    indices = [types.int64] * 6
    return types.void(x, s, *indices, types.float32), generate


@intrinsic
def put_word(typing_context: Any, bytes_RB: Any, row: Any, at: Any, word: Any) -> Any:
    """Stores the four bytes of a word from byte `at` of a row, lowest first: all machines that
    Numba compiles for lay words out like this."""
    if bytes_RB.layout != "C":
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        row, at, word = args[1:]
        stride = cgutils.unpack_tuple(builder, view.shape)[1]
        place = builder.gep(view.data, [builder.add(builder.mul(row, stride), at)])
        builder.store(word, builder.bitcast(place, _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(bytes_RB, types.int64, types.int64, types.int32), generate
