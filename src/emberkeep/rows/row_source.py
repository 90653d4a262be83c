"""Where a snapshot copies rows from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from emberkeep._types import I64, Array, Planes
from emberkeep.kernels import row_copies
from emberkeep.runtime.pool import Job, Pool, shares

LEAST_ROWS = 2048
"""Fewer rows are not worth a thread of their own."""


class Later(Protocol):
    """The rest of a taking. It is called once, without the lock, or else ended: what it needs is
    kept until then. To end it afterwards does nothing."""

    def __call__(self) -> None: ...

    def end(self) -> None: ...


class RowSource(Protocol):
    """Where a snapshot copies rows from."""

    beside_writers: bool
    """Whether rows can be taken without the lock; those that are written meanwhile may be torn."""

    def take(self, rows: I64, out: Planes, pool: Pool | None = None) -> Later | None:
        """Fills `out` with the planes of rows as they are now; with the threads of a pool, if one
        is given: then rows need not ascend.

        What takes longer may be left for later.
        """


class Arrays:
    """Planes that are all in memory; `rows` are places in them."""

    beside_writers = True

    def __init__(self, planes: Mapping[str, Array]) -> None:
        # A holder may put other arrays in the place of these; the instant is in the old ones.
        self._planes = dict(planes)

    def take(self, rows: I64, out: Planes, pool: Pool | None = None) -> None:
        if pool is None and rows.size:
            start = int(rows[0])
            if int(rows[-1]) - start + 1 == rows.size:  # they ascend
                for name, values in out.items():
                    np.copyto(values, self._planes[name][start : start + rows.size])
                return
        for name, values in out.items():
            plane = self._planes[name]
            if plane.itemsize % 4 or not plane.flags.c_contiguous:
                # With "raise" numpy would copy to a buffer first.
                np.take(plane, rows, axis=0, out=values, mode="clip")
                continue
            call = rows, plane.view(np.float32), pool is not None, values.view(np.float32)
            if pool is None:
                row_copies.copy_out(0, rows.size, *call)
            else:
                parts = shares(rows.size, pool.threads, LEAST_ROWS)
                pool.together(Job(row_copies.write_copy_out, parts, call))
