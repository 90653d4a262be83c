"""Disks that fail, and power cuts: what a disk may hold when the plug was pulled.

Both are for `LocalStore` and tiers. The model of a power cut is the one that POSIX promises and no
more: bytes are on the medium once their file was synced, directory entries once their directory
was. Everything else may be there, be missing, or be there in part, independently for every file
and entry.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from emberkeep.blobs.system_disk import Disk

_SECTOR = 512


class FaultyDisk(Disk):
    """Lets system calls fail with an error number: chosen by count, never by time.

    `calls` names the calls since the last `fail` or `heal`, so that a test can count what an
    operation does, and then fail each of it. A call that fails is not performed, except `close`:
    the system lets a file go whatever it answers.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self.calls: list[str] = []
        self._disk = disk or Disk()
        self._lock = threading.Lock()
        self._fails: Callable[[int], bool] = lambda _: False
        self._code = 0
        for name, method in vars(Disk).items():
            if callable(method) and not name.startswith("_"):
                setattr(self, name, partial(self._perform, name))

    def fail(self, at: int, code: int, *, for_good: bool = False) -> None:
        """Call `at` from now on fails, the first one being 0; `for_good`, all after it too."""
        self.heal()
        self._code = code
        self._fails = (lambda number: number >= at) if for_good else (lambda number: number == at)

    def heal(self) -> None:
        """No call fails any more."""
        self._fails = lambda _: False
        self.calls = []

    def _perform(self, name: str, *args: Any, **options: Any) -> Any:
        with self._lock:
            fails = self._fails(len(self.calls))
            self.calls.append(name)
        if fails and name != "close":
            raise OSError(self._code, os.strerror(self._code))
        result = getattr(self._disk, name)(*args, **options)
        if fails:
            raise OSError(self._code, os.strerror(self._code))
        return result


class RecordingDisk(Disk):
    """Performs every call and writes it down; `calls` is the input of `power_cut`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._open: dict[int, str] = {}

    def create(self, path: str) -> int:
        handle = super().create(path)
        self._open[handle] = path
        self.calls.append(("create", path))
        return handle

    def write(self, handle: int, view: memoryview) -> None:
        super().write(handle, view)
        self.calls.append(("write", self._open[handle], bytes(view)))

    def open(self, path: str, *, direct: bool) -> int:
        handle = super().open(path, direct=direct)
        self._open[handle] = path
        return handle

    def write_at(self, handle: int, view: memoryview, offset: int) -> None:
        super().write_at(handle, view, offset)
        self.calls.append(("write_at", self._open[handle], bytes(view), offset))

    def allocate(self, handle: int, offset: int, nbytes: int) -> None:
        super().allocate(handle, offset, nbytes)
        self.calls.append(("allocate", self._open[handle], offset + nbytes))

    def sync(self, handle: int) -> None:
        super().sync(handle)
        if handle in self._open:
            self.calls.append(("sync", self._open[handle]))

    def close(self, handle: int) -> None:
        self._open.pop(handle, None)  # what was opened to be read is not followed
        super().close(handle)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.calls.append(("rename", source, target))

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self.calls.append(("link", source, target))

    def rename_new(self, source: str, target: str) -> None:
        super().rename_new(source, target)
        self.calls.append(("rename", source, target))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.calls.append(("unlink", path))

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        self.calls.append(("make_directory", path))

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self.calls.append(("sync_directory", path))


@dataclass
class _File:
    content: bytes = b""
    synced: bytes = b""
    waiting: list[tuple[bytes, int]] = field(default_factory=list)
    """Writes in place since the last sync."""

    def write_at(self, data: bytes, offset: int) -> None:
        self.waiting.append((data, offset))
        self.content = _written(self.content, data, offset)

    def cut(self, random: Random) -> bytes:
        """What may be there: of appended bytes any prefix, of writes in place any sectors."""
        if not self.waiting:
            return self.content[: random.randint(len(self.synced), len(self.content))]
        held = self.synced.ljust(random.choice((len(self.synced), len(self.content))), b"\0")
        for data, offset in self.waiting:
            if random.random() < 0.3:
                continue
            whole = random.random() < 0.5
            for at in range(0, len(data), _SECTOR):
                if whole or random.random() < 0.5:
                    held = _written(held, data[at : at + _SECTOR], offset + at)
        return held


def _written(content: bytes, data: bytes, offset: int) -> bytes:
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


@dataclass
class _Medium:
    """Entries as processes see them, and as the medium holds them; None is a directory."""

    entries: dict[str, _File | None] = field(default_factory=dict)
    durable: dict[str, _File | None] = field(default_factory=dict)

    def apply(self, call: tuple[Any, ...]) -> None:
        kind, path, *rest = call
        if kind == "create":
            self.entries[path] = _File()
        elif kind == "write":
            self._file(path).content += rest[0]
        elif kind == "sync":
            file = self._file(path)
            file.synced, file.waiting = file.content, []
        elif kind == "write_at":
            self._file(path).write_at(*rest)
        elif kind == "allocate":
            file = self._file(path)
            file.content = file.content.ljust(rest[0], b"\0")
        elif kind == "rename":
            self.entries[rest[0]] = self.entries.pop(path)
        elif kind == "link":
            self.entries[rest[0]] = self.entries[path]
        elif kind == "unlink":
            del self.entries[path]
        elif kind == "make_directory":
            self.entries[path] = None
        elif kind == "sync_directory":
            for entries in (self.durable, self.entries):
                for child in [c for c in entries if os.path.dirname(c) == path]:
                    if child in self.entries:
                        self.durable[child] = self.entries[child]
                    else:
                        del self.durable[child]

    def _file(self, path: str) -> _File:
        file = self.entries[path]
        assert file is not None
        return file


def power_cut(
    calls: Sequence[tuple[Any, ...]], root: str, target: str, *, random: Random | None = None
) -> None:
    """Builds under `target` a disk that `root` may have become after these calls and a power cut.

    Without `random` nothing survives that was not synced; with it, any of it may, in part.
    """
    medium = _Medium()
    for call in calls:
        medium.apply(call)
    state = dict(medium.durable)
    if random is not None:
        for path in sorted({*medium.entries, *medium.durable}):
            source = random.choice((medium.entries, medium.durable))
            state.pop(path, None)
            if path in source:
                state[path] = source[path]
    for path, file in sorted(state.items()):
        copy = os.path.join(target, os.path.relpath(path, root))
        if not os.path.isdir(os.path.dirname(copy)):
            continue  # its directory did not survive
        if file is None:
            os.makedirs(copy, exist_ok=True)
            continue
        content = file.synced
        if random is not None and file.content != file.synced:
            content = file.cut(random)
        with open(copy, "wb") as output:
            output.write(content)
