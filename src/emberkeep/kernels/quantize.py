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

import numpy as np

from emberkeep._types import F32, I32, U8, U32
from emberkeep.kernels._intrinsics import prefetch_row
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._tiles import (
    LANES,
    SPLIT,
    errors,
    load_rows,
    moments,
    packed,
    put_word,
    search,
)

_f32 = np.float32
_i32 = np.int32
_u32 = np.uint32

# The tile is x[LANES * column + lane]. What is known of each lane lies in one flat array `s`, one
# group of LANES after the other: with one base and constant distances the compiler knows that
# groups do not overlap, which is what lets it vectorise.
_LOW, _HIGH, _UNIT = 0 * LANES, 1 * LANES, 2 * LANES  # in the order that a search expects
_SCALE, _SHIFT, _LOSS = 3 * LANES, 4 * LANES, 5 * LANES  # these too
_INVERSE = 6 * LANES
# The grid of the least-squares fit, and its sums.
_SCALE_A, _INVERSE_A, _SHIFT_A, _ERROR_A = 7 * LANES, 8 * LANES, 9 * LANES, 10 * LANES
_CODES, _SQUARES, _VALUES, _PRODUCTS = 11 * LANES, 12 * LANES, 13 * LANES, 14 * LANES
_WORD = 15 * LANES
_GROUPS = 16

_SEARCHED, _CONSTANT, _RAW = 0, 1, 2

# Beyond these the grid's arithmetic would leave the normal float32 numbers.
_LEAST_SCALE, _GREATEST_SCALE = _f32(2.0**-100), _f32(2.0**100)
# Codes that are all equal have no slope to fit; the search itself ends far above this.
_LEAST_REFIT = _f32(2.0**-14)
_MOST_SHIFT = _f32(32767)
_INFINITY = 0x7F800000  # as bits
_SPLIT = _f32(SPLIT)
# Half a unit of the 9th bit, and a little for the roundings on the way: to nearest becomes upward.
_UPWARD = _f32(1 + 2.0**-9 + 2.0**-16)


@inline
def _grid(
    low: np.float32, high: np.float32, part: np.float32, fine: np.float32, rounding: np.float32
) -> tuple[np.float32, np.float32, np.float32]:
    """The storable grid over low..high whose step is that `part` of it: scale, inverse, shift."""
    wanted = (high - low) * part
    much = wanted * _SPLIT
    scale = much - (much - wanted)
    inverse = _f32(1) / scale
    return scale, inverse, np.floor(low * inverse * fine + rounding) * (_f32(1) / fine)


@inline
def _load(
    values_RD: F32, first: int, last: int, lanes: int, x: F32, s: F32, s_bits: I32, state: I32
) -> None:
    """Fills the tile with rows `first..last` and finds the range and the state of each lane."""
    width = values_RD.shape[1]
    load_rows(x, s, values_RD, first, last, _LOW, _HIGH)
    for w in range(lanes):
        least, most = s_bits[_LOW + w], s_bits[_HIGH + w]
        if most >= _INFINITY or least <= ~_INFINITY:
            state[w] = _RAW
            _clear(x, width, w, s)
        elif least == most:
            state[w] = _CONSTANT
            _clear(x, width, w, s)
        else:
            state[w] = _SEARCHED
            s_bits[_LOW + w] = least ^ ((least >> _i32(31)) & _i32(0x7FFFFFFF))
            s_bits[_HIGH + w] = most ^ ((most >> _i32(31)) & _i32(0x7FFFFFFF))


@inline
def _clear(x: F32, width: int, w: int, s: F32) -> None:
    """Zeros in the range 0..1 stand for a row that is not searched: its arithmetic stays tame."""
    s[_LOW + w] = _f32(0)
    s[_HIGH + w] = _f32(1)
    for d in range(width):
        x[d * LANES + w] = _f32(0)


@inline
def _whole_range(
    x: F32, width: int, lanes: int, top: np.float32, fine: np.float32, s: F32, state: I32
) -> None:
    """The grid over all of each lane's range, rounded outward so that no value is clipped."""
    part = _UPWARD / (top - _f32(1) / fine)
    for w in range(lanes):
        scale, inverse, shift = _grid(s[_LOW + w], s[_HIGH + w], part, fine, _f32(0))
        s[_SCALE + w] = scale
        s[_INVERSE + w] = inverse
        s[_UNIT + w] = inverse
        s[_SHIFT + w] = shift
    for w in range(lanes):
        scale = s[_SCALE + w]
        fits = (scale >= _LEAST_SCALE) & (scale <= _GREATEST_SCALE)
        if not (fits & (abs(s[_SHIFT + w] * fine) <= _MOST_SHIFT)):
            state[w] = _RAW
            s[_SCALE + w] = _f32(1)
            s[_INVERSE + w] = _f32(1)
            s[_UNIT + w] = _f32(1)
            s[_SHIFT + w] = _f32(0)
            _clear(x, width, w, s)


# In the loops over lanes below everything is loaded before anything is stored, and stored whether
# changed or not: a choice between two loaded values is vectorised, a conditional access is not.


