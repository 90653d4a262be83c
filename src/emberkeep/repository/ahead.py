"""Work done a little ahead by a thread of its own, so that storage and processors are both busy."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import Queue
from typing import TypeVar

from emberkeep.pool import be_nice

_T = TypeVar("_T")


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
