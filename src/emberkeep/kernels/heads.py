"""The heads of many pieces at once: which rows they hold, by name."""

from __future__ import annotations

import numpy as np

from emberkeep._types import I32, I64, U8
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.grid_arrays import unpack_ids


@inline
def _word(data: U8, at: int) -> np.int64:
    value = np.int64(0)
    for byte in range(4):
        value |= np.int64(data[at + byte]) << np.int64(8 * byte)
    return value


@kernel
def count_groups(data: U8, starts_P: I64, nbytes_P: I64, groups_P: I64) -> int:
    """How many groups each head has; returns the first head that has no room for them, or -1."""
    for p in range(starts_P.size):
        groups_P[p] = _word(data, starts_P[p]) if nbytes_P[p] >= 4 else 0
        if nbytes_P[p] < 4 + 8 * groups_P[p]:
            return p
    return -1


@kernel
def unpack_heads(
    data: U8, starts_P: I64, nbytes_P: I64, rows_P: I64, groups_P: I64, tables_G: I32,
    counts_G: I64, ids: I64,
) -> int:  # fmt: skip
    """The groups and ids of heads one after the other; returns the first that does not hold the
    rows that it should, or -1."""
    first = 0
    row = 0
    for p in range(starts_P.size):
        last = first + groups_P[p]
        at = starts_P[p] + 4
        rows = 0
        for g in range(first, last):
            tables_G[g] = np.int32(_word(data, at))
            counts_G[g] = _word(data, at + 4)
            rows += counts_G[g]
            at += 8
        if rows != rows_P[p]:
            return p
        packed = data[at : starts_P[p] + nbytes_P[p]]
        if unpack_ids(packed, counts_G[first:last], ids[row : row + rows]) != packed.size:
            return p
        first = last
        row += rows
    return -1
