"""Which rows of a frozen selection are still to be copied, a slice or a push at a time.

A selection is `first | second` (two bitmaps, so that nothing needs to be folded while training
waits), or, where both are empty, every touched row. `copied` has a bit for each row that is taken
care of. A row whose touched bit is off when it is taken is *absent*: it was deleted.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import I64, U64, Bools
from emberkeep.kernels._jit import kernel
from emberkeep.kernels.batch_rows import count_ones

_ONE = np.uint64(1)


@kernel
def take_slice(
    first: U64,
    second: U64,
    touched: U64,
    copied: U64,
    word: int,
    last_word: int,
    limit: int,
    rows: I64,
    present: Bools,
) -> tuple[int, int]:
    """Takes up to `limit` selected rows from `word` on; returns how many, and where to go on."""
    every = first.size == 0
    taken = 0
    while word < last_word:
        selected = touched[word] if every else first[word] | second[word]
        selected &= ~copied[word]
        if selected:
            if taken + count_ones(selected) > limit:
                break
            copied[word] |= selected
            trained = touched[word]
            while selected:
                bit = selected & (~selected + _ONE)
                rows[taken] = (word << 6) + count_ones(bit - _ONE)
                present[taken] = (trained & bit) != 0
                taken += 1
                selected ^= bit
        word += 1
    return taken, word


@kernel
def take_before_write(
    first: U64,
    second: U64,
    touched: U64,
    copied: U64,
    written: I64,
    rows: I64,
    present: Bools,
) -> int:
    """Of the rows about to be written, takes those that are selected and not yet copied.

    With every touched row selected, a row that is not touched yet is marked as taken care of: it
    begins after the freeze and must not be found later.
    """
    every = first.size == 0
    taken = 0
    for i in range(written.size):
        row = written[i]
        word = row >> 6
        bit = _ONE << np.uint64(row & 63)
        if copied[word] & bit:
            continue
        trained = touched[word] & bit
        if every:
            copied[word] |= bit
            if not trained:
                continue
        elif not (first[word] | second[word]) & bit:
            continue
        copied[word] |= bit
        rows[taken] = row
        present[taken] = trained != 0
        taken += 1
    return taken
