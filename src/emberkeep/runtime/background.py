"""Threads that work beside their owner: every error is shown, and nobody waits for ever."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

from emberkeep.errors import DeadlineError, StoppedError
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.pool import be_nice

_F = TypeVar("_F", bound=Callable[..., object])
Step = Callable[[], float | None]
Task = Callable[[], object]
Ended = Callable[[BaseException | None], object]

_PATIENCE = timedelta(minutes=1)
_PATIENCE_AT_EXIT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A step that failed is done again, up to `limit` times in a row; None: until it is closed.

    The pause before it doubles from `first` to `most`. A wake ends a pause early, but not before
    `first` has passed: a caller that wakes all the time must not keep a broken peer under fire.
    """

    limit: int | None = 5
    first: timedelta = timedelta(milliseconds=20)
    most: timedelta = timedelta(seconds=1)

    def pause(self, failures: int) -> float:
        """How long to wait after so many failures in a row."""
        doubled = self.first.total_seconds() * 2.0 ** min(failures - 1, 60)
        return min(doubled, self.most.total_seconds())


class Worker:
    """A supervised thread. With `step` it is a loop, without it a queue of tasks.

    **Loop**: `wake` has the thread call `step`, which returns how many seconds to rest before the
    next call (0: there is more to do), or None to rest until the next wake. **Queue**: `do` runs
    tasks one after the other; `ended` hears how each one ended. The thread starts with the first
    wake or task.

    An error of any kind, also one that nobody has listed,

    - is counted in the metrics under the name of the thread (`background_errors_total`),
    - is given to `on_error`, or to `ended` where it is a task's, with the locals of its frames
      dropped, so that no rows or tensors live on in it,
    - is kept in `error`, with the time of the first of its kind in `failed_since`, until a step
      succeeds: a step is repeated as `retry` says. Without `retry`, when its limit is reached, or
      after a `StoppedError` the loop has stopped: `check`, `wait` and `close` raise that from
      then on, and `background_stopped_since_seconds` says so. Errors of a task end nothing. A
      thread that dies, be it at its start, has stopped, too; tasks that it has not started end with
      that error, and the next one is another thread's.

    `wait` and `close` end: in time, with the error that stopped the thread, or with a
    `DeadlineError` that names what was waited for. A `step` or `on_error` that is a bound method
    does not keep its object alive: the thread ends with it, or with the worker. A forked child
    has no thread: there a loop does nothing, and a queue starts another thread with the next
    task. Before the interpreter ends, all threads are joined, for two seconds and no longer.
    """

    def __init__(
        self,
        name: str,
        step: Step | None = None,
        *,
        nice: int = 0,
        on_error: Callable[[BaseException], object] | None = None,
        retry: Retry | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self._clock = clock
        self._make = partial(
            _Thread, name, nice, step and _weakly(step), on_error and _weakly(on_error), retry,
            clock,
        )  # fmt: skip
        self._renew(threading.Condition())

    def _renew(self, changed: threading.Condition) -> None:
        self._pid = os.getpid()
        self._thread = self._make(changed)
        weakref.finalize(self, self._thread.end).atexit = False

    @property
    def changed(self) -> threading.Condition:
        """Notified when a step has failed, or succeeds again; also for what the thread and its
        owner share. Reentrant."""
        return self._thread.changed

    @property
    def error(self) -> BaseException | None:
        """What the last step met; what stopped the thread, if it has stopped."""
        return self._thread.error

    @property
    def failed_since(self) -> float | None:
        """The time (Unix) since when no step has succeeded; None while all is well."""
        return self._thread.failed_since

    @property
    def stopped(self) -> bool:
        """Whether an error has ended the loop."""
        return self._thread.stopped

    def wake(self) -> None:
        """Has the loop do a step. Never waits and raises nothing: what its caller did is done."""
        thread = self._thread
        if thread.woken or thread.ending or self._pid != os.getpid():
            return
        with thread.changed:
            thread.woken = True
            thread.changed.notify_all()
            if thread.ident is None and not thread.stopped:
                try:
                    thread.begin()
                except BaseException as error:  # the system has no thread to give
                    thread.fail(error, final=True)

    def do(self, task: Task, ended: Ended) -> None:
        """Returns at once. When the task has ended, `ended` hears the error that it raised, or
        None; the worker holds on to nothing of the task any more. Raises, with the task not
        started, where no thread can be started."""
        if self._pid != os.getpid():  # the thread that held the lock is not there
            self._renew(threading.Condition())
        with self.changed:
            if self._thread.ending:  # it may have looked for tasks for the last time
                background_failures.forget(self._thread)
                self._renew(self.changed)
            thread = self._thread
            if thread.ident is None:
                thread.begin()
            thread.tasks.append((task, ended))
            thread.changed.notify_all()

    def check(self) -> None:
        """Raises what has stopped the thread."""
        if self.stopped:
            error = self.error
            raise StoppedError(
                f"{self.name} stopped at {_at(self.failed_since)} with "
                f"{type(error).__name__}: {error}; what it did in the background is not done any "
                "more: save what is in memory, remove the cause, and start again"
            ) from error

    def wait(
        self, until: Callable[[], bool], what: str, deadline: timedelta, *,
        looks: timedelta | None = None,
    ) -> None:  # fmt: skip
        """Returns once `until` holds, which is looked at whenever `changed` is notified, and with
        `looks` that often, too."""
        seconds = deadline.total_seconds()
        end = self._clock.monotonic() + seconds
        with self.changed:
            while not self._clock.wait_for(
                self.changed, lambda: until() or self.stopped,
                seconds if looks is None else min(seconds, looks.total_seconds()),
            ):  # fmt: skip
                seconds = end - self._clock.monotonic()
                if looks is None or seconds <= 0:
                    raise DeadlineError(
                        f"waited {deadline.total_seconds():g} s for {what}, which {self.name} has "
                        "not done; it is still at work, or hangs: look at what it works on, and "
                        "try again"
                    )
            if not until():
                self.check()

    def stop(self) -> None:
        """Has the thread end after what it is doing, a queue after all its tasks; never waits."""
        self._thread.end()

    def close(self, deadline: timedelta = _PATIENCE) -> None:
        """Returns when the thread has ended: a loop after its step, a queue after all tasks."""
        self.stop()
        self.join(deadline)
        self.check()

    def join(self, deadline: timedelta = _PATIENCE) -> None:
        """Waits for the thread to end, which it was asked to; raises `DeadlineError` alone."""
        thread = self._thread
        if self._pid != os.getpid() or thread is threading.current_thread() or not thread.ident:
            return
        thread.join(deadline.total_seconds())
        if thread.is_alive():
            raise DeadlineError(
                f"{self.name} has not ended within {deadline.total_seconds():g} s; it is left "
                "behind, and ends with the process at the latest"
            )


class _Thread(threading.Thread):
    """The thread of a worker. It does not know the worker, which can so be collected."""

    def __init__(
        self,
        name: str,
        nice: int,
        step: Callable[[], Step | None] | None,
        on_error: Callable[[], Callable[[BaseException], object] | None] | None,
        retry: Retry | None,
        clock: Clock,
        changed: threading.Condition,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.changed = changed
        self.tasks: deque[tuple[Task, Ended]] = deque()
        self.woken = self.ending = self.stopped = False
        self.error: BaseException | None = None
        self.failed_since: float | None = None
        self._failures = 0
        self._nice, self._step, self._on_error = nice, step, on_error
        self._retry, self._clock = retry, clock

    def begin(self) -> None:
        self.start()
        _threads.add(self)

    def end(self) -> None:
        with self.changed:
            self.ending = True
            self.changed.notify_all()
        background_failures.forget(self)  # nobody counts on it any more

    def run(self) -> None:
        seconds: float | None = None
        try:
            with suppress(OSError):  # it works all the same
                be_nice(self._nice)
            while self._rest(seconds):
                seconds = self._run_task() if self.tasks else self._run_step()
        except BaseException as error:  # of this class itself: nobody would hear of it
            self._die(error)
        _threads.discard(self)

    def _die(self, error: BaseException) -> None:
        """Nobody does what is queued any more: those who wait for it hear of the error."""
        try:
            self.fail(error, final=True)
        finally:
            with self.changed:
                self.stopped = self.ending = True
                left = [ended for _, ended in self.tasks]
                self.tasks.clear()
                self.changed.notify_all()
            for ended in left:
                self._tell_ended(ended, error)

    def _rest(self, seconds: float | None) -> bool:
        """Waits until there is something to do; whether there is."""
        with self.changed:
            if seconds != 0:
                self._clock.wait_for(
                    self.changed, lambda: bool(self.woken or self.tasks or self.ending), seconds
                )
            self.woken = False
            return bool(self.tasks) or not self.ending

    def _run_task(self) -> float | None:
        task, ended = self.tasks.popleft()
        error = None
        try:
            task()
        except BaseException as raised:
            error = self._noted(raised)
        # Before anybody hears of it: what a task held would else be freed while the interpreter
        # ends, and a tensor that is freed then ends the process with an abort.
        del task
        self._tell_ended(ended, error)
        return None

    def _tell_ended(self, ended: Ended, error: BaseException | None) -> None:
        try:
            ended(error)
        except BaseException as raised:
            self.error = self._noted(raised)
            with suppress(BaseException):
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self)))

    def _noted(self, error: BaseException) -> BaseException:
        """Counts an error and drops what its frames hold. Raises nothing: where there is no memory
        for that, the one who waits must hear of the error all the same."""
        with suppress(BaseException):
            background_failures.count(self.name, error)
        with suppress(BaseException):
            _without_locals(error)
        return error

    def _run_step(self) -> float | None:
        step = None if self._step is None else self._step()
        if step is None:  # its object is gone
            self.ending = self._step is not None
            return None
        try:
            seconds = step()
        except BaseException as error:
            del step  # `on_error` may be the last to hold it
            retry = self._retry
            limit = 0 if retry is None else retry.limit
            final = isinstance(error, StoppedError)
            final = final or (limit is not None and self._failures >= limit)
            self.fail(error, final=final)
            if not final and retry is not None:
                self._back_off(retry)
            return 0
        if self.error is not None:
            with self.changed:
                self.error = self.failed_since = None
                self.changed.notify_all()
        self._failures = 0
        return seconds

    def fail(self, error: BaseException, *, final: bool) -> None:
        background_failures.count(self.name, error)
        with self.changed:
            self._failures += 1
            self.error = _without_locals(error)
            self.failed_since = self.failed_since or self._clock.now().timestamp()
            if final:
                self.stopped = self.ending = True
        if final:
            background_failures.stopped(self, self.name, self.failed_since)
        try:
            on_error = None if self._on_error is None else self._on_error()
            if on_error is not None:
                on_error(error)
        except BaseException:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self)))
        with self.changed:
            self.changed.notify_all()

    def _back_off(self, retry: Retry) -> None:
        first, pause = retry.first.total_seconds(), retry.pause(self._failures)
        with self.changed:
            if not self._clock.wait_for(self.changed, lambda: self.ending, first):
                self._clock.wait_for(self.changed, lambda: self.ending or self.woken, pause - first)


_threads: set[_Thread] = set()


@atexit.register
def _end_threads() -> None:
    """Nothing of ours runs while the interpreter ends."""
    deadline = SYSTEM_CLOCK.monotonic() + _PATIENCE_AT_EXIT
    threads = list(_threads)
    for thread in threads:
        thread.end()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - SYSTEM_CLOCK.monotonic()))


os.register_at_fork(after_in_child=_threads.clear)


def end_all(*endings: Callable[[], object]) -> None:
    """Makes every call, also after one that raised: what it would have ended is not left behind.
    Raises the first error."""
    first: BaseException | None = None
    for ending in endings:
        try:
            ending()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def _weakly(call: _F) -> Callable[[], _F | None]:
    """What returns `call`, or None once the object is gone whose method it is."""
    if hasattr(call, "__self__") and hasattr(call, "__func__"):
        return weakref.WeakMethod(call)
    return lambda: call


def _without_locals(error: BaseException) -> BaseException:
    """Drops what the frames of an error hold; where it was raised can still be read."""
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    return error


def _at(moment: float | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
