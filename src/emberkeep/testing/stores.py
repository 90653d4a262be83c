"""Stores that misbehave at a chosen operation. Faults are counted, never timed."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TypeVar

from emberkeep.blobs.store import BlobInfo, BlobStore, Buffer, as_buffers
from emberkeep.blobs.wrapper import WrapperStore
from emberkeep.errors import StorageError

_Result = TypeVar("_Result")


class ProcessDied(BaseException):
    """The process that used the store is dead; nothing it would have done happens any more.

    Not an `Exception`, so that no handler mistakes it for something to recover from.
    """


class Fault(enum.Enum):
    """What happens at an operation."""

    FAIL = "it is not performed; the caller gets an error"
    LOSE = "it is performed; the caller gets an error"
    TEAR = "it is performed in part; the caller gets an error"
    DELAY = "the caller gets an error; it is performed a few operations later"
    REPEAT = "it is performed twice, as by a network; the caller gets the second answer"
    JUMP = "it is performed; before it, the clock of the process jumps"
    DIE_BEFORE = "the process dies before it"
    DIE_AFTER = "the process dies after it"
    DIE_TORN = "the process dies when it is performed in part"


class RecordingStore(WrapperStore):
    """Remembers every operation as (method, name)."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.operations: list[tuple[str, str]] = []

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        self.operations.append(("put", name))
        return super().put(name, data)

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        self.operations.append(("put_if_absent", name))
        return super().put_if_absent(name, data)

    def get(self, name: str) -> bytes:
        self.operations.append(("get", name))
        return super().get(name)

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        self.operations.append(("get_range", name))
        return super().get_range(name, start, length)

    def size(self, name: str) -> int:
        self.operations.append(("size", name))
        return super().size(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        self.operations.append(("list", prefix))
        return super().list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        doomed = list(names)
        self.operations.append(("delete", " ".join(doomed)))
        super().delete(doomed)


class FaultStore(WrapperStore):
    """Performs operation k as `faults[k]` says; all others as they are.

    `count` is the number of operations so far. `before`, if given, is called with the number,
    method and name of each operation before it happens: tests use it to let another process act
    at exactly that point. `jump` is called where the clock is to jump.
    """

    def __init__(
        self,
        inner: BlobStore,
        faults: Mapping[int, Fault] | None = None,
        *,
        delay: int = 3,
        before: Callable[[int, str, str], None] | None = None,
        jump: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(inner)
        self.jump = jump
        self.faults = dict(faults or {})
        self.count = 0
        self._delay = delay
        self.before = before
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._dead = False

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        content = b"".join(as_buffers(data))
        return self._operate(
            "put",
            name,
            lambda: self.inner.put(name, content),
            lambda: self.inner.put(name, content[: len(content) // 2]),
        )

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        content = bytes(data)
        return self._operate(
            "put_if_absent",
            name,
            lambda: self.inner.put_if_absent(name, content),
            lambda: self.inner.put_if_absent(name, content[: len(content) // 2]),
        )

    def get(self, name: str) -> bytes:
        return self._operate("get", name, lambda: self.inner.get(name))

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        return self._operate("get_range", name, lambda: self.inner.get_range(name, start, length))

    def size(self, name: str) -> int:
        return self._operate("size", name, lambda: self.inner.size(name))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        return iter(self._operate("list", prefix, lambda: list(self.inner.list(prefix))))

    def delete(self, names: Iterable[str]) -> None:
        doomed = list(names)
        self._operate(
            "delete",
            " ".join(doomed),
            lambda: self.inner.delete(doomed),
            lambda: self.inner.delete(doomed[::2]),
        )

    def sweep(self, *, older_than: timedelta) -> int:
        return self._operate("sweep", "", lambda: self.inner.sweep(older_than=older_than))

    def deliver(self) -> None:
        """Performs everything that is still delayed."""
        late, self._late = self._late, []
        for _, perform in late:
            with contextlib.suppress(StorageError):
                perform()

    def _operate(
        self,
        method: str,
        name: str,
        perform: Callable[[], _Result],
        tear: Callable[[], object] = lambda: None,
    ) -> _Result:
        if self._dead:
            raise ProcessDied
        number = self.count
        self.count += 1
        due = [late for at, late in self._late if at <= number]
        self._late = [(at, late) for at, late in self._late if at > number]
        for late in due:
            with contextlib.suppress(StorageError):
                late()
        if self.before is not None:
            self.before(number, method, name)
        fault = self.faults.get(number)
        if fault is Fault.JUMP:
            self.jump()
        elif fault is Fault.REPEAT:
            perform()
        if fault in (None, Fault.JUMP, Fault.REPEAT):
            return perform()
        if fault in (Fault.LOSE, Fault.DIE_AFTER):
            with contextlib.suppress(StorageError):
                perform()
        elif fault in (Fault.TEAR, Fault.DIE_TORN):
            tear()
        elif fault is Fault.DELAY:
            self._late.append((number + self._delay, perform))
        if fault in (Fault.DIE_BEFORE, Fault.DIE_AFTER, Fault.DIE_TORN):
            self._dead = True
            raise ProcessDied
        raise StorageError(f"injected: {method} {name} (operation {number}): {fault.value}")
