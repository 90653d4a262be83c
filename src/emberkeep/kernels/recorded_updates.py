"""A push that also says by what it changes rows: old XOR new, taken while the row is in the cache.

Rows are updated a few at a time by the optimizer's own kernel, so what a push does to them is the
same bits with and without a record of it. Between a look at the old row and one at the new there
is nothing but the update, and the record is all that is written beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emberkeep._types import F32, I32, I64, U32, U64, Bools
from emberkeep.kernels import optimizers
from emberkeep.kernels._intrinsics import prefetch_row, set_bit, test_bit
from emberkeep.kernels._jit import inline, kernel, variant
from emberkeep.kernels._jobs import writer
from emberkeep.kernels._words import copy_words, xor_words
from emberkeep.kernels.initial_values import AHEAD
from emberkeep.kernels.optimizers import (
    adagrad,
    adam,
    clip_rows,
    momentum,
    row_wise_adagrad,
    sgd,
)

# Rows that are updated at a time: they, their gradients and their records fit the first cache.
_BLOCK = 32


@kernel
def arrange(
    rows: I64, k: int, touched: U64, dirty: U64, bounds: I64, at: I64, stripes: I64, known: Bools
) -> int:
    """Where the record of each row goes, grouped by slot, and whether the row is trained already.

    Those of slot s go to bounds[s]:bounds[s + 1], with their stripes. Trained rows are marked as
    dirty; returns how many are not trained.
    """
    bounds[:] = 0
    parts = 1.0 / k
    fresh = 0
    for i in range(rows.size):
        row = rows[i]
        # A division costs more than all the rest: this one is by multiplication, and put right.
        stripe = np.int64(np.float64(row) * parts)
        slot = row - stripe * k
        if slot < 0:
            stripe -= 1
            slot += k
        elif slot >= k:
            stripe += 1
            slot -= k
        stripes[i] = stripe
        at[i] = slot
        bounds[slot + 1] += 1
        known[i] = test_bit(touched, row)
        if known[i]:
            set_bit(dirty, row)
        else:
            fresh += 1
    for s in range(k):
        bounds[s + 1] += bounds[s]
    starts = bounds.copy()
    found = stripes.copy()
    for i in range(rows.size):
        slot = at[i]
        at[i] = starts[slot]
        stripes[starts[slot]] = found[i]
        starts[slot] += 1
    return fresh


@inline
def _keep(
    first: int, last: int, stop: int, rows: I64, at: I64, known: Bools, planes: tuple[U32, ...],
    records_UW: U32,
) -> None:  # fmt: skip
    """Writes old rows to their records: zeros where they were not trained."""
    for i in range(first, last):
        column = 0
        for plane_RV in planes:
            if plane_RV.shape[0] == 0:
                continue
            if i + AHEAD < stop:
                prefetch_row(plane_RV, rows[i + AHEAD])
            if known[i]:
                copy_words(records_UW, at[i], column, plane_RV, rows[i])
            else:
                for w in range(plane_RV.shape[1]):
                    records_UW[at[i], column + w] = np.uint32(0)
            column += plane_RV.shape[1]


@inline
def _add(
    first: int, last: int, rows: I64, at: I64, planes: tuple[U32, ...], records_UW: U32
) -> None:
    """Adds new rows to their records, which are differences then."""
    for i in range(first, last):
        column = 0
        for plane_RV in planes:
            if plane_RV.shape[0] == 0:
                continue
            xor_words(records_UW, at[i], column, plane_RV, rows[i])
            column += plane_RV.shape[1]


@inline
def _one(weight_RD: F32) -> tuple[U32, ...]:
    return (weight_RD.view(np.uint32),)


@inline
def _two(weight_RD: F32, state_RV: F32) -> tuple[U32, ...]:
    return (weight_RD.view(np.uint32), state_RV.view(np.uint32))


@inline
def _four(weight_RD: F32, first_RD: F32, second_RD: F32, step_R1: I32) -> tuple[U32, ...]:
    return (
        weight_RD.view(np.uint32), first_RD.view(np.uint32), second_RD.view(np.uint32),
        step_R1.view(np.uint32),
    )  # fmt: skip


def _record(
    start: int, stop: int, at: I64, known: Bools, records_UW: U32, done: I64, max_norm: float,
    rows: I64, *args: Any,
) -> None:  # fmt: skip
    planes = words_of(*args[WEIGHT:])  # type: ignore[name-defined]  # noqa: F821
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        _keep(first, last, stop, rows, at, known, planes, records_UW)
        update(first, last, rows, *args)  # type: ignore[name-defined]  # noqa: F821
        if max_norm > 0.0:
            clip_rows(first, last, rows, max_norm, args[WEIGHT])  # type: ignore[name-defined]  # noqa: F821
        _add(first, last, rows, at, planes, records_UW)
    done[0] = 1


def _recording(
    update: Callable[..., Any], words_of: Callable[..., Any], planes: int
) -> Callable[..., Any]:
    """The writer of a kernel that updates rows and records it; planes are its last arguments."""
    name = f"record_{update.__name__}"
    return writer(variant(_record, name, update=update, words_of=words_of, WEIGHT=-planes))


RECORDING: dict[Callable[..., object], Callable[..., object]] = {
    optimizers.write_sgd: _recording(sgd, _one, 1),
    optimizers.write_momentum: _recording(momentum, _two, 2),
    optimizers.write_adagrad: _recording(adagrad, _two, 2),
    optimizers.write_row_wise_adagrad: _recording(row_wise_adagrad, _two, 2),
    optimizers.write_adam: _recording(adam, _four, 4),
}
"""Of the writer of each optimizer's kernel, that of the one which records, too."""
