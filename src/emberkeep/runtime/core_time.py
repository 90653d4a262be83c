"""How much processor time work in several threads takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from emberkeep.runtime.pool import Pool

_T = TypeVar("_T")


class CoreTime:
    """Adds up the processor time, the kernel's included, that threads spend on what is counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        return self._seconds

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What the calling thread does in the body."""
        start = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self._seconds += time.thread_time() - start

    def iterating(self, items: Iterable[_T]) -> Iterator[_T]:
        """What the thread that iterates spends on making the items, not on using them."""
        iterator = iter(items)
        while True:
            try:
                with self.counting():
                    item = next(iterator)
            except StopIteration:
                return
            yield item
            del item


class CountedPool(Pool):
    """A pool whose threads are counted; the caller, which is one of them, counts itself."""

    def __init__(self, threads: int | None, cores: CoreTime, *, nice: int = 0) -> None:
        super().__init__(threads, nice=nice)
        self._cores = cores

    def run(self, tasks: Sequence[Callable[[], object]]) -> None:
        caller = threading.get_ident()
        super().run([partial(self._run, task, caller) for task in tasks])

    def _run(self, task: Callable[[], object], caller: int) -> None:
        if threading.get_ident() == caller:
            task()
            return
        with self._cores.counting():
            task()