@inline
def _refit(x: F32, width: int, lanes: int, top: np.float32, fine: np.float32, s: F32) -> None:
    """Fits the best grid once more, by least squares, to the codes that it gave; keeps the better.

    The search can only end on multiples of a bin; this takes the last few percent of loss for the
    price of one of its iterations.
    """
    for w in range(lanes):
        s[_INVERSE + w] = _f32(1) / s[_SCALE + w]
    moments(x, s, width, _INVERSE, _SHIFT, _CODES, top)
    part = _f32(1) / top
    count = _f32(width)
    for w in range(lanes):
        codes, squares = s[_CODES + w], s[_SQUARES + w]
        values, products = s[_VALUES + w], s[_PRODUCTS + w]
        scale, shift = s[_SCALE + w], s[_SHIFT + w]
        variance = max(squares * count - codes * codes, _f32(1))
        slope = (products * count - codes * values) / variance
        low = scale * ((values - slope * codes) / count + shift)
        high = low + scale * slope * top
        scale_a, inverse_a, shift_a = _grid(low, high, part, fine, _f32(0.5))
        s[_SCALE_A + w] = scale_a
        s[_INVERSE_A + w] = inverse_a
        s[_SHIFT_A + w] = shift_a
    errors(x, s, width, _INVERSE_A, _SHIFT_A, _ERROR_A, top)
    for w in range(lanes):
        scale_a, shift_a, error_a = s[_SCALE_A + w], s[_SHIFT_A + w], s[_ERROR_A + w]
        inverse_a, inverse = s[_INVERSE_A + w], s[_INVERSE + w]
        scale, shift, loss, unit = s[_SCALE + w], s[_SHIFT + w], s[_LOSS + w], s[_UNIT + w]
        loss_a = error_a * (scale_a * unit) * (scale_a * unit)
        fits = (scale_a * unit >= _LEAST_REFIT) & (abs(shift_a * fine) <= _MOST_SHIFT)
        better = (loss_a < loss) & fits
        s[_SCALE + w] = scale_a if better else scale
        s[_SHIFT + w] = shift_a if better else shift
        s[_INVERSE + w] = inverse_a if better else inverse


@inline
def _pack(
    x: F32,
    width: int,
    bits: int,
    top: np.float32,
    s: F32,
    s_bits: I32,
    first: int,
    last: int,
    codes_RB: U8,
) -> None:
    """Writes the codes of a tile: column d takes bits d·bits.. of its row, lowest bit first.

    Columns that end on a byte boundary are put together in words of 32 bits, or 24 for 3 bits. All
    are stored as 32, where the row has that much room: what is too much is overwritten by the next.
    """
    columns = 8 if bits == 3 else 32 // bits
    nbytes = columns * bits // 8
    stride = codes_RB.shape[1]
    at = 0
    for start in range(0, width, columns):
        packed(x, s, start, min(start + columns, width), bits, _INVERSE, _SHIFT, _WORD, top)
        if stride - at >= 4:
            for w in range(last - first):
                put_word(codes_RB, first + w, at, s_bits[_WORD + w])
        else:
            for w in range(last - first):
                word = s_bits[_WORD + w]
                for j in range(min(nbytes, stride - at)):
                    codes_RB[first + w, at + j] = np.uint8((word >> _i32(8 * j)) & _i32(255))
        at += nbytes


@kernel
def encode_rows(
    values_RD: F32,
    start: int,
    stop: int,
    lanes: int,
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

    `lanes` is LANES. It is an argument because loops of a known, small length are unrolled, and
    what is unrolled is no longer vectorised: that costs half of the speed.
    """
    width = values_RD.shape[1]
    stride = codes_RB.shape[1]
    top = _f32((1 << bits) - 1)
    bits_RD = values_RD.view(np.int32)
    x = np.empty(LANES * width, np.float32)
    s = np.empty(LANES * _GROUPS, np.float32)
    s_bits = s.view(np.int32)
    state = np.empty(LANES, np.int32)
    for first in range(start, stop, LANES):
        last = min(first + LANES, stop)
        _load(values_RD, first, last, lanes, x, s, s_bits, state)
        for row in range(last, min(last + LANES, stop)):  # they come while this tile is searched
            prefetch_row(values_RD, row)
        _whole_range(x, width, lanes, top, fine, s, state)
        if iterations > 0:
            # Losses are in units of the whole range's step, which neither over- nor underflow.
            errors(x, s, width, _INVERSE, _SHIFT, _LOSS, top)
            search(x, s, width, iterations, _LOW, _SCALE, top, fine, bins, _MOST_SHIFT)
            _refit(x, width, lanes, top, fine, s)
        _pack(x, width, bits, top, s, s_bits, first, last, codes_RB)
        for w in range(last - first):
            row = first + w
            raw_R[row] = 0
            if state[w] == _SEARCHED:
                shift = _u32(_i32(s[_SHIFT + w] * fine) & _i32(0xFFFF))
                params_R[row] = _u32(s_bits[_SCALE + w] >> _i32(15)) | (shift << _u32(16))
                continue
            params_R[row] = _u32(0)
            for j in range(stride):
                codes_RB[row, j] = 0
            if state[w] == _CONSTANT and stride >= 4:
                word = _u32(bits_RD[row, 0])
                for j in range(4):
                    codes_RB[row, j] = (word >> _u32(8 * j)) & _u32(255)
            else:
                raw_R[row] = 1


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
