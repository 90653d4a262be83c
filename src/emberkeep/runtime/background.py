"""Threads that work for a slab and end with it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from emberkeep.runtime.pool import be_nice

_Owner = TypeVar("_Owner")


class Background(Generic[_Owner]):
    """Calls `work(owner)` whenever it is woken, until that returns False.

    The thread starts with the first `wake`, holds on to its owner only while it works, and ends
    once the owner is gone or `stop` was called. Whatever `work` raises ends it too: `error` keeps
    it, and `failed(owner, error)` tells whoever waits for this thread that nothing will come.
    """

    def __init__(
        self,
        owner: _Owner,
        work: Callable[[_Owner], bool],
        failed: Callable[[_Owner, BaseException], None],
        *,
        name: str,
        nice: int = 0,
    ) -> None:
        self.error: BaseException | None = None
        self._owner = weakref.ref(owner)
        self._work = work
        self._failed = failed
        self._name = name
        self._nice = nice
        self._wanted = threading.Semaphore(0)
        self._waiting = False
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        weakref.finalize(owner, self.stop)

    def wake(self) -> None:
        """Has the thread work; raises nothing, since callers have done their work already."""
        if self._stopped or self._pid != os.getpid():
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except BaseException as error:  # the system has no thread to give
                self._end(error)
                return
            self._thread = thread
        if not self._waiting:  # woken once is enough, however often it was asked for
            self._waiting = True
            self._wanted.release()

    def stop(self) -> None:
        self._stopped = True
        self._wanted.release()

    def _run(self) -> None:
        try:
            be_nice(self._nice)
            while not self._stopped:
                self._wanted.acquire()
                self._waiting = False
                self._work_through()
        except BaseException as error:
            self._end(error)

    def _work_through(self) -> None:
        while not self._stopped:
            owner = self._owner()
            if owner is None or not self._work(owner):
                return

    def _end(self, error: BaseException) -> None:
        self.error = error
        self._stopped = True
        owner = self._owner()
        if owner is not None:
            self._failed(owner, error)
