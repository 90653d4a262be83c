"""What a grid of pieces asks of arrays: packed ids, sums that ignore order, which ids come first.

A row is named by (table, id), the table being a number. Rows of a piece stand in groups of one
table, ids ascending within a group.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import I32, I64, U8, U64, Bools
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.hash_index import GOLDEN, hash_id, mix64

_u64 = np.uint64
_ZERO, _ONE, _S7, _S8, _S32, _S63 = (_u64(n) for n in (0, 1, 7, 8, 32, 63))
_LOW7, _HIGH, _BYTE = _u64(0x7F), _u64(0x80), _u64(0xFF)
_FACTOR = _u64(0xD6E8FEB86659FD93)

MOST_BYTES_OF_ID = 10


@kernel
def pack_ids(ids: I64, counts_G: I64, out: U8) -> int:
    """Each group as its first id in 8 bytes and gaps of 7 bits a byte; returns the bytes used."""
    at = 0
    row = 0
    for group in range(counts_G.size):
        for i in range(counts_G[group]):
            if i == 0:
                value = _u64(ids[row])
                for _ in range(8):
                    out[at] = np.uint8(value & _BYTE)
                    value >>= _S8
                    at += 1
            else:
                value = _u64(ids[row]) - _u64(ids[row - 1])
                while value > _LOW7:
                    out[at] = np.uint8((value & _LOW7) | _HIGH)
                    value >>= _S7
                    at += 1
                out[at] = np.uint8(value)
                at += 1
            row += 1
    return at


@kernel
def unpack_ids(packed: U8, counts_G: I64, ids: I64) -> int:
    """The way back; returns the bytes used, or -1 where they end early or do not ascend."""
    at = 0
    row = 0
    for group in range(counts_G.size):
        value = _ZERO
        for i in range(counts_G[group]):
            if i == 0:
                if at + 8 > packed.size:
                    return -1
                value = _ZERO
                for byte in range(8):
                    value |= _u64(packed[at]) << _u64(8 * byte)
                    at += 1
            else:
                gap = _ZERO
                shift = _ZERO
                while True:
                    if at >= packed.size or shift > _S63:
                        return -1
                    part = _u64(packed[at])
                    at += 1
                    gap |= (part & _LOW7) << shift
                    shift += _S7
                    if part < _HIGH:
                        break
                value += gap
                if np.int64(value) <= ids[row - 1]:
                    return -1
            ids[row] = np.int64(value)
            row += 1
    return at


@inline
def key_of(table: int, identity: int) -> np.uint64:
    return mix64(hash_id(identity) + _u64(table) * GOLDEN)


@kernel
def hash_column(column_RB: U8, salt: np.uint64, sums_R: U64) -> None:
    """Adds a hash of each row's bytes to the row's sum; the salt differs by column."""
    rows, width = column_RB.shape
    whole = width // 8
    for r in range(rows):
        h = salt
        for w in range(whole):
            word = _ZERO
            for b in range(8):
                word |= _u64(column_RB[r, 8 * w + b]) << _u64(8 * b)
            h = (h ^ word) * _FACTOR
            h ^= h >> _S32
        for b in range(8 * whole, width):
            h = (h ^ _u64(column_RB[r, b])) * _FACTOR
            h ^= h >> _S32
        sums_R[r] += mix64(h)


@kernel
def sum_of_rows(tables: I32, ids: I64, sums_R: U64) -> np.uint64:
    """One number for a set of rows, whatever their order: sums of disjoint sets add up."""
    total = _ZERO
    for r in range(ids.size):
        total += mix64(sums_R[r] + key_of(tables[r], ids[r]))
    return total


@kernel
def claim_ids(
    starts_G: I64, counts_G: I64, ids: I64, rows_H: I64, kept: Bools, kept_G: I64
) -> None:  # fmt: skip
    """Keeps the first of equal ids, group after group, whatever ids there are, and counts them;
    `rows_H` is a power of two, all -1, larger than the ids are many."""
    mask = _u64(rows_H.size - 1)
    for g in range(starts_G.size):
        found = np.int64(0)
        for i in range(starts_G[g], starts_G[g] + counts_G[g]):
            at = np.int64(hash_id(ids[i]) & mask)
            while rows_H[at] >= 0 and ids[rows_H[at]] != ids[i]:
                at = np.int64((_u64(at) + _ONE) & mask)
            if rows_H[at] < 0:
                rows_H[at] = i
                kept[i] = True
                found += 1
        kept_G[g] = found
