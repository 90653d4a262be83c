"""Threads of their own for work that must not hold up others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import Queue, SimpleQueue
from typing import TypeVar

from emberkeep.pool import be_nice

_T = TypeVar("_T")


class Worker:
    """Does one thing after another in a thread that is there already.

    Starting a thread takes the caller until it runs, which on a busy machine is milliseconds;
    handing work over takes microseconds. The thread ends with the worker, and never keeps a
    process from ending.
    """

    def __init__(self, name: str, nice: int) -> None:
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._tasks, nice), name=name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def do(self, task: Callable[[], object]) -> None:
        """Returns at once; the task sees to its own errors."""
        self._tasks.put(task)


def _work(tasks: SimpleQueue[Callable[[], object] | None], nice: int) -> None:
    be_nice(nice)
    while (task := tasks.get()) is not None:
        task()
        # A task knows the owner of its worker, which could otherwise never be collected.
        del task


class _Stop:
    """Ends a queue; carries the error of the thread that filled it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead_of(items: Iterable[_T], depth: int = 4, nice: int = 0) -> Iterator[_T]:
    with Ahead(items, nice, depth) as running:
        yield from running


class Ahead(Iterator[_T]):
    """Iterates in a thread of its own, a few items ahead; errors come out where they belong."""

    def __init__(self, items: Iterable[_T], nice: int = 0, depth: int = 4) -> None:
        self._queue: Queue[_T | _Stop] = Queue(depth)
        self._given_up = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(items, nice), name="emberkeep-ahead", daemon=True
        )
        self._thread.start()

    def _fill(self, items: Iterable[_T], nice: int) -> None:
        be_nice(nice)
        try:
            for item in items:
                self._queue.put(item)
                if self._given_up.is_set():
                    return
        except BaseException as error:
            self._queue.put(_Stop(error))
        else:
            self._queue.put(_Stop(None))

    def __next__(self) -> _T:
        item = self._queue.get()
        if isinstance(item, _Stop):
            self._queue.put(item)
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def __enter__(self) -> Ahead[_T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.01)
            except Exception:
                continue
        self._thread.join()
