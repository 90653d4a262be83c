"""The objects of `threading`, on the turns of a scheduler.

While `patched` lasts, a thread of a simulation that makes a lock, a condition or a thread makes a
simulated one, also in code of others; all other threads make real ones, as always. A simulated
object that a thread outside of the simulation uses, to let go of it say, is free at once.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, _base
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from emberkeep.cluster.remote import remote_cluster
from emberkeep.runtime import background, crew, pool
from emberkeep.runtime.background_failures import BackgroundFailures
from emberkeep.runtime.pool import be_nice
from emberkeep.testing.simulation.scheduler import Ended, Scheduler, Task, current_task, here

# Modules that make objects for a simulation, by how their names begin.
_OURS = ("emberkeep.", "concurrent.futures", "threading")
_ours: tuple[str, ...] = _OURS

_RealLock = threading.Lock
_RealRLock = threading.RLock
_RealCondition = threading.Condition
_RealEvent = threading.Event
_RealSemaphore = threading.Semaphore
_real_start = threading.Thread.start
_real_join = threading.Thread.join
_real_is_alive = threading.Thread.is_alive
_real_current = threading.current_thread
_real_excepthook = threading.excepthook
_real_hex = secrets.token_hex
_real_bits = secrets.randbits
_real_nice = be_nice
_real_future = Future.__init__
_AcquireFutures: Any = getattr(_base, "_AcquireFutures")  # noqa: B009
_futures = itertools.count()
_idents = itertools.count(1)


def _wake_one(scheduler: Scheduler, waiting: list[Task]) -> None:
    """Wakes one of those who wait, by chance. One whose time is over, and who has had no turn yet
    to say so, takes nothing from the others."""
    waits = [task for task in waiting if task.waits]
    if waits:
        chosen = waits[int(scheduler.random.random() * len(waits))]
        waiting.remove(chosen)
        scheduler.wake(chosen)


class SimLock:
    """A lock, reentrant or not. One that waits is woken by chance, as by a system."""

    __slots__ = ("_depth", "_owner", "_reentrant", "_waiting")

    def __init__(self, *, reentrant: bool = False) -> None:
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = here.task
        if task is None or task.scheduler.over:
            return True
        if self._owner is task and self._reentrant:
            self._depth += 1
            return True
        scheduler = task.scheduler
        if scheduler.preemption:
            scheduler.preempt()
        until = None if timeout < 0 else scheduler.seconds + timeout
        while self._owner is not None:
            if not blocking:
                return False
            self._waiting.append(task)
            left = None if until is None else until - scheduler.seconds
            if not scheduler.block("a lock", left):
                self._waiting.remove(task)
                return False
        self._owner, self._depth = task, 1
        return True

    def release(self) -> None:
        task = here.task
        if task is None or task.scheduler.over:
            return
        if self._owner is None or (self._reentrant and self._owner is not task):
            raise RuntimeError("release of a lock that is not held")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:  # seldom, and this is called more often than anything else
                _wake_one(task.scheduler, self._waiting)

    def locked(self) -> bool:
        return self._owner is not None

    def held_by(self, task: Task) -> bool:
        return self._owner is task

    def let_go(self) -> int:
        """Releases it however deep it is held."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """A condition over a simulated lock, its own if none is given."""

    __slots__ = ("__weakref__", "_lock", "_waiting", "acquire", "release")

    def __init__(self, lock: Any = None) -> None:
        self._lock: SimLock = SimLock(reentrant=True) if lock is None else lock
        self._waiting: list[Task] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = current_task()
        if task is None:
            raise RuntimeError("only threads of a simulation wait for what is in it")
        if not self._lock.held_by(task):
            raise RuntimeError("wait on a condition that is not held")
        self._waiting.append(task)
        depth = self._lock.let_go()
        try:
            woken = task.scheduler.block("a condition", timeout)
            if not woken:
                self._waiting.remove(task)
            return woken
        finally:
            self._lock.take_back(depth)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        task = current_task()
        held = predicate()
        if held or task is None:
            return held
        scheduler = task.scheduler
        until = None if timeout is None else scheduler.seconds + timeout
        while not held:
            left = None if until is None else until - scheduler.seconds
            if left is not None and left <= 0:
                break
            self.wait(left)
            held = predicate()
        return held

    def notify(self, n: int = 1) -> None:
        task = current_task()
        if task is None:
            return
        for _ in range(min(n, len(self._waiting))):
            _wake_one(task.scheduler, self._waiting)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimEvent:
    def __init__(self) -> None:
        self._changed = SimCondition()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(self.is_set, timeout))


class SimSemaphore:
    def __init__(self, value: int = 1) -> None:
        self._changed = SimCondition()
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            wait = 0 if not blocking else timeout
            if not self._changed.wait_for(lambda: self._value > 0, wait):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._changed:
            self._value += n
            self._changed.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _made(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a simulated object for threads of a simulation, and a real one for others."""

    def make(*args: Any, **named: Any) -> Any:
        return (simulated if _simulates(sys._getframe(1)) else real)(*args, **named)

    return make


