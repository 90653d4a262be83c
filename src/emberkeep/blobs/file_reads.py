"""Many reads of files under way at once, from one thread, which does not hold the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any

_DEPTH = 256
# Each part may be of another file, and a process may have a thousand open: so many at once in one
# call, and in all together.
_OPEN_IN_CALL, _OPEN = 128, 256


class _Queue:
    """A queue of the system's; for one thread at a time."""

    def __init__(self) -> None:
        import numpy as np  # `emberkeep --help` needs none

        from emberkeep.kernels import log_reads

        self.context = np.zeros(1, np.int64)
        self.requests = np.zeros((_DEPTH, 8), np.int64)
        self.pointers = np.zeros(_DEPTH, np.int64)
        self.events = np.zeros((_DEPTH, 4), np.int64)
        self.probe = np.zeros(3, np.int64)
        self.works = log_reads.HAS_AIO and log_reads.open_queue(_DEPTH, self.context) == 0


# The system takes its time to make one and longer to end one. A forked child has none of these.
_idle: dict[int, list[_Queue]] = {}
_lock = threading.Lock()
_calls: dict[int, int] = {}


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def _queue() -> Iterator[_Queue]:
    with _lock:
        idle = _idle.setdefault(os.getpid(), [])
        queue = idle.pop() if idle else None
    queue = queue or _Queue()
    try:
        yield queue
    finally:
        if queue.works:  # else another is tried: the system may have had none left
            with _lock:
                idle.append(queue)


@cache
def has_queue() -> bool:
    """Whether the system has such reads for this process."""
    with _queue() as queue:
        return bool(queue.works)


@contextmanager
def open_at_once() -> Iterator[int]:
    """For a call: how many files it may have open."""
    process = os.getpid()
    with _lock:
        _calls[process] = under_way = _calls.get(process, 0) + 1
    try:
        yield min(_OPEN_IN_CALL, -(-_OPEN // under_way))
    finally:
        with _lock:
            _calls[process] -= 1


def read_files(parts: Sequence[tuple[str, int, memoryview]]) -> list[int]:
    """Fills whole blocks of memory with those of files, past the page cache unless they are in it:
    each part is a path, a place and the memory. How many bytes there were of each, below 0 where it
    could not be read so: -22 (EINVAL) by this file system. Parts of one file stand together."""
    import numpy as np

    from emberkeep.kernels import block_reads

    paths: list[bytes] = []
    firsts = [0]
    for path, of_file in groupby(parts, key=lambda part: part[0]):
        paths.append(os.fsencode(path) + b"\0")
        firsts.append(firsts[-1] + sum(1 for _ in of_file))
    lengths = np.array([len(path) for path in paths], np.int64)
    memory = [np.frombuffer(into, np.uint8).__array_interface__["data"][0] for *_, into in parts]
    starts_R, nbytes_R = np.array([(start, len(into)) for _, start, into in parts]).T.copy()
    found_R = np.full(len(parts), -1)
    kernel: Any = block_reads.read_files
    with _queue() as queue:
        kernel(
            queue.context, np.frombuffer(bytearray().join(paths), np.uint8),
            np.cumsum(lengths) - lengths, np.array(firsts), starts_R, np.array(memory), nbytes_R,
            queue.requests, queue.pointers, queue.events, queue.probe, found_R,
        )  # fmt: skip
    return found_R.tolist()
