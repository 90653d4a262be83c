"""Rows that writers have saved for a snapshot, because they were about to change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from emberkeep._types import I64, Array, Bools, Planes
from emberkeep.kernels import saved_updates
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.memory import recycled
from emberkeep.runtime.pool import Job, Pool

_LARGE_NBYTES = 2**20


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows of any tables as they were before a write, in its order."""

    rows: I64
    ids: I64 | None
    """Who owned the slots of dynamic tables; None where there are none."""
    present: Bools
    planes: Planes

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.planes.values())


@dataclass(frozen=True, slots=True)
class Claimed:
    """Rows that a writer is to save before it changes them, and room for their planes."""

    parts: list[tuple[int, int]]
    """The ranges of what is written that threads work on."""
    firsts_P: I64
    """Where those of each range begin, and where the last ones end."""
    saved: SavedRows


def can_save(planes: Planes) -> bool:
    """Whether kernels can save rows of these planes as they update them. The age of rows, `used`,
    changes before that."""
    words = all(plane.itemsize == 4 for plane in planes.values())
    return words and len(planes) <= saved_updates.MOST_PLANES and "used" not in planes


@dataclass(frozen=True, slots=True)
class SavesWithUpdate:
    """Claimed rows that the kernel which updates them saves, too: `run` it, once."""

    claimed: Claimed
    planes: Planes
    """Where the rows are."""
    done: Callable[[SavedRows, float], None]
    """Called with what was saved, and how many seconds the update has taken."""
    clock: Clock

    def run(self, pool: Pool, write: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Has the optimizer's kernel update the rows that are its first argument, and save the
        claimed ones before."""
        claimed = self.claimed
        starts_P = np.array([start for start, _ in claimed.parts], np.int64)
        saved = claimed.saved.planes
        places = [self.planes[name].view(np.float32) for name in saved]
        copies = [values.view(np.float32) for values in saved.values()]
        missing = [saved_updates.NO_PLANE] * (saved_updates.MOST_PLANES - len(places))
        job = Job(
            saved_updates.SAVING[write],
            claimed.parts,
            (starts_P, claimed.firsts_P, claimed.saved.rows, *places, *missing, *copies, *missing,
             *args),
        )  # fmt: skip
        start = self.clock.monotonic()
        copied = pool.together(job)[0]
        if copied != np.diff(claimed.firsts_P).tolist():
            raise AssertionError("the rows that were claimed are not among those that were updated")
        self.done(claimed.saved, self.clock.monotonic() - start)


def room_for(rows: int, width: int, kind: np.dtype[Any]) -> Array:
    """Room for rows of a plane. A large one has been used before: to have pages made for it takes
    longer than to copy the rows."""
    nbytes = rows * width * np.dtype(kind).itemsize
    if nbytes < _LARGE_NBYTES:
        return np.empty((rows, width), kind)
    return np.frombuffer(recycled(nbytes), kind).reshape(rows, width)
