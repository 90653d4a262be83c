"""A store around another one: the base for stores that change a single behaviour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

from emberkeep.blobs.base import BlobInfo, BlobStore, Buffer
from emberkeep.errors import MissingObjectError


class WrapperStore:
    """Forwards every call unchanged; subclasses override what they change."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        return self.inner.put(name, data)

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        return self.inner.put_if_absent(name, data)

    def get(self, name: str) -> bytes:
        return self.inner.get(name)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        return self.inner.get_range(name, start, length)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        return self.inner.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete(names)

    def sweep(self, *, older_than: timedelta) -> int:
        return self.inner.sweep(older_than=older_than)


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
