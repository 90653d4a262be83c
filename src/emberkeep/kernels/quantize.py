"""Rows as small integers: the range search, the packing of codes, and the way back.

Sixteen rows are turned into a tile (column by lane) and searched side by side, so that the
arithmetic runs in vector registers whatever the width of a row. A lane never sees its
neighbours: a row's bytes do not depend on the rows around it, on the split into blocks, or on the
thread count. All arithmetic is float32 in a fixed order and uses nothing but correctly rounded
operations, so that every machine writes the same bytes.

The grid of a row is `scale · (code + shift / fine)`: `scale` is a float32 with 8 mantissa bits,
`shift` a signed 16-bit count of `1 / fine` steps. `code + shift / fine` is exact in float32, so a
value is decoded with one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from emberkeep._types import F32, U8, U32
from emberkeep.kernels._intrinsics import prefetch_row
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._tile_lanes import (
    Held,
    Lanes,
    either,
    group,
    mask_of,
    parts_of,
    put_groups,
    repeated,
    row_places,
    turned,
    words_of,
)
from emberkeep.kernels._tiles import LANES, SPLIT, _Tile, packed

_f32 = np.float32
_i32 = np.int32
_u32 = np.uint32
_BYTE, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

# The tile is x[LANES * column + lane]. What is known of each lane lies in `s`, one group of LANES
# after the other.
_LOW, _HIGH, _SCALE, _INVERSE, _SHIFT, _UNIT, _LOSS, _WORD = (LANES * i for i in range(8))
_GROUPS = 8

# Beyond these the grid's arithmetic would leave the normal float32 numbers.
_LEAST_SCALE, _GREATEST_SCALE = _f32(2.0**-100), _f32(2.0**100)
# Codes that are all equal have no slope to fit; the search itself ends far above this.
_LEAST_REFIT = _f32(2.0**-14)
_MOST_SHIFT = _f32(32767)
_INFINITY = 0x7F800000  # as bits
# Half a unit of the 9th bit, and a little for the roundings on the way: to nearest becomes upward.
_UPWARD = _f32(1 + 2.0**-9 + 2.0**-16)
# What is added to 2^23 is rounded to a whole number, which is then found in the lowest bits.
_ROUNDING, _ROUNDING_BITS = 2.0**23, 0x4B000000


_Grid = tuple[Lanes, Lanes, Lanes]  # scale, inverse, shift


@intrinsic
def _load(typing_context: Any, x: Any, s: Any, values_RD: Any, first: Any, last: Any) -> Any:
    """Fills the tile with rows `first..last`, the last one as often as lanes are left, and finds
    the range of each lane. Returned are the lanes with NaN or infinity, as bits, and LANES bits
    above them those that are constant."""
    if values_RD.layout != "C":
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, width = row_places(context, builder, signature.args[2], args[2:])
        parts = parts_of(context, builder, signature, args)
        found = []
        for i, part in enumerate(parts):
            found.append(_loaded(part, rows[i * part.lanes : (i + 1) * part.lanes], width))
        wild, constant = (mask_of(parts, list(lanes)) for lanes in zip(*found, strict=True))
        return builder.or_(wild, builder.shl(constant, _INT64(LANES)))

    return types.int64(x, s, values_RD, types.int64, types.int64), generate


def _loaded(tile: _Tile, rows: list[Any], width: Any) -> tuple[Any, Any]:
    """Ranges are found on words, which need no care for NaN and tell -0.0 from 0.0.

    Floats from 0.0 on sort as signed words do. Those below come before them, the lowest one last;
    it is also the greatest of all unsigned words.
    """
    builder = tile.builder
    least, most = builder.icmp_signed, builder.icmp_unsigned
    limits = (least, "<", 0x7FFFFFFF), (least, ">", -0x80000000), (most, ">", 0)
    places = [cgutils.alloca_once_value(builder, words_of(tile, start)) for *_, start in limits]

    def put(index: Any, column: Any) -> None:
        tile.put_column(index, column)
        word = builder.bitcast(column, tile.words)
        for place, (compared, order, _) in zip(places, limits, strict=True):
            known = builder.load(place)
            builder.store(builder.select(compared(order, word, known), word, known), place)

    def block(at: Any) -> None:
        for i, column in enumerate(turned(tile, rows, at)):
            put(builder.add(at, _INT64(i)), column)

    def single(at: Any) -> None:
        column = tile.constant(0)
        for lane, row in enumerate(rows):
            value = builder.load(builder.gep(row, [at]))
            column = builder.insert_element(column, value, _INT32(lane))
        put(at, column)

    whole = builder.and_(width, _INT64(-4))
    tile.loop(_INT64(0), whole, 4, block)
    tile.loop(whole, width, 1, single)
    first, greatest, lowest = (builder.load(place) for place in places)
    zero = words_of(tile, 0)
    high = builder.select(builder.icmp_signed("<", greatest, zero), first, greatest)
    low = builder.select(builder.icmp_signed("<", lowest, zero), lowest, first)
    tile.put(_INT64(_LOW), low)
    tile.put(_INT64(_HIGH), high)
    above = builder.icmp_signed(">=", high, words_of(tile, _INFINITY))
    below = builder.icmp_unsigned(">=", low, words_of(tile, _INFINITY | 1 << 31))
    wild = builder.or_(above, below)
    return wild, builder.and_(builder.icmp_signed("==", low, high), builder.not_(wild))


def _grid(low: Lanes, high: Lanes, part: Any, fine: Any, rounding: float) -> _Grid:
    """The storable grid over low..high whose step is that `part` of it."""
    wanted = (high - low) * part
    much = wanted * SPLIT
    scale = much - (much - wanted)
    inverse = low.of(1) / scale
    shift = (low * inverse * fine + rounding).called("floor") * (low.of(1) / fine)
    return scale, inverse, shift


def _known_grid(tile: _Tile) -> _Grid:
    return group(tile, _SCALE), group(tile, _INVERSE), group(tile, _SHIFT)


def _placed(values: Lanes, grid: _Grid) -> Lanes:
    """Where values lie on a grid, in steps from its lowest point."""
    _, inverse, shift = grid
    return values.called("fma", inverse, -shift)


def _within(placed: Lanes, top: Any) -> Lanes:
    """Places moved to 0..top. As signed words floats below zero are below it as well, and others
    sort as they do: so integer units, which have less to do here, take this over."""
    tile, builder = placed.tile, placed.tile.builder
    words, most, zero = placed.words(), placed.of(top).words(), words_of(tile, 0)
    words = builder.select(builder.icmp_signed(">", words, zero), words, zero)
    words = builder.select(builder.icmp_signed("<", words, most), words, most)
    return Lanes(tile, builder.bitcast(words, placed.value.type))


def _errors(width: Any, grids: Sequence[_Grid], top: Any, *, clip: bool) -> list[Lanes]:
    """The squared errors of each grid, in steps, summed over the columns: even and odd ones
    separately, so that a sum is not always waiting for itself, then both.

    Without `clip` all values must lie within half a step of the grids: what rounds to a code next
    to it errs by half a step either way, so the squares are the same.
    """
    tile = grids[0][0].tile
    sums = [Held([scale.of(0)] * 2) for scale, _, _ in grids]

    def add(at: Any, count: int) -> None:
        totals = [total.get() for total in sums]
        for odd in range(count):
            index = tile.builder.add(at, _INT64(odd))
            for grid, total in zip(grids, totals, strict=True):
                part = grid[0].tile
                placed = _placed(Lanes(part, part.column(index)), grid)
                code = (_within(placed, top) if clip else placed).called("rint")
                error = placed - code
                total[odd] = error.called("fma", error, total[odd])
        for held, now in zip(sums, totals, strict=True):
            held.put(now)

    even = tile.builder.and_(width, _INT64(-2))
    tile.loop(_INT64(0), even, 2, lambda at: add(at, 2))
    tile.loop(even, width, 1, lambda at: add(at, 1))
    return [a + b for a, b in (total.get() for total in sums)]


@intrinsic
def _whole_range(typing_context: Any, x: Any, s: Any, part: Any, fine: Any) -> Any:
    """The grid over all of each lane's range, rounded outward so that no value is clipped: its
    step is that `part` of it. Returned are the lanes that have none, as bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        part, fine = args[2:]
        parts = parts_of(context, builder, signature, args)
        misfits = []
        for tile in parts:
            ends = group(tile, _LOW), group(tile, _HIGH)
            scale, inverse, shift = _grid(*ends, ends[0].of(part), fine, 0)
            put_groups(tile, {_SCALE: scale, _INVERSE: inverse, _SHIFT: shift, _UNIT: inverse})
            fits = builder.and_(scale.is_(">=", _LEAST_SCALE), scale.is_("<=", _GREATEST_SCALE))
            fits = builder.and_(fits, abs(shift * fine).is_("<=", _MOST_SHIFT))
            misfits.append(builder.not_(fits))
        return mask_of(parts, misfits)

    return types.int64(x, s, types.float32, types.float32), generate


