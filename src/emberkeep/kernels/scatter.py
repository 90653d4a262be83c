"""Whole rows to places anywhere in a plane.

Places that follow each other lie on different pages, and to find a page takes longer than to write
a row: a few dozen places are asked for at once, so that the processor looks for several.
"""

from __future__ import annotations

from emberkeep._types import F32, I64, U64
from emberkeep.kernels._intrinsics import _prefetch, prefetch_row, set_bit
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._jobs import writer
from emberkeep.kernels._lanes import copy_row
from emberkeep.kernels._streams import fence, fills_lines, stream_row
from emberkeep.kernels.initial_values import AHEAD

_TOGETHER = 64
_SOON = 4


@inline
def _ask_for(start: int, stop: int, places_U: I64, plane_RD: F32) -> None:
    for i in range(start, stop):
        _prefetch(plane_RD, places_U[i], 0)


@kernel
def scatter(start: int, stop: int, values_UD: F32, places_U: I64, plane_RD: F32) -> None:
    """Writes rows start..stop of the values, each to its place."""
    streamed = fills_lines(plane_RD)
    for first in range(start, stop, _TOGETHER):
        last = min(first + _TOGETHER, stop)
        _ask_for(first, last, places_U, plane_RD)
        if streamed:
            for i in range(first, last):
                stream_row(plane_RD, places_U[i], values_UD, i)
        else:
            for i in range(first, last):
                if i + _SOON < last:
                    prefetch_row(plane_RD, places_U[i + _SOON])
                copy_row(plane_RD, places_U[i], values_UD, i)
    fence()


@kernel
def scatter_rows(
    start: int, stop: int, values_VD: F32, rows_U: I64, places_U: I64, plane_RD: F32
) -> None:
    """Writes rows of the values, which stand anywhere, each to its place."""
    streamed = fills_lines(plane_RD)
    for first in range(start, stop, _TOGETHER):
        last = min(first + _TOGETHER, stop)
        _ask_for(first, last, places_U, plane_RD)
        for i in range(first, last):
            if i + AHEAD < stop:
                prefetch_row(values_VD, rows_U[i + AHEAD])
            if streamed:
                stream_row(plane_RD, places_U[i], values_VD, rows_U[i])
            else:
                if i + _SOON < last:
                    prefetch_row(plane_RD, places_U[i + _SOON])
                copy_row(plane_RD, places_U[i], values_VD, rows_U[i])
    fence()


@kernel
def mark(start: int, stop: int, places_U: I64, touched: U64, dirty: U64) -> None:
    """Sets the touched and the dirty bit of places start..stop."""
    for i in range(start, stop):
        set_bit(touched, places_U[i])
        set_bit(dirty, places_U[i])


write_scatter = writer(scatter)
write_scatter_rows = writer(scatter_rows)
write_mark = writer(mark)
