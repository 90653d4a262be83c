"""Where the living rows of a grid stand: (table, id) → row, and who ended whom.

Rows of all pieces stand one after the other in columns. `slots` is an array of row numbers plus
one, probed linearly; it has the newest row of each (table, id), so a version that arrives finds
what it ends with one look for each of its rows, however many pieces there are.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import I32, I64, U32
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.grid_arrays import key_of

_u64 = np.uint64
_ONE = _u64(1)


@inline
def _slot(slots: U32, tables: I32, ids: I64, table: int, identity: int) -> np.int64:
    """Where (table, id) stands, or the empty place where it would."""
    mask = _u64(slots.size - 1)
    at = key_of(table, identity) & mask
    while slots[at] != 0:
        row = np.int64(slots[at]) - 1
        if ids[row] == identity and tables[row] == table:
            break
        at = (at + _ONE) & mask
    return np.int64(at)


@kernel
def admit(
    slots: U32, tables: I32, ids: I64, deaths: I32, pieces: I32, births_P: I64, dead_P: I64,
    first: int, last: int,
) -> int:  # fmt: skip
    """Rows first:last begin to live, and end those of the same name that did; returns how many
    names are new. Of two with one birth the first stays, and the other never lived."""
    new = 0
    for row in range(first, last):
        at = _slot(slots, tables, ids, tables[row], ids[row])
        if slots[at] == 0:
            new += 1
            slots[at] = row + 1
            continue
        before = np.int64(slots[at]) - 1
        birth = births_P[pieces[row]]
        if births_P[pieces[before]] == birth:
            deaths[row] = birth
            dead_P[pieces[row]] += 1
        else:
            deaths[before] = birth
            dead_P[pieces[before]] += 1
            slots[at] = row + 1
    return new


@kernel
def enter(slots: U32, tables: I32, ids: I64, deaths: I32, first: int, last: int) -> int:
    """Rows first:last stand here now, those that have not ended; returns how many names are new."""
    new = 0
    for row in range(first, last):
        if deaths[row] == 0:
            at = _slot(slots, tables, ids, tables[row], ids[row])
            if slots[at] == 0:
                new += 1
            slots[at] = row + 1
    return new
