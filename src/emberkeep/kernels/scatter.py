"""Whole rows to places anywhere in a plane."""

from __future__ import annotations

from typing import Any

from emberkeep.kernels._jit import kernel
from emberkeep.kernels._jobs import write_call
from emberkeep.kernels._lanes import copy_row
from emberkeep.kernels._memory import prefetch_row, set_bit
from emberkeep.kernels.hashing import F32, I64, U64
from emberkeep.kernels.initial import AHEAD


@kernel
def scatter(start: int, stop: int, values_UD: F32, places_U: I64, plane_RD: F32) -> None:
    """Writes rows start..stop of the values, each to its place."""
    for i in range(start, stop):
        if i + AHEAD < stop:
            prefetch_row(plane_RD, places_U[i + AHEAD])
        copy_row(plane_RD, places_U[i], values_UD, i)


@kernel
def scatter_apart(
    start: int, stop: int, values_VD: F32, rows_U: I64, places_U: I64, plane_RD: F32
) -> None:
    """Writes rows of the values, which stand anywhere, each to its place."""
    for i in range(start, stop):
        if i + AHEAD < stop:
            prefetch_row(plane_RD, places_U[i + AHEAD])
            prefetch_row(values_VD, rows_U[i + AHEAD])
        copy_row(plane_RD, places_U[i], values_VD, rows_U[i])


@kernel
def mark(start: int, stop: int, places_U: I64, touched: U64, dirty: U64) -> None:
    """Sets the touched and the dirty bit of places start..stop."""
    for i in range(start, stop):
        set_bit(touched, places_U[i])
        set_bit(dirty, places_U[i])


@kernel
def write_scatter(block: I64, *args: Any) -> None:
    write_call(scatter, block, args)


@kernel
def write_scatter_apart(block: I64, *args: Any) -> None:
    write_call(scatter_apart, block, args)


@kernel
def write_mark(block: I64, *args: Any) -> None:
    write_call(mark, block, args)
