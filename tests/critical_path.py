"""How many calls of a store come one after another: counted, not timed.

Every thread has a logical time. A call of the store takes one; what is handed to a crew begins at
the time of who hands it over, and who waits for its result goes on at the later of both times. So
the time at the end is the length of the longest chain of calls of which each waits for the one
before, whatever the machine does meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from emberkeep.blobs.store import BlobInfo, BlobStore, Buffer, read_into
from emberkeep.blobs.wrapper import WrapperStore
from emberkeep.runtime import crew

_T = TypeVar("_T")

_local = threading.local()


def _time() -> int:
    return int(getattr(_local, "time", 0))


class _TimedFuture(Future[Any]):
    """Knows when its result came to be."""

    time = 0

    def set_result(self, result: Any) -> None:
        self.time = _time()
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self.time = _time()
        super().set_exception(exception)

    def cancel(self) -> bool:
        """Each call has a thread, as where each takes a round trip."""
        return False

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            _local.time = max(_time(), self.time)


_submit = crew.Crew.submit


def _submit_timed(self: crew.Crew, fn: Callable[..., _T], /, *args: Any, **kw: Any) -> Future[_T]:
    time = _time()

    def timed() -> _T:
        _local.time = time
        return fn(*args, **kw)

    return _submit(self, timed)


class CountedCalls(WrapperStore):
    """A store whose calls are made at once, as those of an object store. `calls` has each with the
    time at which it ended; only within `counting`, which starts at 0."""

    reads_at_once = 64

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.calls: list[tuple[int, str, str]] = []
        self._crew = crew.Crew(64, "emberkeep-requests")

    @property
    def calls_at_once(self) -> Executor:
        return self._crew

    @property
    def time(self) -> int:
        """That of the calling thread: how many calls it had to wait for, one after the other."""
        return _time()

    @contextmanager
    def counting(self) -> Iterator[None]:
        _local.time = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(crew, "Future", _TimedFuture)
            patch.setattr(crew.Crew, "submit", _submit_timed)
            yield

    def _count(self, what: str, name: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        finally:
            _local.time = _time() + 1
            self.calls.append((_time(), what, name))

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        return self._count("put", name, lambda: self.inner.put(name, data))

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        return self._count("create", name, lambda: self.inner.put_if_absent(name, data))

    def get(self, name: str) -> bytes:
        return self._count("get", name, lambda: self.inner.get(name))

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        return self._count("range", name, lambda: self.inner.get_range(name, start, length))

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        return self._count("range", name, lambda: read_into(self.inner, name, start, into))

    def size(self, name: str) -> int:
        return self._count("size", name, lambda: self.inner.size(name))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        return iter(self._count("list", prefix, lambda: [*self.inner.list(prefix)]))

    def delete(self, names: Iterable[str]) -> None:
        doomed = [*names]
        self._count("delete", " ".join(doomed), lambda: self.inner.delete(doomed))
