"""Many small reads at once: records of a log to frames, from threads that do not hold the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from emberkeep._types import I64
from emberkeep.errors import DamageError
from emberkeep.kernels import log_reads as kernels
from emberkeep.runtime.crew import Crew
from emberkeep.runtime.pool import spans
from emberkeep.tiers.log import RowLog
from emberkeep.tiers.record_layout import Layout, aligned
from emberkeep.tiers.superblock import START

# Reads under way at once from one thread, and the threads that stand in where there is no queue.
DEPTH = 64
_THREADS = 16
# Fewer reads than this are not worth a thread there.
_LEAST = 8


class _Queue:
    """A queue of the system's, with its buffers; for one thread at a time.

    With depth 1 it is none: blocks are read one after the other.
    """

    def __init__(self, block_nbytes: int, depth: int) -> None:
        self.context = np.zeros(1, np.int64)
        self.buffers = aligned(depth * block_nbytes).reshape(depth, -1)
        self.requests = np.zeros((depth, 8), np.int64)
        self.pointers = np.zeros(depth, np.int64)
        self.events = np.zeros((depth, 4), np.int64)
        self.deep = depth > 1 and kernels.HAS_AIO and kernels.open_queue(depth, self.context) == 0


class _Queues:
    """Queues for the next reads: the system takes its time to make one and longer to end one."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, int, int], list[_Queue]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def one(self, block_nbytes: int, depth: int) -> Iterator[_Queue]:
        key = (os.getpid(), block_nbytes, depth)  # a forked child has none of its parent's
        with self._lock:
            idle = self._idle.setdefault(key, [])
            queue = idle.pop() if idle else None
        queue = queue or _Queue(block_nbytes, depth)
        try:
            yield queue
        finally:
            with self._lock:
                idle.append(queue)


_queues = _Queues()


class Reads:
    """Reads records of one log. Safe to call from several threads.

    `deep` is False where the system has no queue for reads: then threads wait for one each.
    """

    def __init__(self, log: RowLog, *, threads: int = _THREADS) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._count = threads
        self._threads: Crew | None = None
        with _queues.one(log.block_nbytes, DEPTH) as queue:
            self.deep = queue.deep

    def read(self, records: I64, rows: I64, frames: I64, stamps: I64, layout: Layout) -> None:
        """Brings records to frames of `layout`, their stamps to `stamps[frame]`.

        The caller has started reading, so that nothing is used again meanwhile.
        """
        log = self._log
        order = np.argsort(records)
        records, rows, frames = records[order], rows[order], frames[order]

        def run(start: int, stop: int) -> int:
            part = slice(start, stop)
            with _queues.one(log.block_nbytes, DEPTH if self.deep else 1) as queue:
                read: Any = kernels.read_records
                bad: int = read(
                    queue.context, log.handle, START, queue.buffers, queue.requests,
                    queue.pointers, queue.events, log.salt, log.per_block, layout.record_words,
                    log.segment_blocks, log.generations, records[part], rows[part], frames[part],
                    stamps, layout.addresses, layout.widths, layout.by_row,
                )  # fmt: skip
            return bad if bad < 0 else start + bad

        with log.using():
            bad = run(0, records.size) if self.deep else self._by_threads(run, records.size)
        with self._lock:
            log.reads += records.size
        if bad >= 0:
            segment = int(records[bad]) // log.slots
            error = DamageError(
                f"{log.path}, segment {segment}: the record of a row is not what was written; "
                "nothing of it was used. End this process, check the disk, and resume from the "
                "last durable batch or from a repository",
                name=log.path,
            )
            log.set_aside(segment, error)
            raise error

    def _by_threads(self, run: Callable[[int, int], int], count: int) -> int:
        with self._lock:
            if self._threads is None:
                self._threads = Crew(self._count, "emberkeep-tier-reads", clock=self._log.clock)
        parts = spans(count, self._count, _LEAST)
        return max(self._threads.map(lambda part: run(*part), parts), default=-1)
