"""A checked push, why it may be refused, what watches it, and the kernel that applies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from emberkeep._types import F32, I64, Planes, RowIds
from emberkeep.errors import GradientError, IdError
from emberkeep.kernels import optimizers, recorded_updates
from emberkeep.rows.saved_rows import SavesWithUpdate
from emberkeep.runtime.pool import Pool
from emberkeep.tables import SGD, Adagrad, Adam, Momentum, Optimizer, RowWiseAdagrad, Table

Writer = Callable[..., object]
_NO_STEPS = np.empty((0, 1), np.int32)


@dataclass(frozen=True, slots=True)
class Push:
    """A push that was checked and can no longer fail; row -1 stands for a new dynamic id."""

    wanted: RowIds
    rows: I64
    grads_UD: F32
    unknown_T: list[int]


@dataclass(frozen=True, slots=True)
class Recording:
    """How an update shall be recorded: what the recording kernel takes before its own arguments.

    `fresh` rows are trained for the first time; the others are marked as changed.
    """

    args: tuple[Any, ...]
    fresh: int


class WriteWatcher(Protocol):
    """What must know by how much rows change."""

    def before_write(self, written: I64) -> None:
        """Rows are about to change, in whatever way."""
        ...

    def before_update(self, written: I64) -> Recording | None:
        """An optimizer is about to change rows: how its kernel records it, or None if it is to
        update them as without a watcher."""
        ...


def outside(table: Table, identity: int) -> IdError:
    """An id that a fixed table does not have."""
    assert table.rows is not None
    return IdError(
        f"table {table.name!r} has rows 0..{table.rows - 1}, id {identity} is outside; hash ids to "
        "the table's size or use rows=None"
    )


def not_finite(table: Table, identity: int) -> GradientError:
    """A gradient that would ruin a row."""
    return GradientError(
        f"the gradient of table {table.name!r}, id {identity}, is not finite; no row was changed. "
        "Lower the learning rate, clip gradients, or use a GradScaler under mixed precision"
    )


def update_call(
    optimizer: Optimizer, planes: Planes, steps_T: I64, offsets_T: I64, places: I64,
    grads_UD: F32, lr: float,
) -> tuple[Any, ...]:  # fmt: skip
    """The optimizer's kernel, for rows at these places, and its arguments."""
    weight, rate = planes["weight"], np.float32(lr)
    match optimizer:
        case SGD():
            return optimizers.write_sgd, places, grads_UD, rate, weight
        case Momentum():
            return (
                optimizers.write_momentum, places, grads_UD, rate, np.float32(optimizer.momentum),
                optimizer.nesterov, weight, planes["momentum"],
            )  # fmt: skip
        case Adagrad():
            row_wise = isinstance(optimizer, RowWiseAdagrad)
            write = optimizers.write_row_wise_adagrad if row_wise else optimizers.write_adagrad
            eps = np.float32(optimizer.eps)
            return write, places, grads_UD, rate, eps, weight, planes["accumulator"]
        case Adam():
            beta1, beta2 = optimizer.betas
            rates = [optimizers.adam_rate(lr, beta1, beta2, max(1, step)) for step in steps_T]
            return (
                optimizers.write_adam, places, grads_UD, offsets_T, np.array(rates, np.float32),
                lr, beta1, beta2, np.float32(optimizer.eps), weight, planes["first_moment"],
                planes["second_moment"], planes.get("step", _NO_STEPS),
            )  # fmt: skip
    raise AssertionError(f"{optimizer!r} has no kernel")


def apply_update(
    call: tuple[Any, ...], watched: Recording | SavesWithUpdate | None, max_norm: float | None,
    weight_RD: F32, over: Callable[..., object], pool: Pool,
) -> None:  # fmt: skip
    """Makes the call, and what is to be done beside it; `over` runs a kernel over all rows."""
    write, rows, *args = call
    if isinstance(watched, Recording):
        recording = recorded_updates.RECORDING[write]
        over(rows.size, recording, *watched.args, max_norm or 0.0, rows, *args)
        return
    if watched is not None:
        watched.run(pool, write, (rows, *args))
    else:
        over(rows.size, write, rows, *args)
    if max_norm is not None:
        over(rows.size, optimizers.write_clip_rows, rows, max_norm, weight_RD)
