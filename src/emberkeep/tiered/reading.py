"""Many small reads at once: records of a log to frames, from threads that do not hold the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from emberkeep.errors import DamageError
from emberkeep.kernels import tier as kernels
from emberkeep.pool import spans
from emberkeep.tiered.log import DEPTH, I64, START, Layout, RowLog, aligned

# Threads that stand in where the system has no queue for reads.
_THREADS = 16
# Fewer reads than this are not worth a thread there.
_LEAST = 8


class _Queue:
    """A queue of the system's, with its buffers; for one thread at a time."""

    def __init__(self, block_nbytes: int) -> None:
        self.context = np.zeros(1, np.int64)
        self.buffers = aligned(DEPTH * block_nbytes).reshape(DEPTH, -1)
        self.requests = np.zeros((DEPTH, 8), np.int64)
        self.pointers = np.zeros(DEPTH, np.int64)
        self.events = np.zeros((DEPTH, 4), np.int64)
        self.works = kernels.HAS_AIO and kernels.open_queue(DEPTH, self.context) == 0


class _Queues:
    """Queues for the next reads: the system takes its time to make one and longer to end one."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, int], list[_Queue]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def one(self, block_nbytes: int) -> Iterator[_Queue]:
        key = (os.getpid(), block_nbytes)  # a forked child has none of its parent's
        with self._lock:
            idle = self._idle.setdefault(key, [])
            queue = idle.pop() if idle else None
        queue = queue or _Queue(block_nbytes)
        try:
            yield queue
        finally:
            with self._lock:
                idle.append(queue)


_queues = _Queues()


class Reads:
    """Reads records of one log. Safe to call from several threads."""

    def __init__(self, log: RowLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def read(self, records: I64, rows: I64, frames: I64, stamps: I64, layout: Layout) -> None:
        """Brings records to frames of `layout`, their stamps to `stamps[frame]`.

        The caller has begun reading, so that nothing is used again meanwhile.
        """
        log = self._log
        order = np.argsort(records)
        records, rows, frames = records[order], rows[order], frames[order]
        common: Any = (
            log.salt, log.per_block, layout.record_words, log.segment_blocks, log.generations
        )  # fmt: skip
        rest: Any = (stamps, layout.addresses, layout.widths, layout.by_row)
        with log.using(), _queues.one(log.block_nbytes) as queue:
            bad = self._read(queue, common, records, rows, frames, rest)
        with self._lock:
            log.reads += records.size
        if bad >= 0:
            raise DamageError(
                f"{log.path}, segment {records[bad] // log.slots}: the record of a row is not what "
                "was written; nothing of it was used. End this process, check the disk, and resume "
                "from the last durable batch or from a repository",
                name=log.path,
            )

    def _read(
        self, queue: _Queue, common: Any, records: I64, rows: I64, frames: I64, rest: Any
    ) -> int:
        log = self._log
        if queue.works:
            read: Any = kernels.read_deeply
            bad: int = read(
                queue.context, log.handle, START, queue.buffers, queue.requests,
                queue.pointers, queue.events, *common, records, rows, frames, *rest,
            )  # fmt: skip
            return bad
        return self._read_by_threads(common, records, rows, frames, rest)

    def _read_by_threads(self, common: Any, records: I64, rows: I64, frames: I64, rest: Any) -> int:
        log = self._log
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="emberkeep-tier")

        def run(start: int, stop: int) -> int:
            part = slice(start, stop)
            read: Any = kernels.read_serially
            bad: int = read(
                log.handle, START, aligned(log.block_nbytes), *common, records[part],
                rows[part], frames[part], *rest,
            )  # fmt: skip
            return bad if bad < 0 else start + bad

        parts = spans(records.size, _THREADS, _LEAST)
        found = list(self._threads.map(lambda part: partial(run, *part)(), parts))
        return max(found, default=-1)
