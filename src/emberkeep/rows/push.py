"""A checked push, what it may be refused for, and who watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from emberkeep._types import F32, I64, RowIds
from emberkeep.errors import GradientError, IdError
from emberkeep.tables import Table

Writer = Callable[..., object]


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
    """Who wants to know by what rows change."""

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
