"""A push to rows that a save still needs: each is copied while it is in the cache, then updated.

Rows are updated a few at a time by the optimizer's own kernel, so what a push does to them is the
same bits with and without a save under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emberkeep._types import F32, I64
from emberkeep.kernels import optimizers
from emberkeep.kernels._intrinsics import prefetch_row
from emberkeep.kernels._jit import inline, variant
from emberkeep.kernels._jobs import writer
from emberkeep.kernels._lanes import copy_row
from emberkeep.kernels._streams import fence, fills_lines, stream_row
from emberkeep.kernels.initial_values import AHEAD
from emberkeep.kernels.optimizers import adagrad, adam, momentum, row_wise_adagrad, sgd

MOST_PLANES = 4
NO_PLANE: F32 = np.empty((0, 0), np.float32)

# What is read of rows and gradients that are updated at a time: less than the second cache holds.
_BLOCK_NBYTES = 128 * 2**10


@inline
def _copy(
    first: int, last: int, stop: int, rows: I64, saved_S: I64, at: int, plane_RV: F32, out_SV: F32
) -> int:  # fmt: skip
    """Copies those of some rows that are to be saved, and asks for rows that come soon; where the
    next one goes."""
    if plane_RV.shape[0] == 0:
        return at
    streamed = fills_lines(out_SV)
    for i in range(first, last):
        if i + AHEAD < stop:
            prefetch_row(plane_RV, rows[i + AHEAD])
        if at < saved_S.size and saved_S[at] == rows[i]:
            if streamed:
                stream_row(out_SV, at, plane_RV, rows[i])
            else:
                copy_row(out_SV, at, plane_RV, rows[i])
            at += 1
    return at


def _save(
    start: int, stop: int, starts_P: I64, firsts_P: I64, saved_S: I64,
    a_RV: F32, b_RV: F32, c_RV: F32, d_RV: F32, a_SV: F32, b_SV: F32, c_SV: F32, d_SV: F32,
    rows: I64, *args: Any,
) -> int:  # fmt: skip
    at = 0
    for p in range(starts_P.size):
        if starts_P[p] == start:
            at = firsts_P[p]
    before = at
    columns = 2 * a_RV.shape[1] + b_RV.shape[1] + c_RV.shape[1] + d_RV.shape[1]
    block = max(16, _BLOCK_NBYTES // (4 * columns))
    for first in range(start, stop, block):
        last = min(first + block, stop)
        _copy(first, last, stop, rows, saved_S, at, b_RV, b_SV)
        _copy(first, last, stop, rows, saved_S, at, c_RV, c_SV)
        _copy(first, last, stop, rows, saved_S, at, d_RV, d_SV)
        at = _copy(first, last, stop, rows, saved_S, at, a_RV, a_SV)
        update(first, last, rows, *args)  # type: ignore[name-defined]  # noqa: F821
    fence()
    return at - before


def _saving(update: Callable[..., Any]) -> Callable[..., Any]:
    """The writer of a kernel that copies those of the `rows` that are `saved_S`, a part of them in
    the same order, and updates all: what part p of the call copies goes to `firsts_P[p]` on. A
    row's planes are `a_RV` to `d_RV`, or fewer; `a_RV` is as wide as a gradient. The result is how
    many rows a part has copied."""
    return writer(variant(_save, f"save_{update.__name__}", update=update))


SAVING: dict[Callable[..., object], Callable[..., object]] = {
    optimizers.write_sgd: _saving(sgd),
    optimizers.write_momentum: _saving(momentum),
    optimizers.write_adagrad: _saving(adagrad),
    optimizers.write_row_wise_adagrad: _saving(row_wise_adagrad),
    optimizers.write_adam: _saving(adam),
}
"""Of the writer of each optimizer's kernel, that of the one which copies, too."""
