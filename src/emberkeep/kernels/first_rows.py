"""Which rows of many pieces count: of each id of a table the first that is met."""

from __future__ import annotations

import numpy as np

from emberkeep._types import I32, I64, U64, Bools
from emberkeep.kernels._jit import kernel

_u64 = np.uint64
_ZERO, _ONE = _u64(0), _u64(1)


@kernel
def claim_fixed(
    tables_G: I32, counts_G: I64, ids: I64, bases_T: I64, limits_T: I64, bits: U64, kept: Bools,
    kept_G: I64,
) -> int:  # fmt: skip
    """Keeps the first of equal ids of fixed tables, group after group, and counts them.

    The ids of table t have the bits from `bases_T[t]` on; a table with a base below 0 is passed
    over. Returns a group whose ids lie outside its table, or -1: ids ascend within a group, so that
    its ends bound it.
    """
    row = np.int64(0)
    for g in range(tables_G.size):
        count = counts_G[g]
        base = bases_T[tables_G[g]]
        if base >= 0 and count > 0:
            if ids[row] < 0 or ids[row + count - 1] >= limits_T[tables_G[g]]:
                return g
            found = np.int64(0)
            for i in range(row, row + count):
                place = base + ids[i]
                bit = _ONE << _u64(place & 63)
                if bits[place >> 6] & bit == _ZERO:
                    bits[place >> 6] |= bit
                    kept[i] = True
                    found += 1
            kept_G[g] = found
        row += count
    return -1
