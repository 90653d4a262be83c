"""A store around another one: the base for stores that change a single behaviour."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from datetime import timedelta

from emberkeep.blobs.calls import caller_of
from emberkeep.blobs.memory_store import MemoryStore
from emberkeep.blobs.store import BlobInfo, BlobStore, Buffer, KeepsReserve, reads_at_once
from emberkeep.errors import MissingObjectError


class WrapperStore:
    """Forwards every call unchanged; subclasses override what they change."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def reads_at_once(self) -> int:
        return reads_at_once(self.inner)

    @property
    def calls_at_once(self) -> Executor | None:
        return caller_of(self.inner)

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        return self.inner.put(name, data)

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        return self.inner.put_if_absent(name, data)

    def get(self, name: str) -> bytes:
        return self.inner.get(name)

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        return self.inner.get_range(name, start, length)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        return self.inner.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete(names)

    def sweep(self, *, older_than: timedelta) -> int:
        return self.inner.sweep(older_than=older_than)


def keep_reserve(store: BlobStore) -> None:
    """Has a store that can hold room back for gc do so, below whatever wraps it."""
    if (found := _with_reserve(store)) is not None:
        found.keep_reserve()


@contextmanager
def spending_reserve(store: BlobStore) -> Iterator[None]:
    """While gc works: a store that keeps a reserve for it spends it if no byte is free."""
    found = _with_reserve(store)
    with nullcontext() if found is None else found.spending_reserve():
        yield


def _with_reserve(store: BlobStore) -> KeepsReserve | None:
    while isinstance(store, WrapperStore) and not isinstance(store, OverlayStore):
        store = store.inner
    return store if isinstance(store, KeepsReserve) else None


class ExclusiveStore(WrapperStore):
    """Looks before it creates, for stores that cannot create conditionally.

    Sound only while one process alone writes: between the look and the put another one fits.
    """

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        try:
            self.inner.size(name)
        except MissingObjectError:
            self.inner.put(name, data)
            return True
        return False


class OverlayStore(WrapperStore):
    """Keeps what is written and deleted to itself: the store below is only read.

    So that what an operation would do is found out by doing it.
    """

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self._written = MemoryStore()
        self._gone: set[str] = set()
        self._lock = threading.Lock()

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        size = self._written.put(name, data)
        self._gone.discard(name)
        return size

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        with self._lock:
            try:
                self.size(name)
            except MissingObjectError:
                self.put(name, data)
                return True
            return False

    def get(self, name: str) -> bytes:
        return self._holder(name).get(name)

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        return self._holder(name).get_range(name, start, length)

    def size(self, name: str) -> int:
        return self._holder(name).size(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        written = {info.name: info for info in self._written.list(prefix)}
        for info in self.inner.list(prefix):
            if info.name not in written and info.name not in self._gone:
                yield info
        yield from written.values()

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._gone.add(name)
            self._written.delete([name])

    def sweep(self, *, older_than: timedelta) -> int:
        return 0

    def _holder(self, name: str) -> BlobStore:
        """The store that has the object, or that says in its own words that there is none."""
        try:
            self._written.size(name)
        except MissingObjectError:
            return self._written if name in self._gone else self.inner
        return self._written