@intrinsic
def _search(
    typing_context: Any, x: Any, s: Any, width: Any, iterations: Any, top: Any, fine: Any, bins: Any
) -> Any:
    """Greedy: raises the low end of each lane's range or cuts the high end by one of its `bins`,
    whichever errs less, and keeps the best of all grids that it came by.

    As long as no lane clips anything, which costs as much as all else, nothing is done about it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, iterations = args[2:4]
        parts = parts_of(context, builder, signature, args)
        grids = [_known_grid(tile) for tile in parts]
        losses = _errors(width, grids, args[4], clip=False)
        walks = [
            _Walk(grid, loss, width, *args[4:]) for grid, loss in zip(grids, losses, strict=True)
        ]
        done = cgutils.alloca_once_value(builder, _INT64(0))
        for clip in (False, True):
            with repeated(builder, done, iterations) as leave:
                for walk in walks if not clip else ():
                    leave(walk.clips())
                for walk in walks:
                    walk.move(clip)
        for walk in walks:
            walk.end()
        return context.get_dummy_value()

    return types.void(x, s, *[types.int64] * 2, *[types.float32] * 3), generate


class _Walk:
    """The search in a part of the tile. The next grids are found as soon as their ranges are:
    their long chain of operations runs beside the columns of the other part.

    Losses are in units of the whole range's step, which neither over- nor underflow.
    """

    def __init__(
        self, grid: _Grid, loss: Lanes, width: Any, top: Any, fine: Any, bins: Any
    ) -> None:
        self._tile, self._width = loss.tile, width
        self._top, self._fine = loss.of(top), loss.of(fine)
        self._part = loss.of(1) / self._top
        self._low, self._high = group(self._tile, _LOW), group(self._tile, _HIGH)
        self._step = (self._high - self._low) / bins
        self._best = Held([grid[0], grid[2], loss])
        self._ends = Held([self._low, self._high])
        self._grids = Held(self._next())

    def _ranges(self) -> tuple[tuple[Lanes, Lanes], tuple[Lanes, Lanes]]:
        low, high = self._ends.get()
        return (low + self._step, high), (low, high - self._step)

    def _next(self) -> list[Lanes]:
        raised, cut = (_grid(*ends, self._part, self._fine, 0.5) for ends in self._ranges())
        return [*raised, *cut]

    def _candidates(self) -> tuple[_Grid, _Grid]:
        a, b, c, d, e, f = self._grids.get()
        return (a, b, c), (d, e, f)

    def clips(self) -> Any:
        """Whether a value may lie farther than half a step outside of the next grids. Places rise
        with the values, or fall: all of them lie between those of a range's ends."""
        builder, inside = self._tile.builder, []
        for grid in self._candidates():
            for end in (self._low, self._high):
                placed = _placed(end, grid)
                inside += [placed.is_(">=", -0.5), placed.is_("<=", self._top + 0.5)]
        while len(inside) > 1:
            inside = [builder.and_(a, b) for a, b in zip(inside[::2], inside[1::2], strict=True)]
        lanes = builder.bitcast(inside[0], ir.IntType(self._tile.lanes))
        return builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, -1))

    def move(self, clip: bool) -> None:
        grids = self._candidates()
        errors = _errors(self._width, grids, self._top, clip=clip)
        unit, found = group(self._tile, _UNIT), []
        for (scale, _, shift), error, ends in zip(grids, errors, self._ranges(), strict=True):
            units = scale * unit
            found.append([scale, shift, error * units * units, *ends])
        chosen = either(found[0][2].is_("<", found[1][2]), *found)
        self._ends.put(chosen[3:])
        self._grids.put(self._next())
        best = self._best.get()
        storable = abs(chosen[1] * self._fine).is_("<=", _MOST_SHIFT)
        better = self._tile.builder.and_(chosen[2].is_("<", best[2]), storable)
        self._best.put(either(better, chosen[:3], best))

    def end(self) -> None:
        scale, shift, loss = self._best.get()
        put_groups(self._tile, {_SCALE: scale, _SHIFT: shift, _LOSS: loss})


