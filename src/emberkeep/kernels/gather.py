"""The wanted rows of pieces, out of the bytes of a file and side by side.

A *segment* is a run of rows of one piece and one table: (its first row among all, how many rows it
has, where the body of its piece begins, how many rows that has, the segment's first row in it, and
where its first wanted row goes).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emberkeep.kernels._jit import kernel

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Units = npt.NDArray[np.uint8] | npt.NDArray[np.uint32]


@kernel
def gather(
    start: int, stop: int, segments_S6: I64, kept: Bools, data: Units, unit: int, before: int,
    width: int, out: Units,
) -> None:  # fmt: skip
    """Copies one column of the kept rows of segments start..stop.

    The column has `width` units of `unit` bytes a row and stands behind `before` bytes a row of the
    body; units that follow each other are copied as one.
    """
    for s in range(start, stop):
        row, count, body, rows, local, at = segments_S6[s]
        column = (body + before * rows) // unit + local * width
        i = 0
        while i < count:
            if not kept[row + i]:
                i += 1
                continue
            first = i
            while i < count and kept[row + i]:
                i += 1
            source, target = column + first * width, at * width
            for u in range((i - first) * width):
                out[target + u] = data[source + u]
            at += i - first


@kernel
def gather_ids(segments_S6: I64, kept: Bools, ids: I64, out: I64) -> None:
    """The ids of the kept rows of all segments."""
    for s in range(segments_S6.shape[0]):
        at = segments_S6[s, 5]
        for i in range(segments_S6[s, 0], segments_S6[s, 0] + segments_S6[s, 1]):
            if kept[i]:
                out[at] = ids[i]
                at += 1


@kernel
def starts(segments_S6: I64, kept: Bools, before: int, width: int, out: I64) -> None:
    """Where the kept rows of all segments begin in one column, counted in words of four bytes."""
    for s in range(segments_S6.shape[0]):
        row, count, body, rows, local, at = segments_S6[s]
        column = (body + before * rows) // 4 + local * width
        for i in range(count):
            if kept[row + i]:
                out[at] = column + i * width
                at += 1
