"""A small pool of threads that run serial kernels over disjoint ranges.

Kernels release the GIL, so Python threads are enough; numba's own threading layers are not used
because they abort when called from several threads or after a fork.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from emberkeep.errors import ConfigError

Task = Callable[[], object]
Spin = Callable[[npt.NDArray[np.int64], int, int], bool]
Queue = SimpleQueue["tuple[Task, _Join] | None"]

# How often an idle thread looks for work before it sleeps: about a millisecond. Threads of OpenMP
# do the same, for longer.
_LOOKS = 1_000_000


def default_threads() -> int:
    """`EMBERKEEP_THREADS`, else the cores that this process may use."""
    given = os.environ.get("EMBERKEEP_THREADS")
    if given is None:
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(f"EMBERKEEP_THREADS must be a whole number from 1 up, not {given!r}")
    return int(given)


class _Join:
    """Counts finished tasks and keeps the first error."""

    __slots__ = ("done", "error", "finished", "lock", "tasks")

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        self.finished = np.zeros(1, np.int64)
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.done = threading.Lock()
        self.done.acquire()

    def run(self, task: Task) -> None:
        error = None
        try:
            task()
        except BaseException as raised:
            error = raised
        with self.lock:
            self.error = self.error or error
            last = self.finished[0] == self.tasks - 1
            self.finished[0] += 1
        if last:
            self.done.release()

    def wait(self, spin: Spin) -> None:
        if not spin(self.finished, self.tasks, _LOOKS):
            self.done.acquire()
        if self.error is not None:
            raise self.error


class Pool:
    """Runs tasks on `threads` threads, the caller being one of them; the others are `nice`.

    Safe to call from several threads at once, and in a forked child: the child starts threads of
    its own on first use. A task must not call `run` of the same pool.

    A thread that has nothing to do looks for work a little while before it sleeps: the phases of
    a lookup follow each other within microseconds, and to wake a sleeping thread takes about as
    long as a phase.
    """

    def __init__(self, threads: int | None = None, *, nice: int = 0) -> None:
        self.nice = nice
        self.threads = default_threads() if threads is None else threads
        if self.threads < 1:
            raise ConfigError(f"threads must be 1 or more, not {threads}")
        self._start_lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._queue: Queue = SimpleQueue()
        self._given = np.zeros(1, np.int64)
        self._pid = os.getpid()
        self._spin: Spin | None = None

    def _start(self) -> Spin:
        from emberkeep.kernels.waiting import spin

        if os.getpid() != self._pid:  # a forked child inherits the queue but none of the threads
            self._start_lock = threading.Lock()
            self._reset()
        with self._start_lock:
            if self._spin is None:
                for i in range(self.threads - 1):
                    threading.Thread(
                        target=_work,
                        args=(self._queue, self._given, spin, self.nice),
                        name=f"emberkeep-{i}",
                        daemon=True,
                    ).start()
                    weakref.finalize(self, self._queue.put, None)  # the thread ends with the pool
                self._spin = spin
            return self._spin

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs all tasks and returns when each has ended; raises the first error."""
        if self.threads == 1 or len(tasks) <= 1:
            for task in tasks:
                task()
            return
        spin = self._spin
        if spin is None or os.getpid() != self._pid:
            spin = self._start()
        join = _Join(len(tasks))
        for task in tasks[1:]:
            self._queue.put((task, join))
        self._given[0] += len(tasks) - 1
        join.run(tasks[0])
        while True:  # the caller helps as long as tasks wait
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            assert item is not None
            task, other = item
            other.run(task)
        join.wait(spin)


def be_nice(nice: int) -> None:
    """Lowers the priority of the calling thread, where the system has one for each thread."""
    if nice and sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _work(queue: Queue, given: npt.NDArray[np.int64], spin: Spin, nice: int) -> None:
    be_nice(nice)
    while True:
        seen = given[0]
        try:
            item = queue.get_nowait()
        except Empty:
            if spin(given, seen + 1, _LOOKS):
                continue
            item = queue.get()
        if item is None:
            return
        task, join = item
        join.run(task)
        del item, task, join  # an idle thread holds on to nothing


class ForkLock:
    """A re-entrant lock that is free in a forked child, whoever held it in the parent."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            self._lock = threading.RLock()
            self._pid = os.getpid()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_shared: Pool | None = None
_shared_lock = threading.Lock()


def shared() -> Pool:
    """The pool that is used where none is given."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Pool()
        return _shared


def spans(total: int, parts: int, least: int = 1) -> list[tuple[int, int]]:
    """Cuts range(total) into at most `parts` contiguous spans of at least `least` items."""
    parts = max(1, min(parts, total // max(least, 1)))
    bounds = [total * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in pairwise(bounds) if b > a]
