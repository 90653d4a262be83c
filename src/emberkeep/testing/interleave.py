"""Several processes on one store, in every order: a baton goes round at storage operations.

Processes of a repository meet nowhere but in the store. So a run is described completely by who
performs the next operation, and trying every schedule is trying every race. The actions are the
real code; only one of them runs at any moment, and it runs until its stint is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emberkeep.blobs import BlobStore
from emberkeep.testing.stores import Fault, FaultStore, ProcessDied

Stint = tuple[int, int]
"""A process, and how many storage operations it performs before the next one has the baton."""

Action = Callable[[BlobStore], Any]

_PATIENCE_SECONDS = 20.0


@dataclass(slots=True)
class Outcome:
    """What became of one process: what its action returned, or the error that ended it."""

    value: Any = None
    error: BaseException | None = None
    operations: int = 0
    """Those that count."""


@dataclass(slots=True)
class _Process:
    action: Action
    store: FaultStore
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    lock: threading.Lock = field(default_factory=threading.Lock)
    outcome: Outcome = field(default_factory=Outcome)
    left: int | None = None
    ended: bool = False


class Interleaving:
    """One run of several actions under one schedule.

    `stints` are worked off in order; then every process that has not ended runs to its end, first
    to last. A stint ends early when its process does. `faults` makes operations of a process go
    wrong, by their number. `outcomes` holds what became of each process; a process that was killed
    has `ProcessDied`.

    Where `counts` is given, operations of other kinds, by method and name, belong to no stint: a
    process is stopped right before one that counts.
    """

    def __init__(
        self,
        store: BlobStore,
        actions: Sequence[Action],
        stints: Sequence[Stint],
        faults: Mapping[int, Mapping[int, Fault]] | None = None,
        *,
        counts: Callable[[str, str], bool] = lambda _method, _name: True,
    ) -> None:
        self._processes = []
        self._counts = counts
        for index, action in enumerate(actions):
            faulty = FaultStore(store, (faults or {}).get(index))
            self._processes.append(_Process(action, faulty))
            faulty.before = self._turn(self._processes[index])
        self._waiting = list(stints)
        self._done = threading.Semaphore(0)

    def run(self) -> list[Outcome]:
        """Runs to the end; `TimeoutError` if a process waits for something that never comes."""
        threads = [
            threading.Thread(target=self._run, args=(process,), daemon=True)
            for process in self._processes
        ]
        for thread in threads:
            thread.start()
        self._hand_on()
        if not self._done.acquire(timeout=_PATIENCE_SECONDS):
            raise TimeoutError("a process waits for something that never comes")
        for thread in threads:
            thread.join()
        return [process.outcome for process in self._processes]

    def _turn(self, process: _Process) -> Callable[[int, str, str], None]:
        def turn(_number: int, method: str, name: str) -> None:
            # Threads of one process take turns, too: one that waits for the baton stops them all.
            with process.lock:
                if process.ended:
                    return  # its store is still in use, by the check of what came of it
                if self._counts(method, name):
                    if process.left == 0:
                        self._hand_on()
                        process.baton.acquire()
                    if process.left is not None:
                        process.left -= 1
                    process.outcome.operations += 1

        return turn

    def _run(self, process: _Process) -> None:
        process.baton.acquire()
        try:
            process.outcome.value = process.action(process.store)
        except (Exception, ProcessDied) as error:
            process.outcome.error = error
        process.ended = True
        self._hand_on()

    def _hand_on(self) -> None:
        """Lets the next process run, as the schedule says."""
        while self._waiting:
            index, operations = self._waiting.pop(0)
            process = self._processes[index]
            if not process.ended:
                process.left = operations
                process.baton.release()
                return
        for process in self._processes:
            if not process.ended:
                process.left = None
                process.baton.release()
                return
        self._done.release()


def schedules(operations: Sequence[int], preemptions: int) -> Iterator[tuple[Stint, ...]]:
    """Every schedule of two processes in which a running one is stopped at most so many times.

    `operations` bounds how many operations each of them performs; a stint that is longer than
    what a process has left lets it end, so a bound that is too high costs time alone.
    """
    for first in (0, 1):
        yield from _stints(first, list(operations), preemptions)


def _stints(process: int, left: list[int], preemptions: int) -> Iterator[tuple[Stint, ...]]:
    ends = ((process, 2**31),)
    yield ends
    if not preemptions:
        return
    for count in range(1, left[process]):
        rest = [*left]
        rest[process] -= count
        for following in _stints(1 - process, rest, preemptions - 1):
            yield ((process, count), *following)