def _make_condition(lock: Any = None) -> Any:
    simulates = _simulates(sys._getframe(1)) and isinstance(lock, SimLock | None)
    return (SimCondition if simulates else _RealCondition)(lock)


def _simulates(caller: FrameType) -> bool:
    """Whether an object is made by a simulated thread, for the simulation alone: what a library or
    a module makes for itself, when it is first used, outlives it."""
    if current_task() is None or caller.f_code.co_name == "<module>":
        return False
    return str(caller.f_globals["__name__"]).startswith(_ours)


def _start(thread: threading.Thread) -> None:
    task = current_task()
    if task is None:
        return _real_start(thread)
    held: Any = thread
    ended = held._simulated_end = SimEvent()

    def run() -> None:
        try:
            thread.run()
        except Ended:
            raise
        except BaseException as error:
            hook = threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
            threading.excepthook(hook)
        finally:
            ended._set = True
        ended.set()

    task.scheduler.spawn(thread.name, run, task.process).thread = thread
    held._ident = next(_idents)  # a thread of the system carries it from its first turn on
    held._started._set = True
    task.scheduler.preempt()
    return None


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    ended: SimEvent | None = getattr(thread, "_simulated_end", None)
    if ended is None:
        return _real_join(thread, timeout)
    if current_task() is not None:
        ended.wait(timeout)
    return None


def _is_alive(thread: threading.Thread) -> bool:
    ended: SimEvent | None = getattr(thread, "_simulated_end", None)
    return _real_is_alive(thread) if ended is None else not ended.is_set()


def _current_thread() -> Any:
    task = current_task()
    return _real_current() if task is None else task.thread or task


def _token_hex(nbytes: int | None = None) -> str:
    task = current_task()
    if task is None:
        return _real_hex(nbytes)
    return task.scheduler.random.randbytes(nbytes or 32).hex()


def _randbits(k: int) -> int:
    task = current_task()
    return _real_bits(k) if task is None else task.scheduler.random.getrandbits(k)


def _make_future(future: Any) -> None:
    _real_future(future)
    future._made = next(_futures)


def _acquire_futures(held: Any, futures: Iterable[Any]) -> None:
    # Not by their addresses, which are no function of the seed.
    held.futures = sorted(futures, key=lambda future: getattr(future, "_made", -1))


def _be_nice(nice: int) -> None:
    # Threads of the system carry one task after the other: what is nice once would stay so.
    if current_task() is None:
        _real_nice(nice)


def _excepthook(error: Any, /) -> None:
    # Threads that unwind at the end have nothing to report.
    if not issubclass(error.exc_type, Ended):
        _real_excepthook(error)


@contextmanager
def patched(*modules: str) -> Iterator[None]:
    """Threads of a simulation make simulated objects, as long as the body lasts: in this package,
    and in further modules that are named."""
    global _ours
    _ours = (*_OURS, *modules)
    failures = BackgroundFailures()
    changes: list[tuple[Any, str, Any]] = [
        (threading, "Lock", _made(_RealLock, SimLock)),
        (threading, "RLock", _made(_RealRLock, partial(SimLock, reentrant=True))),
        (threading, "Condition", _make_condition),
        (threading, "Event", _made(_RealEvent, SimEvent)),
        (threading, "Semaphore", _made(_RealSemaphore, SimSemaphore)),
        (threading.Thread, "start", _start),
        (threading.Thread, "join", _join),
        (threading.Thread, "is_alive", _is_alive),
        (threading, "current_thread", _current_thread),
        (threading, "excepthook", _excepthook),
        (secrets, "token_hex", _token_hex),
        (secrets, "randbits", _randbits),
        (Future, "__init__", _make_future),
        (_AcquireFutures, "__init__", _acquire_futures),
        (background, "be_nice", _be_nice),
        # Asking ten times a second is cheap but for who simulates it.
        (remote_cluster, "_POLL_SECONDS", 0.5),
        # What threads of a simulation meet is no news of this process.
        (background, "_threads", set()),
        *((module, "background_failures", failures) for module in (background, crew, pool)),
    ]
    before = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)