@intrinsic
def _refit(typing_context: Any, x: Any, s: Any, width: Any, top: Any, fine: Any) -> Any:
    """Fits the best grid once more, by least squares, to the codes that it gave; keeps the better.

    The search can only end on multiples of a bin; this takes the last few percent of loss for the
    price of one of its iterations.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, top, fine = args[2:]
        parts = parts_of(context, builder, signature, args)
        bests: list[_Grid] = []
        for tile in parts:
            scale = group(tile, _SCALE)
            bests.append((scale, scale.of(1) / scale, group(tile, _SHIFT)))
        count = builder.sitofp(width, ir.FloatType())
        moments = _moments(width, bests, top)
        fits = [_fitted(*pair, count, top, fine) for pair in zip(bests, moments, strict=True)]
        errors = _errors(width, fits, top, clip=True)
        for tile, best, fit, error in zip(parts, bests, fits, errors, strict=True):
            units = fit[0] * group(tile, _UNIT)
            storable = abs(fit[2] * fine).is_("<=", _MOST_SHIFT)
            usable = builder.and_(units.is_(">=", _LEAST_REFIT), storable)
            better = builder.and_((error * units * units).is_("<", group(tile, _LOSS)), usable)
            put_groups(
                tile, dict(zip((_SCALE, _INVERSE, _SHIFT), either(better, fit, best), strict=True))
            )
        return context.get_dummy_value()

    return types.void(x, s, types.int64, types.float32, types.float32), generate


def _moments(width: Any, grids: list[_Grid], top: Any) -> list[list[Lanes]]:
    """Of each grid: the sums of codes, their squares, places, and places times codes."""
    sums = [Held([scale.of(0)] * 4) for scale, _, _ in grids]

    def add(at: Any) -> None:
        for grid, total in zip(grids, sums, strict=True):
            tile = grid[0].tile
            codes, squares, places, products = total.get()
            placed = _placed(Lanes(tile, tile.column(at)), grid)
            code = _within(placed, top).called("rint")
            squares, products = (
                code.called("fma", code, squares),
                placed.called("fma", code, products),
            )
            total.put([codes + code, squares, places + placed, products])

    grids[0][0].tile.loop(_INT64(0), width, 1, add)
    return [total.get() for total in sums]


def _fitted(best: _Grid, sums: list[Lanes], count: Any, top: Any, fine: Any) -> _Grid:
    """The grid that fits best to places and codes with these sums."""
    scale, _, shift = best
    codes, squares, places, products = sums
    spread = squares * count - codes * codes
    (variance,) = either(spread.is_("<", 1), [scale.of(1)], [spread])
    slope = (products * count - codes * places) / variance
    low = scale * ((places - slope * codes) / count + shift)
    return _grid(low, low + scale * slope * top, scale.of(1) / top, fine, 0.5)


def _packing(bits: int) -> Any:
    """Writes the words of a tile's codes: column d takes bits d·bits.. of its row, lowest bit
    first. A word has 32 bits, or 24 for 3 bits; columns beyond the last whole one are left."""
    columns = 8 if bits == 3 else 32 // bits

    def typed(
        typing_context: Any, x: Any, s: Any, codes_RB: Any, first: Any, last: Any, words: Any,
        top: Any,
    ) -> Any:  # fmt: skip
        if codes_RB.layout != "C":
            return None

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words, top = args[5:]
            rows, _ = row_places(context, builder, signature.args[2], args[2:5])
            parts = parts_of(context, builder, signature, args)

            def word(at: Any) -> None:
                byte = builder.mul(at, _INT64(columns * bits // 8))
                start = builder.mul(at, _INT64(columns))
                for i, tile in enumerate(parts):
                    codes = _packed(tile, start, columns, bits, top)
                    for lane in range(tile.lanes):
                        place = builder.gep(rows[i * tile.lanes + lane], [byte])
                        put(place, builder.extract_element(codes, _INT32(lane)))

            def put(place: Any, value: Any) -> None:
                kind = _INT16 if bits == 3 else _INT32
                low = builder.trunc(value, kind) if bits == 3 else value
                builder.store(low, builder.bitcast(place, kind.as_pointer()), align=1)
                if bits == 3:
                    high = builder.trunc(builder.lshr(value, _INT32(16)), _BYTE)
                    builder.store(high, builder.gep(place, [_INT64(2)]))

            parts[0].loop(_INT64(0), words, 1, word)
            return context.get_dummy_value()

        return types.void(x, s, codes_RB, *[types.int64] * 3, types.float32), generate

    return typed


def _packed(tile: _Tile, start: Any, columns: int, bits: int, top: Any) -> Any:
    """The codes of some columns in a word of each lane. What rounding leaves in the upper bits is
    known, and taken away beforehand."""
    builder = tile.builder
    grid = _known_grid(tile)
    total = words_of(tile, -sum(_ROUNDING_BITS << (bits * i) for i in range(columns)) & 0xFFFFFFFF)
    for i in range(columns):
        column = Lanes(tile, tile.column(builder.add(start, _INT64(i))))
        code = (_within(_placed(column, grid), top) + _ROUNDING).words()
        total = builder.add(total, builder.shl(code, words_of(tile, bits * i)))
    return total


_pack2, _pack3, _pack4, _pack8 = (intrinsic(_packing(bits)) for bits in (2, 3, 4, 8))


@inline
def _clear(x: F32, width: int, w: int, s: F32) -> None:
    """Zeros in the range 0..1 stand for a row that is not searched: its arithmetic stays tame."""
    s[_LOW + w] = _f32(0)
    s[_HIGH + w] = _f32(1)
    for d in range(width):
        x[d * LANES + w] = _f32(0)


@kernel
def encode_rows(
    values_RD: F32,
    start: int,
    stop: int,
    bits: int,
    fine: np.float32,
    bins: np.float32,
    iterations: int,
    codes_RB: U8,
    params_R: U32,
    raw_R: U8,
) -> None:
    """Encodes rows `start..stop`; `raw_R` says which of them the codes cannot hold.

    Without iterations a row's grid spans its whole range. A param of 0 marks a row that is
    constant, its value being the first four bytes of its codes, or raw.
    """
    width = values_RD.shape[1]
    stride = codes_RB.shape[1]
    top = _f32((1 << bits) - 1)
    part = _UPWARD / (top - _f32(1) / fine)
    columns = 8 if bits == 3 else 32 // bits
    words = width // columns
    bits_RD = values_RD.view(np.int32)
    x = np.empty(LANES * width, np.float32)
    s = np.empty(LANES * _GROUPS, np.float32)
    s_bits = s.view(np.int32)
    for first in range(start, stop, LANES):
        last = min(first + LANES, stop)
        found = _load(x, s, values_RD, first, last)
        for row in range(last, min(last + LANES, stop)):  # they come while this tile is searched
            prefetch_row(values_RD, row)
        constant = found >> LANES
        others = found & ((1 << LANES) - 1) | constant
        if others:
            for w in range(LANES):
                if others >> w & 1:
                    _clear(x, width, w, s)
        misfits = _whole_range(x, s, part, fine)
        if misfits:
            others |= misfits
            for w in range(LANES):
                if misfits >> w & 1:
                    s[_SCALE + w] = s[_INVERSE + w] = s[_UNIT + w] = _f32(1)
                    s[_SHIFT + w] = _f32(0)
                    _clear(x, width, w, s)
        if iterations > 0:
            _search(x, s, width, iterations, top, fine, bins)
            _refit(x, s, width, top, fine)
        if bits == 2:
            _pack2(x, s, codes_RB, first, last, words, top)
        elif bits == 3:
            _pack3(x, s, codes_RB, first, last, words, top)
        elif bits == 4:
            _pack4(x, s, codes_RB, first, last, words, top)
        else:
            _pack8(x, s, codes_RB, first, last, words, top)
        if words * columns < width:
            packed(x, s, words * columns, width, bits, _INVERSE, _SHIFT, _WORD, top)
            at = words * columns * bits // 8
            for w in range(last - first):
                for j in range(stride - at):
                    codes_RB[first + w, at + j] = (s_bits[_WORD + w] >> _i32(8 * j)) & _i32(255)
        for w in range(last - first):
            shift = _u32(_i32(s[_SHIFT + w] * fine) & _i32(0xFFFF))
            params_R[first + w] = _u32(s_bits[_SCALE + w] >> _i32(15)) | (shift << _u32(16))
            raw_R[first + w] = 0
        for w in range(last - first if others else 0):
            if not others >> w & 1:
                continue
            row = first + w
            is_constant = constant >> w & 1 and stride >= 4
            params_R[row] = _u32(0)
            raw_R[row] = 0 if is_constant else 1
            for j in range(stride):
                codes_RB[row, j] = 0
            for j in range(4 if is_constant else 0):
                codes_RB[row, j] = (bits_RD[row, 0] >> _i32(8 * j)) & _i32(255)


@kernel
def decode_rows(
    codes_RB: U8, params_R: U32, start: int, stop: int, bits: int, fine: np.float32, out_RD: F32
) -> int:
    """Decodes rows `start..stop`; the number of params that no encoder writes is returned.

    Raw rows come out as zeros: the caller puts their bytes in place.
    """
    width = out_RD.shape[1]
    stride = codes_RB.shape[1]
    out_bits_RD = out_RD.view(np.int32)
    word = np.empty(1, np.int32)
    as_float = word.view(np.float32)
    mask = (1 << bits) - 1
    wrong = 0
    for row in range(start, stop):
        param = params_R[row]
        if param == 0:
            value = _u32(0)
            for j in range(4 if stride >= 4 else 0):
                value |= _u32(codes_RB[row, j]) << _u32(8 * j)
            for d in range(width):
                out_bits_RD[row, d] = _i32(value)
            continue
        word[0] = _i32(param & _u32(0xFFFF)) << _i32(15)
        scale = as_float[0]
        if not (scale >= _LEAST_SCALE * _LEAST_REFIT and scale <= _f32(2) * _GREATEST_SCALE):
            wrong += 1
        shift = _f32(np.int16(param >> _u32(16))) / fine
        line = codes_RB[row]
        out = out_RD[row]
        if bits == 8:
            for d in range(width):
                out[d] = scale * (_f32(line[d]) + shift)
        elif bits == 4:
            for j in range(width // 2):
                out[2 * j] = scale * (_f32(line[j] & 15) + shift)
                out[2 * j + 1] = scale * (_f32(line[j] >> 4) + shift)
        elif bits == 2:
            for j in range(width // 4):
                out[4 * j] = scale * (_f32(line[j] & 3) + shift)
                out[4 * j + 1] = scale * (_f32((line[j] >> 2) & 3) + shift)
                out[4 * j + 2] = scale * (_f32((line[j] >> 4) & 3) + shift)
                out[4 * j + 3] = scale * (_f32(line[j] >> 6) + shift)
        else:
            for g in range(width // 8):
                group = _i32(line[3 * g]) | _i32(line[3 * g + 1]) << 8 | _i32(line[3 * g + 2]) << 16
                for k in range(8):
                    out[8 * g + k] = scale * (_f32((group >> (3 * k)) & 7) + shift)
        whole = width if bits == 8 else width // (8 // bits) * (8 // bits)
        if bits == 3:
            whole = width // 8 * 8
        for d in range(whole, width):
            place = d * bits
            pair = _i32(line[place >> 3])
            if (place >> 3) + 1 < stride:
                pair |= _i32(line[(place >> 3) + 1]) << 8
            out[d] = scale * (_f32((pair >> (place & 7)) & mask) + shift)
    return wrong
