"""Sums of rows of bytes over GF(2^8), four or more bytes at a time.

Rows are 32-bit words here; a word is four elements of the field. A product is built from the
doublings of a word, each a few shifts and masks on all four elements at once, which vectorise over
the words of a row. Times 1 is plain XOR.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from emberkeep._types import I64, U32, U64
from emberkeep.kernels._intrinsics import numbers_at, prefetch_row, test_bit, words_at
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._jobs import writer
from emberkeep.kernels._words import copy_words, xor_words

_HIGH = np.uint32(0x80808080)
_LOW = np.uint32(0x7F7F7F7F)
_REDUCTION = np.uint32(0x1D)
_ONE = np.uint32(1)
_SEVEN = np.uint32(7)
_BIT = np.uint64(1)
_AHEAD = 16


@inline
def _times(word: np.uint32, coefficient: np.uint32) -> np.uint32:
    total = np.uint32(0)
    for _ in range(8):
        total ^= word & (np.uint32(0) - (coefficient & _ONE))
        coefficient >>= _ONE
        high = word & _HIGH
        word = ((word & _LOW) << _ONE) ^ ((high >> _SEVEN) * _REDUCTION)
    return total


@kernel
def add_product(
    start: int,
    stop: int,
    target_TW: U32,
    at: I64,
    first: int,
    rows_UW: U32,
    coefficient: np.uint32,
) -> None:
    """target[first + at[i]] += coefficient * rows[i] for i in start..stop, `at` being distinct."""
    width = target_TW.shape[1]
    for i in range(start, stop):
        row = first + at[i]
        if i + _AHEAD < stop:
            prefetch_row(target_TW, first + at[i + _AHEAD])
        if coefficient == _ONE:
            xor_words(target_TW, row, 0, rows_UW, i)
        else:
            for w in range(width):
                target_TW[row, w] ^= _times(rows_UW[i, w], coefficient)


write_add_product = writer(add_product)


@kernel
def add_products(start: int, stop: int, bounds: I64, table_S8: I64) -> None:
    """`add_product` of sums bounds[h]:bounds[h + 1] for h in start..stop, those of one h in turn.

    Each is a row of a table: target, its shape, `at`, `first`, the rows, how many and coefficient;
    arrays by their addresses.
    """
    for s in range(bounds[start], bounds[stop]):
        target_TW = carray(words_at(table_S8[s, 0]), (table_S8[s, 1], table_S8[s, 2]))
        at = carray(numbers_at(table_S8[s, 3]), (table_S8[s, 6],))
        rows_UW = carray(words_at(table_S8[s, 5]), (table_S8[s, 6], table_S8[s, 2]))
        add_product(
            0, table_S8[s, 6], target_TW, at, table_S8[s, 4], rows_UW, np.uint32(table_S8[s, 7])
        )


write_add_products = writer(add_products)


@kernel
def group_by_slot(rows: I64, k: int, bounds: I64, order: I64) -> None:
    """Sorts positions of rows by slot, stably: those of slot s at bounds[s]:bounds[s + 1]."""
    bounds[:] = 0
    for i in range(rows.size):
        bounds[rows[i] % k + 1] += 1
    for s in range(k):
        bounds[s + 1] += bounds[s]
    starts = bounds.copy()
    for i in range(rows.size):
        slot = rows[i] % k
        order[starts[slot]] = i
        starts[slot] += 1


@kernel
def capture(rows: I64, k: int, captured: U64, bounds: I64, out: I64) -> int:
    """The rows whose bit in `captured` is not set yet, grouped by slot; sets the bits.

    Returns how many there are; those of slot s stand at bounds[s]:bounds[s + 1].
    """
    bounds[:] = 0
    kept = np.empty(rows.size, np.int64)
    count = 0
    for i in range(rows.size):
        row = rows[i]
        bit = _BIT << np.uint64(row & 63)
        if not captured[row >> 6] & bit:
            captured[row >> 6] |= bit
            kept[count] = row
            count += 1
            bounds[row % k + 1] += 1
    for s in range(k):
        bounds[s + 1] += bounds[s]
    starts = bounds.copy()
    for i in range(count):
        slot = kept[i] % k
        out[starts[slot]] = kept[i]
        starts[slot] += 1
    return count


@kernel
def add_plane(
    start: int, stop: int, rows: I64, plane_RV: U32, touched: U64, column: int, fresh: bool,
    out_UW: U32,
) -> None:  # fmt: skip
    """Adds one plane of rows to records, from `column` on: old records become differences.

    Where they are `fresh` the plane is written instead. A row that is not trained is zeros.
    """
    for i in range(start, stop):
        row = rows[i]
        if i + _AHEAD < stop:
            prefetch_row(plane_RV, rows[i + _AHEAD])
        if test_bit(touched, row):
            if fresh:
                copy_words(out_UW, i, column, plane_RV, row)
            else:
                xor_words(out_UW, i, column, plane_RV, row)
        elif fresh:
            for w in range(plane_RV.shape[1]):
                out_UW[i, column + w] = np.uint32(0)


write_add_plane = writer(add_plane)


@kernel
def put_records(planes: tuple[U32, ...], rows: I64, start: int, stop: int, records_UW: U32) -> None:
    """Writes records back to the planes of their rows."""
    for i in range(start, stop):
        row = rows[i]
        column = 0
        for plane_RV in planes:
            for w in range(plane_RV.shape[1]):
                plane_RV[row, w] = records_UW[i, column + w]
            column += plane_RV.shape[1]


@kernel
def solve_rows(
    start: int, stop: int, stripes: I64, k: int, slot: int, plane_RV: U32, parity_TW: U32,
    first: int, column: int, others_M4: I64,
) -> None:  # fmt: skip
    """Writes a plane of rows of one slot: the parity of their stripes, from `column` on, plus the
    rows of all other members.

    Each of those is a row of a table: its plane, how many rows that has, which are trained, and
    its slot; arrays by their addresses. Rows that are not trained, or beyond the end, are zeros.
    """
    width = plane_RV.shape[1]
    for i in range(start, stop):
        row = stripes[i] * k + slot
        soon = stripes[min(i + _AHEAD, stop - 1)] * k
        prefetch_row(plane_RV, soon + slot)
        parity = first + stripes[i]
        for w in range(width):
            plane_RV[row, w] = parity_TW[parity, column + w]
        for m in range(others_M4.shape[0]):
            count, other_slot = others_M4[m, 1], others_M4[m, 3]
            other_RV = carray(words_at(others_M4[m, 0]), (count, width))
            touched = carray(numbers_at(others_M4[m, 2]), ((count + 63) >> 6,))
            if soon + other_slot < count:
                prefetch_row(other_RV, soon + other_slot)
            other = stripes[i] * k + other_slot
            if other < count and touched[other >> 6] >> (other & 63) & 1:
                xor_words(plane_RV, row, 0, other_RV, other)


write_solve_rows = writer(solve_rows)


@kernel
def add_member(
    start: int, stop: int, stripes: I64, k: int, target_TW: U32, first: int, column: int,
    slot: int, plane_RV: U32, touched: U64, coefficient: np.uint32,
) -> None:  # fmt: skip
    """Adds coefficient * a plane of the rows of one slot to row `first + stripe` of a target, from
    `column` on.

    Rows that are not trained, or beyond the end of the plane, are zeros.
    """
    for i in range(start, stop):
        row = stripes[i] * k + slot
        if i + _AHEAD < stop and stripes[i + _AHEAD] * k + slot < plane_RV.shape[0]:
            prefetch_row(plane_RV, stripes[i + _AHEAD] * k + slot)
        if row < plane_RV.shape[0] and test_bit(touched, row):
            target = first + stripes[i]
            if coefficient == _ONE:
                xor_words(target_TW, target, column, plane_RV, row)
            else:
                for w in range(plane_RV.shape[1]):
                    target_TW[target, column + w] ^= _times(plane_RV[row, w], coefficient)


write_add_member = writer(add_member)
