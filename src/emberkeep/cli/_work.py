"""Progress of long work over a repository, by bytes: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from emberkeep.blobs.store import Buffer, as_buffers
from emberkeep.blobs.wrapper import WrapperStore

_SECONDS_BETWEEN_LINES = 2.0


class ReadingStore(WrapperStore):
    """Tells `advance` how many bytes of data files were read from it."""

    advance: Callable[[int], None] | None = None

    def get(self, name: str) -> bytes:
        content = super().get(name)
        self._count(name, content)
        return content

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        content = super().get_range(name, start, length)
        self._count(name, content)
        return content

    def _count(self, name: str, content: Buffer) -> None:
        if self.advance is not None and name.startswith("data/"):
            self.advance(len(content))


class WritingStore(WrapperStore):
    """Tells `advance` how many bytes were put."""

    advance: Callable[[int], None] | None = None

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        def counted() -> Iterator[memoryview]:
            for view in as_buffers(data):
                yield view
                if self.advance is not None:
                    self.advance(view.nbytes)

        return super().put(name, counted())


@contextmanager
def progress(title: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A function that takes the number of bytes that were just done, from any thread."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        with bar:
            task = bar.add_task(title, total=nbytes)
            yield lambda done: bar.advance(task, done)
        return
    lines = _Lines(title, nbytes)
    yield lines.advance


class _Lines:
    """Lines every few seconds, each complete in itself; none for what is done at once."""

    def __init__(self, title: str, nbytes: int) -> None:
        self._title = title
        self._total = max(1, nbytes)
        self._done = 0
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._last < _SECONDS_BETWEEN_LINES:
                return
            self._last = now
            percent = min(100, 100 * self._done // self._total)
        print(f"{self._title}: {percent}% of {self._total:,} bytes", file=sys.stderr, flush=True)
