"""Which rows of a frozen selection are still to be copied, a slice or a push at a time.

A selection is `first | second` (two bitmaps, so that nothing needs to be folded while training
waits), or, where both are empty, every touched row. `copied` has a bit for each row that is taken
care of, by the one who set it. A row whose touched bit is off when it is taken is *absent*: it was
deleted.

Nobody needs a lock for that. A reader lists rows, copies them, and then sets their bits: a row
whose bit was set meanwhile has been saved by a writer, and the copy, which may be torn, is dropped.
A writer sets bits before it changes a row, and saves those rows whose bits it was the first to set.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import F32, I64, U64, Bools
from emberkeep.kernels._intrinsics import fetch_or, prefetch_row
from emberkeep.kernels._jit import kernel
from emberkeep.kernels._jobs import writer
from emberkeep.kernels._lanes import copy_row
from emberkeep.kernels._streams import fence, fills_lines, stream_row
from emberkeep.kernels.batch_rows import count_ones
from emberkeep.kernels.initial_values import AHEAD

_ONE = np.uint64(1)
_ALL = np.uint64(2**64 - 1)


@kernel
def list_slice(
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
    """Up to `limit` selected rows from `word` on that are not copied, ascending; returns how many,
    and where to go on."""
    every = first.size == 0
    taken = 0
    while word < last_word:
        trained = touched[word]
        selected = trained if every else first[word] | second[word]
        selected &= ~copied[word]
        if selected == _ALL and trained == _ALL and taken + 64 <= limit:
            for i in range(64):
                rows[taken + i] = (word << 6) + i
                present[taken + i] = True
            taken += 64
        elif selected:
            if taken + count_ones(selected) > limit:
                break
            while selected:
                bit = selected & (~selected + _ONE)
                rows[taken] = (word << 6) + count_ones(bit - _ONE)
                present[taken] = (trained & bit) != 0
                taken += 1
                selected ^= bit
        word += 1
    return taken, word


@kernel
def claim(rows: I64, copied: U64, claimed: Bools) -> int:
    """Sets the bits of rows; says of each, where they ascend, whether nobody had set it, and of
    how many."""
    count = i = 0
    while i < rows.size:
        word = rows[i] >> 6
        bits = np.uint64(0)
        end = i
        while end < rows.size and rows[end] >> 6 == word:
            bits |= _ONE << np.uint64(rows[end] & 63)
            end += 1
        before = fetch_or(copied, word, bits)
        for j in range(i, end):
            claimed[j] = not before & (_ONE << np.uint64(rows[j] & 63))
            count += claimed[j]
        i = end
    return count


@kernel
def take_before_write(
    start: int,
    stop: int,
    first: U64,
    second: U64,
    touched: U64,
    copied: U64,
    written: I64,
    rows: I64,
    present: Bools,
) -> int:
    """Of the rows start..stop that are about to be written, takes those that are selected and not
    yet copied: they stand from `start` on. No row is given twice; -1 is none.

    With every touched row selected, a row that is not touched yet is marked as taken care of: it
    begins after the freeze and must not be found later.
    """
    every = first.size == 0
    at = start
    for i in range(start, stop):
        row = written[i]
        if row < 0:
            continue
        word = row >> 6
        bit = _ONE << np.uint64(row & 63)
        if copied[word] & bit:
            continue
        if not every and not (first[word] | second[word]) & bit:
            continue
        trained = touched[word] & bit
        if fetch_or(copied, word, bit) & bit:
            continue
        if every and not trained:
            continue
        rows[at] = row
        present[at] = trained != 0
        at += 1
    return at - start


@kernel
def copy_out(
    start: int, stop: int, rows_U: I64, plane_RD: F32, past_cache: bool, out_UD: F32
) -> None:
    """Copies rows from wherever they stand to start..stop of `out_UD`; past the caches, where
    nobody looks at the copies soon."""
    streamed = past_cache and fills_lines(out_UD)
    for i in range(start, stop):
        if i + AHEAD < stop:
            prefetch_row(plane_RD, rows_U[i + AHEAD])
        if streamed:
            stream_row(out_UD, i, plane_RD, rows_U[i])
        else:
            copy_row(out_UD, i, plane_RD, rows_U[i])
    fence()


write_copy_out = writer(copy_out)
write_take_before_write = writer(take_before_write)
