"""Objects in this process's memory: for tests, and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from emberkeep.blobs.store import BlobInfo, Buffer, as_buffers, check_name, check_range
from emberkeep.errors import MissingObjectError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock


class MemoryStore:
    """A dictionary with the guarantees of a store, except that it dies with the process."""

    reads_at_once = 1  # nothing is waited for

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._objects: dict[str, tuple[bytes, datetime]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return "memory://"

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        check_name(name)
        content = b"".join(as_buffers(data))
        with self._lock:
            self._objects[name] = (content, self._clock.now())
        return len(content)

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        check_name(name)
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = (bytes(data), self._clock.now())
        return True

    def get(self, name: str) -> bytes:
        try:
            return self._objects[check_name(name)][0]
        except KeyError:
            raise MissingObjectError(f"{self.url} holds no object {name}") from None

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        check_range(name, start, length)
        return self.get(name)[start : start + length]

    def size(self, name: str) -> int:
        return len(self.get(name))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        below = f"{check_name(prefix)}/" if prefix else ""
        with self._lock:
            found = [(n, len(c), m) for n, (c, m) in self._objects.items() if n.startswith(below)]
        for name, size, modified in found:
            yield BlobInfo(name=name, size=size, modified=modified)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._lock:
                self._objects.pop(check_name(name), None)

    def sweep(self, *, older_than: timedelta) -> int:
        return 0
