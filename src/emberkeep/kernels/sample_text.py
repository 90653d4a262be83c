"""From bytes to samples: Criteo's lines, and categories hashed to ids."""

from __future__ import annotations

import math

import numpy as np

from emberkeep._types import F32, I64, U8
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.hash_index import GOLDEN, mix64

FIELD_SHIFT = 33
"""A dynamic Criteo id is field · 2^33 + value; values have 32 bits, the one above is `missing`."""

_TAB = 9
_NEWLINE = 10
_RETURN = 13
_MINUS = 45
_ZERO = 48
_DYNAMIC_MASK = np.uint64((1 << 62) - 1)
_BYTE_STEP = np.uint64(0x100000001B3)
_BYTE_START = np.uint64(0xCBF29CE484222325)


@inline
def _into(word: np.uint64, size: np.int64) -> np.int64:
    """A hash as an id: 1..size-1, 0 being the missing value; 62 bits if the size is 0."""
    if size == 0:
        return np.int64(word & _DYNAMIC_MASK)
    return np.int64(word % np.uint64(size - 1)) + 1


@inline
def _hex_digit(byte: np.uint8) -> np.int64:
    """The value of a hexadecimal digit of either case, or -1."""
    code = np.int64(byte)
    if 48 <= code <= 57:
        return code - 48
    code |= 32
    if 97 <= code <= 102:
        return code - 87
    return np.int64(-1)


@inline
def _parse_line(
    text: U8,
    at: int,
    labelled: bool,
    sizes_F: I64,
    dense_N: F32,
    ids_FB: I64,
    labels_B: F32,
    row: int,
) -> int:
    """Parses the line at `at`, which ends with a newline; returns where the next begins, or -1."""
    if labelled:
        label = np.int64(text[at]) - _ZERO
        if not 0 <= label <= 1 or text[at + 1] != _TAB:
            return -1
        labels_B[row] = label
        at += 2
    else:
        labels_B[row] = np.nan
    for j in range(dense_N.size):
        negative = text[at] == _MINUS
        if negative:
            at += 1
        value = np.int64(0)
        first = at
        while 0 <= np.int64(text[at]) - _ZERO <= 9:
            value = value * 10 + (np.int64(text[at]) - _ZERO)
            at += 1
        if text[at] != _TAB or at - first > 18 or (negative and at == first):
            return -1
        at += 1
        dense_N[j] = 0.0 if negative or value == 0 else math.log1p(np.float64(value))
    fields = sizes_F.size
    for f in range(fields):
        value = np.int64(0)
        first = at
        while True:
            digit = _hex_digit(text[at])
            if digit < 0:
                break
            value = (value << 4) | digit
            at += 1
        width = at - first
        if f < fields - 1:
            if text[at] != _TAB:
                return -1
        else:
            if text[at] == _RETURN:
                at += 1
            if text[at] != _NEWLINE:
                return -1
        if width > 8:
            return -1
        at += 1
        size = sizes_F[f]
        place = np.int64(f) << FIELD_SHIFT
        if width == 0:
            ids_FB[f, row] = place | (np.int64(1) << (FIELD_SHIFT - 1)) if size == 0 else 0
        elif size == 0:
            ids_FB[f, row] = place | value
        else:
            ids_FB[f, row] = _into(mix64(np.uint64(place | value) + GOLDEN), size)
    return at


@kernel
def parse_lines(
    text: U8,
    at: int,
    end: int,
    labelled: bool,
    sizes_F: I64,
    row: int,
    dense_BN: F32,
    ids_FB: I64,
    labels_B: F32,
) -> tuple[int, int, bool]:
    """Parses whole lines of text[at:end] into rows from `row` on, until rows or text run out.

    text[end - 1] must be a newline. Returns where the next line begins, the next free row, and
    whether the line there is malformed.
    """
    while row < labels_B.size and at < end:
        after = _parse_line(text, at, labelled, sizes_F, dense_BN[row], ids_FB, labels_B, row)
        if after < 0:
            return at, row, True
        at = after
        row += 1
    return at, row, False


@kernel
def skip_lines(text: U8, at: int, end: int, count: int) -> tuple[int, int]:
    """Passes over up to `count` lines of text[at:end]; returns where it stands and how many."""
    skipped = 0
    while skipped < count and at < end:
        while text[at] != _NEWLINE:
            at += 1
        at += 1
        skipped += 1
    return at, skipped


@kernel
def hash_integers(values: I64, size: int, ids: I64) -> None:
    """Ids 1..size-1 from integers."""
    for i in range(values.size):
        ids[i] = _into(mix64(np.uint64(values[i]) + GOLDEN), np.int64(size))


@kernel
def hash_strings(text: U8, offsets: I64, size: int, ids: I64) -> None:
    """Ids 1..size-1 from the strings text[offsets[i]:offsets[i+1]]; 62 bits if `size` is 0."""
    for i in range(ids.size):
        word = _BYTE_START
        for at in range(offsets[i], offsets[i + 1]):
            word = (word ^ np.uint64(text[at])) * _BYTE_STEP
        ids[i] = _into(mix64(word + GOLDEN), np.int64(size))
