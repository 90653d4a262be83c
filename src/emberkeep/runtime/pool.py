"""A small pool of threads that run serial kernels over disjoint ranges.

Kernels release the GIL, so Python threads are enough; numba's own threading layers are not used
because they abort when called from several threads or after a fork. Short kernels are run as
*jobs*, which threads take from each other without the GIL.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep.errors import ConfigError, StoppedError
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.system_calls import give_way

Task = Callable[[], object]
Queue = SimpleQueue["tuple[Task, _Join] | None"]

# How often an idle thread looks for work before it sleeps: about a millisecond. Threads of OpenMP
# do the same, for longer.
_LOOKS = 40_000
_MOST_THREADS = 256
_LOOK_SECONDS = 1.0
# Work on many items is cut into so many spans for each thread, each of so many items.
_SHARES = 4
_LONG_SHARE = 2048
_MOST_SHARES = 256


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to be run over each of some disjoint ranges: `kernel(start, stop, *args)`.

    `write` is the kernel's own writer of calls (see `kernels/_jobs.py`).
    """

    write: Callable[..., object]
    parts: Sequence[tuple[int, int]]
    args: tuple[Any, ...]


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
        self.finished = 0
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
            self.finished += 1
            last = self.finished == self.tasks
        if last:
            self.done.release()

    def wait(self, shared: _Shared) -> None:
        """Returns when all tasks have ended. A thread that died, maybe with a task in its hands,
        is noticed within a second."""
        while not self.done.acquire(timeout=_LOOK_SECONDS):
            if shared.ended:
                raise StoppedError(
                    "a thread of the pool has ended with an error, and its task may be half done: "
                    "what was computed is not complete; the next call has other threads"
                )
        if self.error is not None:
            raise self.error


