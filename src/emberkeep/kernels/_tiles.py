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
from collections.abc import Callable, Sequence
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
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_WORD, LANES)


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

    def sums(self, count: int) -> list[Any]:
        places = [cgutils.alloca_once(self.builder, self._kind) for _ in range(count)]
        for place in places:
            self.builder.store(self.constant(0), place)
        return places

    def add(self, place: Any, value: Any) -> None:
        self.builder.store(self.builder.fadd(self.builder.load(place), value), place)

    def add_product(self, place: Any, a: Any, b: Any) -> None:
        """With one rounding, as all products here that something is added to."""
        total = _called(self.builder, "fma", a, b, self.builder.load(place))
        self.builder.store(total, place)

    def loop(self, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> None:
        with cgutils.for_range_slice(self.builder, start, stop, _INDEX(step), intp=_INDEX) as (
            at,
            _,
        ):
            body(at)

    def grid(self, low: Any, high: Any, part: Any, fine: Any) -> tuple[Any, Any, Any]:
        """The storable grid nearest to one over low..high whose step is that part of it: scale,
        inverse, shift."""
        builder = self.builder
        wanted = builder.fmul(builder.fsub(high, low), part)
        much = builder.fmul(wanted, self.constant(SPLIT))
        scale = builder.fsub(much, builder.fsub(much, wanted))
        inverse = builder.fdiv(self.constant(1), scale)
        steps = builder.fmul(builder.fmul(low, inverse), fine)
        whole = _called(builder, "floor", builder.fadd(steps, self.constant(0.5)))
        return scale, inverse, builder.fmul(whole, builder.fdiv(self.constant(1), fine))

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
                builder.load(tile.place(row, at), align=4)  # 16 columns of one row
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
    """The squared errors of each grid (inverse, shift), in steps, summed over the columns: even and
    odd ones separately, so that a sum is not always waiting for itself, then both."""
    builder = tile.builder
    sums = [tile.sums(2) for _ in grids]

    def add(at: Any, odd: int) -> None:
        column = tile.column(at)
        for grid, totals in zip(grids, sums, strict=True):
            placed = tile.placed(column, *grid)
            error = builder.fsub(placed, tile.code(placed, top))
            tile.add_product(totals[odd], error, error)

    def pair(at: Any) -> None:
        add(at, 0)
        add(builder.add(at, _INDEX(1)), 1)

    even = builder.and_(width, _INDEX(-2))
    tile.loop(_INDEX(0), even, 2, pair)
    tile.loop(even, width, 1, lambda at: add(at, 0))
    return [builder.fadd(builder.load(a), builder.load(b)) for a, b in sums]


@intrinsic
def errors(
    typing_context: Any, x: Any, s: Any, width: Any, inverse: Any, shift: Any, error: Any, top: Any
) -> Any:
    """Sums each lane's squared errors, in steps, into the group `error`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, inverse, shift, error, top = args[2:]

        def emit(tile: _Tile) -> None:
            grid = tile.group(inverse), tile.group(shift)
            tile.put(error, _errors(tile, width, [grid], tile.splat(top))[0])

        return _by_register(context, builder, signature, args, emit)

    indices = [types.int64] * 4
    return types.void(x, s, *indices, types.float32), generate


@intrinsic
def search(
    typing_context: Any,
    x: Any,
    s: Any,
    width: Any,
    iterations: Any,
    ends: Any,
    grid: Any,
    top: Any,
    fine: Any,
    bins: Any,
    most_shift: Any,
) -> Any:
    """Greedy: raises the low end of each lane's range or cuts the high end by one of its `bins`,
    whichever errs less, and keeps the best of all grids that it came by.

    From `ends` on there are the groups low, high and the inverse of the scale that losses are
    measured in; from `grid` on scale, shift and loss, those of the first grid and then of the best.
    The whole walk is one loop over registers: left to the compiler, choices between lanes become
    masked stores, which some processors take tens of cycles for.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, iterations, ends, grid, top, fine, bins, most_shift = args[2:]

        def group(first: Any, index: int) -> Any:
            return builder.add(first, _INDEX(index * LANES))

        def emit(tile: _Tile) -> None:
            _walk(
                tile, width, iterations, [group(ends, i) for i in range(3)],
                [group(grid, i) for i in range(3)],
                [tile.splat(value) for value in (top, fine, bins, most_shift)],
            )  # fmt: skip

        return _by_register(context, builder, signature, args, emit)

    indices = [types.int64] * 4
    return types.void(x, s, *indices, *[types.float32] * 4), generate


def _walk(
    tile: _Tile, width: Any, iterations: Any, ends: list[Any], grid: list[Any],
    numbers: list[Any],
) -> None:  # fmt: skip
    """`search` for the lanes of a tile; the numbers are vectors."""
    builder = tile.builder
    top, fine, bins, most_shift = numbers
    low, high, unit = (tile.group(at) for at in ends)
    part = builder.fdiv(tile.constant(1), top)
    step = builder.fdiv(builder.fsub(high, low), bins)
    held = [*(tile.group(at) for at in grid), low, high]
    places = [cgutils.alloca_once(builder, value.type) for value in held]
    for place, value in zip(places, held, strict=True):
        builder.store(value, place)

    def either(first: Any, ours: list[Any], theirs: list[Any]) -> list[Any]:
        return [builder.select(first, a, b) for a, b in zip(ours, theirs, strict=True)]

    def move(_: Any) -> None:
        *best, low, high = (builder.load(place) for place in places)
        found = []
        ranges = (builder.fadd(low, step), high), (low, builder.fsub(high, step))
        grids = [tile.grid(*each, part, fine) for each in ranges]
        errors = _errors(tile, width, [(inverse, shift) for _, inverse, shift in grids], top)
        for (scale, _, shift), error, each in zip(grids, errors, ranges, strict=True):
            units = builder.fmul(scale, unit)
            loss = builder.fmul(builder.fmul(error, units), units)
            found.append([scale, shift, loss, *each])
        raised = builder.fcmp_ordered("<", found[0][2], found[1][2])
        *chosen, low, high = either(raised, *found)
        reach = _called(builder, "fabs", builder.fmul(chosen[1], fine))
        better = builder.and_(
            builder.fcmp_ordered("<", chosen[2], best[2]),
            builder.fcmp_ordered("<=", reach, most_shift),
        )
        for place, value in zip(places, [*either(better, chosen, best), low, high], strict=True):
            builder.store(value, place)

    tile.loop(_INDEX(0), iterations, 1, move)
    for at, place in zip(grid, places, strict=False):
        tile.put(at, builder.load(place))


@intrinsic
def moments(
    typing_context: Any, x: Any, s: Any, width: Any, inverse: Any, shift: Any, out: Any, top: Any
) -> Any:
    """Sums codes, their squares, places, and places times codes into four groups from `out`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, inverse, shift, out, top = args[2:]

        def emit(tile: _Tile) -> None:
            grid, most = (tile.group(inverse), tile.group(shift)), tile.splat(top)
            sums = codes, squares, places, products = tile.sums(4)

            def single(at: Any) -> None:
                placed = tile.placed(tile.column(at), *grid)
                code = tile.code(placed, most)
                tile.add(codes, code)
                tile.add_product(squares, code, code)
                tile.add(places, placed)
                tile.add_product(products, placed, code)

            tile.loop(_INDEX(0), width, 1, single)
            for i, total in enumerate(sums):
                tile.put(builder.add(out, _INDEX(i * LANES)), builder.load(total))

        return _by_register(context, builder, signature, args, emit)

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
