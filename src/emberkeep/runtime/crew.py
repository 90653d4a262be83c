"""Threads that share one queue of calls: every call ends in its future, whatever it meets."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

from emberkeep.errors import StoppedError
from emberkeep.runtime.background import Worker, end_all
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

_P = ParamSpec("_P")
_T = TypeVar("_T")

# A call may read gigabytes that come from far away.
_PATIENCE = timedelta(hours=1)


class Crew(Executor):
    """Up to `most` supervised threads (`Worker`), started as calls come.

    An error of any kind in a call is counted under the name of the crew and raised by the call's
    future; where no thread can be started, `submit` raises and nothing was taken. So a caller who
    waits for a future waits as long as the call lasts, and no longer. `shutdown` ends: after all
    calls that were taken, or with a `DeadlineError`. A crew that is forgotten takes its threads
    with it; at exit they are joined like those of every worker. A forked child has none of its
    parent's calls, and threads of its own.
    """

    def __init__(
        self, most: int, name: str, *, nice: int = 0, clock: Clock = SYSTEM_CLOCK,
        patience: timedelta = _PATIENCE,
    ) -> None:  # fmt: skip
        self.name = name
        self._nice = nice
        self._most = most
        self._clock = clock
        self._patience = patience
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._idle: list[Worker] = []
        self._workers: list[Worker] = []

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        if self._pid != os.getpid():
            self._reset()
        future: Future[_T] = Future()
        call = (future, lambda: fn(*args, **kwargs))
        with self._lock:
            if self._closed:
                raise StoppedError(f"{self.name} was closed: it takes no more calls")
            self._calls.append(call)
            try:
                self._employ()
            except BaseException:
                if len(self._idle) == len(self._workers):  # nobody would ever take it
                    self._calls.remove(call)
                    raise
        return future

    def _employ(self) -> None:
        """Has one more worker look for calls, if there may be one more."""
        if self._idle:
            worker = self._idle.pop()
        elif len(self._workers) < self._most:
            worker = Worker(self.name, nice=self._nice, clock=self._clock)
            self._workers.append(worker)
        else:
            return
        try:
            worker.do(partial(self._take_calls, worker), partial(self._ended, worker))
        except BaseException:
            self._idle.append(worker)
            raise

    def _take_calls(self, worker: Worker) -> None:
        while True:
            with self._lock:  # it rests as soon as there is nothing: no call comes in between
                if not self._calls:
                    self._idle.append(worker)
                    return
                future, call = self._calls.popleft()
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(call())
            except BaseException as error:
                try:
                    background_failures.count(self.name, error)
                finally:  # whatever else fails, the caller hears of it
                    future.set_exception(error)
            del future, call  # an idle thread holds on to nothing

    def _ended(self, worker: Worker, error: BaseException | None) -> None:
        if error is not None:  # of this class itself: the calls that wait are taken all the same
            with self._lock:
                self._idle.append(worker)
                if self._calls:
                    self._employ()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shutdown(cancel_futures=error is not None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls; with `wait` it returns when those that were taken have ended."""
        with self._lock:
            self._closed = True
            workers = self._workers
            while cancel_futures and self._calls:
                self._calls.popleft()[0].cancel()
        end_all(*(worker.stop for worker in workers))
        if wait:
            end_all(*(partial(worker.join, self._patience) for worker in workers))
