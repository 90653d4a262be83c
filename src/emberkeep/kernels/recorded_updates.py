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
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._jobs import write_call
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


@kernel
def record_sgd(
    start: int, stop: int, at: I64, known: Bools, records_UW: U32, done: I64, max_norm: float,
    rows: I64, grads_UD: F32, lr: np.float32, weight_RD: F32,
) -> None:  # fmt: skip
    planes = (weight_RD.view(np.uint32),)
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        _keep(first, last, stop, rows, at, known, planes, records_UW)
        sgd(first, last, rows, grads_UD, lr, weight_RD)
        if max_norm > 0.0:
            clip_rows(first, last, rows, max_norm, weight_RD)
        _add(first, last, rows, at, planes, records_UW)
    done[0] = 1


@kernel
def record_momentum(
    start: int, stop: int, at: I64, known: Bools, records_UW: U32, done: I64, max_norm: float,
    rows: I64, grads_UD: F32, lr: np.float32, factor: np.float32, nesterov: bool, weight_RD: F32,
    momentum_RD: F32,
) -> None:  # fmt: skip
    planes = (weight_RD.view(np.uint32), momentum_RD.view(np.uint32))
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        _keep(first, last, stop, rows, at, known, planes, records_UW)
        momentum(first, last, rows, grads_UD, lr, factor, nesterov, weight_RD, momentum_RD)
        if max_norm > 0.0:
            clip_rows(first, last, rows, max_norm, weight_RD)
        _add(first, last, rows, at, planes, records_UW)
    done[0] = 1


@kernel
def record_adagrad(
    start: int, stop: int, at: I64, known: Bools, records_UW: U32, done: I64, max_norm: float,
    rows: I64, grads_UD: F32, lr: np.float32, eps: np.float32, weight_RD: F32, accumulator_RD: F32,
) -> None:  # fmt: skip
    planes = (weight_RD.view(np.uint32), accumulator_RD.view(np.uint32))
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        _keep(first, last, stop, rows, at, known, planes, records_UW)
        adagrad(first, last, rows, grads_UD, lr, eps, weight_RD, accumulator_RD)
        if max_norm > 0.0:
            clip_rows(first, last, rows, max_norm, weight_RD)
        _add(first, last, rows, at, planes, records_UW)
    done[0] = 1


@kernel
def record_row_wise_adagrad(
    start: int, stop: int, at: I64, known: Bools, records_UW: U32, done: I64, max_norm: float,
    rows: I64, grads_UD: F32, lr: np.float32, eps: np.float32, weight_RD: F32, accumulator_R1: F32,
) -> None:  # fmt: skip
    planes = (weight_RD.view(np.uint32), accumulator_R1.view(np.uint32))
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        _keep(first, last, stop, rows, at, known, planes, records_UW)
        row_wise_adagrad(first, last, rows, grads_UD, lr, eps, weight_RD, accumulator_R1)
        if max_norm > 0.0:
            clip_rows(first, last, rows, max_norm, weight_RD)
        _add(first, last, rows, at, planes, records_UW)
    done[0] = 1


@kernel
def record_adam(
    start: int, stop: int, at: I64, known: Bools, records_UW: U32, done: I64, max_norm: float,
    rows: I64, grads_UD: F32, offsets_T: I64, rates_T: F32, lr: float, beta1: float, beta2: float,
    eps: np.float32, weight_RD: F32, first_RD: F32, second_RD: F32, step_R1: I32,
) -> None:  # fmt: skip
    planes = (
        weight_RD.view(np.uint32), first_RD.view(np.uint32), second_RD.view(np.uint32),
        step_R1.view(np.uint32),
    )  # fmt: skip
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        _keep(first, last, stop, rows, at, known, planes, records_UW)
        adam(
            first, last, rows, grads_UD, offsets_T, rates_T, lr, beta1, beta2, eps, weight_RD,
            first_RD, second_RD, step_R1,
        )  # fmt: skip
        if max_norm > 0.0:
            clip_rows(first, last, rows, max_norm, weight_RD)
        _add(first, last, rows, at, planes, records_UW)
    done[0] = 1


@kernel
def write_record_sgd(block: I64, *args: Any) -> None:
    write_call(record_sgd, block, args)


@kernel
def write_record_momentum(block: I64, *args: Any) -> None:
    write_call(record_momentum, block, args)


@kernel
def write_record_adagrad(block: I64, *args: Any) -> None:
    write_call(record_adagrad, block, args)


@kernel
def write_record_row_wise_adagrad(block: I64, *args: Any) -> None:
    write_call(record_row_wise_adagrad, block, args)


@kernel
def write_record_adam(block: I64, *args: Any) -> None:
    write_call(record_adam, block, args)


RECORDING: dict[Callable[..., object], Callable[..., object]] = {
    optimizers.write_sgd: write_record_sgd,
    optimizers.write_momentum: write_record_momentum,
    optimizers.write_adagrad: write_record_adagrad,
    optimizers.write_row_wise_adagrad: write_record_row_wise_adagrad,
    optimizers.write_adam: write_record_adam,
}
"""Of the writer of each optimizer's kernel, that of the one which records, too."""
