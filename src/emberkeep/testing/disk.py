"""Power cuts for `LocalStore`: what a disk may hold when the plug was pulled after any call.

The model is the one that POSIX promises and no more: bytes are on the medium once their file was
synced, directory entries once their directory was. Everything else may be there, be missing, or
be there in part, independently for every file and entry.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from emberkeep.blobs.local import Disk


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

    def sync(self, handle: int) -> None:
        super().sync(handle)
        if handle in self._open:
            self.calls.append(("sync", self._open[handle]))

    def close(self, handle: int) -> None:
        del self._open[handle]
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
            file.synced = file.content
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
            content = file.content[: random.randint(len(file.synced), len(file.content))]
        with open(copy, "wb") as output:
            output.write(content)
