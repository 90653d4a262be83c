"""Code for a tile that is written as it would be for one row: floats of all lanes with operators.

A tile is worked on in parts, as many lanes at a time as a register holds. Nothing here is reordered
or contracted: each lane sees the float32 operations that are written, each rounded by itself, and
a product and a sum in one where `fma` is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from emberkeep.kernels._tiles import LANES, _called, _register_lanes, _Tile

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_FOUR = ir.VectorType(ir.FloatType(), 4)


class Lanes:
    """A float in each lane of a part of the tile, with the operators of numbers."""

    def __init__(self, tile: _Tile, value: Any) -> None:
        self.tile, self.value = tile, value

    def of(self, value: Any) -> Lanes:
        """A number, or an argument of the kernel, in as many lanes."""
        if isinstance(value, Lanes):
            return value
        known = isinstance(value, (int, float, np.floating))
        return Lanes(self.tile, self.tile.constant(value) if known else self.tile.splat(value))

    def __add__(self, other: Any) -> Lanes:
        return Lanes(self.tile, self.tile.builder.fadd(self.value, self.of(other).value))

    def __sub__(self, other: Any) -> Lanes:
        return Lanes(self.tile, self.tile.builder.fsub(self.value, self.of(other).value))

    def __mul__(self, other: Any) -> Lanes:
        return Lanes(self.tile, self.tile.builder.fmul(self.value, self.of(other).value))

    def __truediv__(self, other: Any) -> Lanes:
        return Lanes(self.tile, self.tile.builder.fdiv(self.value, self.of(other).value))

    def __neg__(self) -> Lanes:
        return Lanes(self.tile, self.tile.builder.fneg(self.value))

    def __abs__(self) -> Lanes:
        return self.called("fabs")

    def is_(self, order: str, other: Any) -> Any:
        return self.tile.builder.fcmp_ordered(order, self.value, self.of(other).value)

    def called(self, name: str, *others: Lanes) -> Lanes:
        values = [self.value, *(other.value for other in others)]
        return Lanes(self.tile, _called(self.tile.builder, name, *values))

    def words(self) -> Any:
        return self.tile.builder.bitcast(self.value, self.tile.words)


class Held:
    """Floats of lanes that change while the code runs."""

    def __init__(self, values: Sequence[Lanes]) -> None:
        self._tile = values[0].tile
        kind = values[0].value.type
        self._places = [cgutils.alloca_once(self._tile.builder, kind) for _ in values]
        self.put(values)

    def put(self, values: Sequence[Lanes]) -> None:
        for place, value in zip(self._places, values, strict=True):
            self._tile.builder.store(value.value, place)

    def get(self) -> list[Lanes]:
        return [Lanes(self._tile, self._tile.builder.load(place)) for place in self._places]


def parts_of(context: Any, builder: Any, signature: Any, args: Any) -> list[_Tile]:
    """The tile in as many lanes at a time as a register holds."""
    lanes = _register_lanes()
    firsts = range(0, LANES, lanes)
    return [_Tile(context, builder, signature, args, first=at, lanes=lanes) for at in firsts]


def words_of(tile: _Tile, value: int) -> Any:
    return ir.Constant(tile.words, [value] * tile.lanes)


def group(tile: _Tile, at: int) -> Lanes:
    return Lanes(tile, tile.group(_INT64(at)))


def put_groups(tile: _Tile, groups: dict[int, Lanes]) -> None:
    for at, value in groups.items():
        tile.put(_INT64(at), value.value)


def either(first: Any, ours: Sequence[Lanes], theirs: Sequence[Lanes]) -> list[Lanes]:
    return [
        Lanes(a.tile, a.tile.builder.select(first, a.value, b.value))
        for a, b in zip(ours, theirs, strict=True)
    ]


def mask_of(parts: list[_Tile], chosen: list[Any]) -> Any:
    """The lanes that are chosen, as bits of a number."""
    builder, mask = parts[0].builder, _INT64(0)
    for i, (part, lanes) in enumerate(zip(parts, chosen, strict=True)):
        bits = builder.zext(builder.bitcast(lanes, ir.IntType(part.lanes)), _INT64)
        mask = builder.or_(mask, builder.shl(bits, _INT64(i * part.lanes)))
    return mask


@contextlib.contextmanager
def repeated(builder: Any, done: Any, count: Any) -> Iterator[Callable[[Any], None]]:
    """Code that runs until it was `done` that often, or until it leaves."""
    head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))

    def leave(condition: Any) -> None:
        stay = builder.append_basic_block("stay")
        builder.cbranch(condition, end, stay)
        builder.position_at_end(stay)

    builder.branch(head)
    builder.position_at_end(head)
    builder.cbranch(builder.icmp_signed("<", builder.load(done), count), body, end)
    builder.position_at_end(body)
    yield leave
    builder.store(builder.add(builder.load(done), _INT64(1)), done)
    builder.branch(head)
    builder.position_at_end(end)


def row_places(context: Any, builder: Any, kind: Any, args: Any) -> tuple[list[Any], Any]:
    """Where each of the rows first..last of an array begins, the last one as often as lanes are
    left; and how many items a row has."""
    array, first, last = args
    view = context.make_array(kind)(context, builder, array)
    width = cgutils.unpack_tuple(builder, view.shape)[1]
    end = builder.sub(last, _INT64(1))
    places = []
    for lane in range(LANES):
        row = builder.add(first, _INT64(lane))
        row = builder.select(builder.icmp_signed("<", row, end), row, end)
        places.append(builder.gep(view.data, [builder.mul(row, width)]))
    return places, width


def turned(tile: _Tile, rows: list[Any], at: Any) -> list[Any]:
    """Four columns of the rows: four values of each, side by side, and then 4×4 of them turned."""
    builder = tile.builder

    def mixed(a: Any, b: Any, order: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(_INT32, len(order)), order)
        return builder.shuffle_vector(a, b, mask)

    def by_fours(a: Any, b: Any, order: tuple[int, ...]) -> Any:
        """From every four lanes of `a` and of `b`, those being 4 and more."""
        starts = range(0, tile.lanes, 4)
        return mixed(a, b, [s + i % 4 + i // 4 * tile.lanes for s in starts for i in order])

    lines = []
    for i in range(4):
        fours = [builder.load(tile.place(row, at, _FOUR), align=4) for row in rows[i::4]]
        while len(fours) > 1:
            order = list(range(2 * fours[0].type.count))
            fours = [mixed(a, b, order) for a, b in zip(fours[::2], fours[1::2], strict=True)]
        lines += fours
    a, b, c, d = lines
    columns = []
    for pairs in ((0, 4, 1, 5), (2, 6, 3, 7)):
        ab, cd = by_fours(a, b, pairs), by_fours(c, d, pairs)
        columns += [by_fours(ab, cd, (0, 1, 4, 5)), by_fours(ab, cd, (2, 3, 6, 7))]
    return columns
