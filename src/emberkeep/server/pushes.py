"""Which pushes were applied, and how the parts of several ranks become one push.

Pure bookkeeping over locks: nothing here knows of Flight or of rows on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from emberkeep._types import F32, RowIds
from emberkeep.errors import EmberkeepError, ProtocolError, RankError
from emberkeep.rows.lookup import merge
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.pool import Pool

_T = TypeVar("_T")

# An incarnation that has not pushed for so many others is over; its numbers are forgotten.
_REMEMBERED = 4096


class Ledger:
    """The last number that was applied for each incarnation of a worker.

    Numbers of an incarnation are contiguous. A number that was applied is never applied again; one
    that comes too early means that a push was lost on the way, and is refused. After a recovery
    from a repository the ledger is new: the first number that comes is as good as any that the
    version does not hold (`start_after`).
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def start_after(self, pushes: Mapping[str, int]) -> None:
        """The rows are those of a version, which holds these pushes of workers, and all before."""
        self._before = {int(worker, 16): number for worker, number in pushes.items()}

    def numbers(self) -> dict[int, int]:
        """The last number of each incarnation that the rows hold."""
        return {**self._before, **self._last}

    def applied(self, incarnation: int, number: int) -> bool:
        """Whether that push was applied already; `ProtocolError` if one before it is missing."""
        last = self._last.get(incarnation)
        if last is not None and number > last + 1:
            raise ProtocolError(
                f"push {number} of worker {incarnation:x} comes after {last}: one was lost"
            )
        if last is None:
            return number <= self._before.get(incarnation, 0)
        return last is not None and number <= last

    def note(self, incarnation: int, number: int) -> None:
        self._last.pop(incarnation, None)
        self._last[incarnation] = number
        if len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]

    def last(self, incarnation: int) -> int:
        """The last number applied, 0 for an incarnation that never pushed."""
        return self._last.get(incarnation, self._before.get(incarnation, 0))


RowGradients = tuple[Sequence[RowIds], Sequence[F32]]


def join(parts: Sequence[RowGradients], pool: Pool) -> RowGradients:
    """The parts of all ranks, in their order, as one push: sums of each row's gradients, divided
    by the number of ranks, as DDP averages. The same parts give the same bits."""
    wanted, grads = list(parts[0][0]), list(parts[0][1])
    for more, more_grads in parts[1:]:
        for g in range(len(wanted)):
            wanted[g], grads[g] = merge(wanted[g], grads[g], more[g], more_grads[g], pool)
    share = np.float32(len(parts))
    return wanted, [rows_UD / share for rows_UD in grads]


@dataclass(slots=True)
class _Step(Generic[_T]):
    """One step that ranks bring their parts of, and what became of it."""

    parts: dict[int, tuple[int, RowGradients]] = field(default_factory=dict)
    over: bool = False
    value: _T | None = None
    error: EmberkeepError | None = None


class Meeting(Generic[_T]):
    """Where the ranks of a synchronous job meet: nobody goes on before all parts are there.

    The rank that comes last does the work for all. Steps up to `last` are over: a worker that sends
    one again hears that it is done. No rank is ahead of another otherwise: one whose last step is
    not over where it finds it, after a recovery, sends that one first.
    """

    def __init__(self, world: int, last: int = 0, clock: Clock = SYSTEM_CLOCK) -> None:
        self.world = world
        self._step = _Step[_T]()
        self._last = last
        self._clock = clock
        self._changed = threading.Condition()

    def bring(
        self, rank: int, number: int, part: RowGradients, work: Callable[[Sequence[RowGradients]],
        _T], patience_seconds: float,
    ) -> _T | None:  # fmt: skip
        """What `work` made of the parts of all ranks; None for a step that is done already. What
        `work` raises, every rank gets, and the step may be brought again; so may a part whose rank
        waited in vain (`RankError`): it stays, and is taken once."""
        with self._changed:
            if number <= self._last:
                return None
            step = self._step
            step.parts[rank] = (number, part)
            if len(step.parts) == self.world:
                self._meet(step, work)
            if not self._clock.wait_for(self._changed, lambda: step.over, patience_seconds):
                absent = sorted({*range(self.world)} - {*step.parts})
                raise RankError(
                    f"step {number} waits for rank {', '.join(map(str, absent))} of {self.world}: "
                    "see what became of it, and start all ranks again"
                )
            if step.error is not None:
                raise step.error
            return step.value

    def _meet(self, step: _Step[_T], work: Callable[[Sequence[RowGradients]], _T]) -> None:
        numbers = {number for number, _ in step.parts.values()}
        try:
            if len(numbers) > 1:
                raise ProtocolError(
                    f"ranks bring the steps {', '.join(map(str, sorted(numbers)))} where all bring "
                    "one: start all of them again"
                )
            step.value = work([step.parts[rank][1] for rank in range(self.world)])
            self._last = max(numbers)
        except EmberkeepError as error:
            step.error = error
        except BaseException as error:  # of this rank's own; the others must not wait in vain
            step.error = EmberkeepError(f"the server failed: {error!r}")
            raise
        finally:
            step.over = True
            self._step = _Step()
            self._changed.notify_all()
