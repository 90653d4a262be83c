"""In which order rows come to stand as memory does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emberkeep.kernels._jit import inline, kernel

I64 = npt.NDArray[np.int64]

_u64 = np.uint64
_ZERO, _BITS, _WIDTH = _u64(0), _u64(11), _u64(64)
_DIGITS = 2**11
_MASK = _u64(_DIGITS - 1)


@inline
def _digit(identity: np.int64, low: np.int64, shift: np.uint64) -> np.int64:
    # Unsigned: the lowest and the highest id may be further apart than an id can be large.
    return np.int64(((_u64(identity) - _u64(low)) >> shift) & _MASK)


@kernel
def ascending(ids: I64, offsets_T: I64, order: I64, spare: I64) -> bool:
    """The positions of ids from lowest to highest, those of each table among themselves.

    Ids that ascend already cost one look; the others are sorted digit by digit. Returns whether
    there were any.
    """
    moved = False
    counts = np.empty(_DIGITS + 1, np.int64)
    for t in range(offsets_T.size - 1):
        first, last = offsets_T[t], offsets_T[t + 1]
        low = high = ids[first] if last > first else np.int64(0)
        ascend = True
        for i in range(first, last):
            order[i] = i
            ascend &= i == first or ids[i] > ids[i - 1]
            low, high = min(low, ids[i]), max(high, ids[i])
        if ascend:
            continue
        moved = True
        shift = _ZERO
        while shift < _WIDTH and (_u64(high) - _u64(low)) >> shift > _ZERO:
            counts[:] = 0
            for i in range(first, last):
                counts[1 + _digit(ids[i], low, shift)] += 1
            counts[0] = first
            for d in range(_DIGITS):
                counts[d + 1] += counts[d]
            for i in range(first, last):
                digit = _digit(ids[order[i]], low, shift)
                spare[counts[digit]] = order[i]
                counts[digit] += 1
            order[first:last] = spare[first:last]
            shift += _BITS
    return moved
