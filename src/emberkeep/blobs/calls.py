"""Calls that do not depend on each other: made at once where each of them waits for a network.

A store whose calls take a round trip has `calls_at_once`, an executor; stores around it hand it
on. Where there is none, calls are made one after the other, each when its result is asked for, so
that what is done on a disk or in memory has one order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from emberkeep.blobs.store import BlobStore

_T = TypeVar("_T")


def caller_of(store: BlobStore) -> Executor | None:
    """What makes calls of a store at once; None where they are not worth it."""
    found: Executor | None = getattr(store, "calls_at_once", None)
    return found


class Call(Generic[_T]):
    """A call under way, or one that is made when its result is first asked for. What it raises is
    raised by `result`, each time, and is nobody else's."""

    def __init__(self, store: BlobStore, call: Callable[[], _T]) -> None:
        self._call = call
        self._value: _T | None = None
        self.error: BaseException | None = None
        """What it has raised, if it has ended."""
        caller = caller_of(store)
        self._future: Future[None] | None = None if caller is None else caller.submit(self._do)
        self._done = False
        self._waiting = threading.Lock()

    def _do(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # raised where the result is asked for
            self.error = error

    @property
    def made(self) -> bool:
        """Whether it was made, or is under way."""
        return self._done or self._future is not None

    def wait(self) -> None:
        """Returns when it has ended, however. What nobody has started is done here: one that waits
        for others in a thread that could take them does not wait for itself."""
        with self._waiting:
            if not self._done:
                if self._future is None or self._future.cancel():
                    self._do()
                else:
                    self._future.result()
                self._done = True

    def result(self) -> _T:
        self.wait()
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


def together(store: BlobStore, calls: list[Callable[[], _T]]) -> list[_T]:
    """What calls return, in their order. Raises what the first of them raises that does; where they
    are made at once, when all have ended."""
    if len(calls) < 2 or caller_of(store) is None:
        return [call() for call in calls]
    under_way = [Call(store, call) for call in calls]
    for each in under_way:
        each.wait()
    return [each.result() for each in under_way]