class Pool:
    """Runs tasks on `threads` threads, the caller being one of them; the others are `nice`.

    Safe to call from several threads at once, and in a forked child: the child starts threads of
    its own on first use. A task must not call `run` of the same pool.

    A thread that has nothing to do looks for work a little while before it sleeps: the phases of
    a lookup follow each other within microseconds, and to wake a sleeping thread takes about as
    long as a phase. Where it is not `eager` it sleeps at once: looking takes what others could use.

    Its threads are no `Worker`: to hand a task over must take microseconds, and each task is
    awaited by its caller, who gets its error whatever that is. A thread that ends with an error of
    its own is counted (`emberkeep-pool`) and replaced; a caller whose task it had taken is
    `StoppedError` within a second. Parts of jobs are taken in compiled code, which raises nothing.
    """

    def __init__(self, threads: int | None = None, *, nice: int = 0, eager: bool = True) -> None:
        self.nice = nice
        self._eager = eager
        self.threads = min(default_threads(), _MOST_THREADS) if threads is None else threads
        if not 1 <= self.threads <= _MOST_THREADS:
            raise ConfigError(f"threads must be 1 to {_MOST_THREADS}, not {threads}")
        self._start_lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._shared: _Shared | None = None
        self._pid = os.getpid()

    def _start(self) -> _Shared:
        if os.getpid() != self._pid:  # a forked child inherits the queue but none of the threads
            self._start_lock = threading.Lock()
            self._reset()
        with self._start_lock:
            if self._shared is None or self._shared.ended:
                if self._shared is not None:
                    self._shared.end(self.threads)
                shared = _Shared()
                for i in range(self.threads - 1):
                    threading.Thread(
                        target=_work,
                        args=(shared, self.nice, self._eager),
                        name=f"emberkeep-{i}",
                        daemon=True,
                    ).start()
                    weakref.finalize(self, shared.queue.put, None)  # the thread ends with the pool
                self._shared = shared
            return self._shared

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs all tasks and returns when each has ended; raises the first error."""
        if self.threads == 1 or len(tasks) <= 1:
            for task in tasks:
                task()
            return
        shared = self._shared
        if shared is None or shared.ended or os.getpid() != self._pid:
            shared = self._start()
        join = _Join(len(tasks))
        for task in tasks[1:]:
            shared.queue.put((task, join))
        shared.words[shared.rounds.GIVEN] += len(tasks) - 1
        join.run(tasks[0])
        while True:  # the caller helps as long as tasks wait
            try:
                item = shared.queue.get_nowait()
            except Empty:
                break
            if item is not None:
                task, other = item
                other.run(task)
        join.wait(shared)

    def together(self, *jobs: Job) -> list[list[int]]:
        """Runs jobs at once; the result of each part of each job."""
        shared = self._shared
        if shared is None or shared.ended or os.getpid() != self._pid:
            shared = self._start()
        return shared.together(jobs)


class _Shared:
    """What the threads of a pool share."""

    def __init__(self) -> None:
        from emberkeep.kernels import _jobs, job_rounds

        self.rounds: ModuleType = job_rounds
        self.failed = _jobs.FAILED
        self.words: npt.NDArray[np.int64] = np.zeros(job_rounds.WORDS, np.int64)
        self.queue: Queue = SimpleQueue()
        self.ended = 0
        """How many threads have ended with an error."""
        self.asleep = 0
        self.asleep_lock = threading.Lock()
        self._round_lock = threading.Lock()
        self._number = 0

    def end(self, threads: int) -> None:
        """Has all threads end after what they are doing."""
        for _ in range(threads):
            self.queue.put(None)

    def together(self, jobs: Sequence[Job]) -> list[list[int]]:
        rounds = self.rounds
        free = self._round_lock.acquire(blocking=False)
        # While another caller has the threads, this one works alone.
        words = self.words if free else np.zeros(rounds.WORDS, np.int64)
        try:
            at, block = rounds.PARTS, rounds.BLOCKS
            for job in jobs:
                job.write(words[block : block + rounds.BLOCK], *job.args)
                for start, stop in job.parts:
                    words[at], words[at + 1], words[at + 2] = block, start, stop
                    at += 4
                block += rounds.BLOCK
            parts = (at - rounds.PARTS) // 4
            self._number = (self._number + 1) & 0x7FFFFFFF
            if free and parts > 1:
                for _ in range(min(self.asleep, parts - 1)):
                    self.queue.put(_WAKE)
            try:
                rounds.lead(words, self._number, parts)
            finally:  # whatever interrupts: arrays must not go while a thread works on them
                while not rounds.finished(words, parts, _LOOKS):
                    give_way()
            results = words[rounds.PARTS + 3 : at : 4].tolist()
        finally:
            if free:
                self._round_lock.release()
        if min(results, default=0) == self.failed:
            raise MemoryError("a kernel could not get the memory that it works in")
        ends = np.cumsum([len(job.parts) for job in jobs]).tolist()
        return [results[end - len(job.parts) : end] for job, end in zip(jobs, ends, strict=True)]


def be_nice(nice: int) -> None:
    """Lowers the priority of the calling thread, where the system has one for each thread."""
    if nice and sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


_WAKE: tuple[Task, _Join] = (lambda: None, _Join(-1))


def _work(shared: _Shared, nice: int, eager: bool) -> None:
    try:
        with suppress(OSError):  # it works all the same
            be_nice(nice)
        _work_until_ended(shared, _LOOKS if eager else 1)
    except BaseException:
        shared.ended += 1
        background_failures.count("emberkeep-pool")
        raise


def _work_until_ended(shared: _Shared, looks: int) -> None:
    rounds, words, queue = shared.rounds, shared.words, shared.queue
    while True:
        given = words[rounds.GIVEN]
        try:
            item = queue.get_nowait()
        except Empty:
            if rounds.follow(words, given + 1, looks):
                continue
            with shared.asleep_lock:
                shared.asleep += 1
            item = queue.get()
            with shared.asleep_lock:
                shared.asleep -= 1
        if item is None:
            return
        task, join = item
        join.run(task)
        del item, task, join  # an idle thread holds on to nothing


class ForkLock:
    """A re-entrant lock that is fair, and free in a forked child even if the parent held it.

    Fair, because training releases it only to take it again: a saver beside it would wait for a
    chance, step after step. A caller that waits for the lock blocks those that come after it.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._gate, self._lock = threading.Lock(), threading.Lock()
        self._owner, self._depth = 0, 0
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            self._reset()
        me = threading.get_ident()
        if self._owner != me:
            with self._gate:
                self._lock.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()

    @property
    def held(self) -> bool:
        """Whether anybody has it at the moment."""
        return self._depth > 0


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


def shares(total: int, threads: int, least: int = 1) -> list[tuple[int, int]]:
    """As `spans`, a few for each of so many threads where there are many items: threads take one
    after the other, so that one whose core a save or a loader has taken holds up the rest for one
    of them, and not for all that would be its part."""
    few = min(_SHARES * threads, total // _LONG_SHARE, _MOST_SHARES) if threads > 1 else 1
    return spans(total, max(threads, few), least)
