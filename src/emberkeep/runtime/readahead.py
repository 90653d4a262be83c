"""Threads of their own for work that must not hold up others."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Queue, SimpleQueue
from typing import TypeVar

from emberkeep.runtime.pool import be_nice

_T = TypeVar("_T")
Task = Callable[[], object]
Ended = Callable[[BaseException | None], object]

_PATIENCE_AT_EXIT = 2.0


class Worker:
    """Does one thing after another in a thread that is there already.

    Starting a thread takes the caller until it runs, which on a busy machine is milliseconds;
    handing work over takes microseconds. No error ends the thread: whoever waits for a task hears
    how it ended. The thread ends with the worker, and before the interpreter does: that waits two
    seconds for a task under way and no longer.
    """

    def __init__(self, name: str, nice: int) -> None:
        self._name, self._nice = name, nice
        self._start()

    def _start(self) -> None:
        self._thread = _Thread(self._name, self._nice)
        weakref.finalize(self, self._thread.tasks.put, None).atexit = False

    def do(self, task: Task, ended: Ended) -> None:
        """Returns at once. When the task has ended, `ended` hears the error that it raised, or
        None; the worker holds on to nothing of the task any more."""
        if not self._thread.is_alive():
            self._start()
        self._thread.tasks.put((task, ended))

    def close(self) -> None:
        """Returns when every task has ended and the thread too; `do` would start another."""
        self._thread.tasks.put(None)
        self._thread.join()


class _Thread(threading.Thread):
    """The thread of a worker. It does not know the worker, which can so be collected."""

    def __init__(self, name: str, nice: int) -> None:
        super().__init__(name=name, daemon=True)
        self.tasks: SimpleQueue[tuple[Task, Ended] | None] = SimpleQueue()
        self._nice = nice
        self.start()
        _threads.add(self)

    def run(self) -> None:
        with suppress(OSError):
            be_nice(self._nice)
        while (item := self.tasks.get()) is not None:
            task, ended = item
            error = None
            try:
                task()
            except BaseException as raised:
                error = raised
            # Before anybody is told: what a task held would else be freed while the interpreter
            # ends, and a tensor that is freed then ends the process with an abort.
            del item, task
            try:
                ended(error)
            except BaseException:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self)))
            del ended, error
        _threads.discard(self)


_threads: set[_Thread] = set()


@atexit.register
def _end_threads() -> None:
    """Nothing of ours runs when the interpreter takes itself apart."""
    deadline = time.monotonic() + _PATIENCE_AT_EXIT
    threads = list(_threads)
    for thread in threads:
        thread.tasks.put(None)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


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
        with suppress(OSError):
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
