"""Which rows to save first when not all can be: three ways to rank them (CPR).

A ranking follows the rows of one slab between prioritised versions. It hears of every update, says
which rows matter most, and forgets those that were saved: what is *taken* out of it belongs to a
save under way, and goes back if that save fails, so that nothing loses its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from emberkeep._types import F32, I32, I64, U32, U64
from emberkeep.errors import ConfigError
from emberkeep.kernels import batch_rows as bitmaps
from emberkeep.kernels import row_scores as kernels
from emberkeep.runtime.memory import lazy_zeros
from emberkeep.runtime.pool import Pool, spans

Kind = Literal["mfu", "ssu", "scar"]

# Tables that hold this share of all rows, the largest first, are prioritised; the rest is small
# enough to be saved whole every time.
_SHARE = 0.99
_BINS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """Saves the `fraction` of the rows that matters most, `1 / fraction` times as often.

    - *mfu*: the most frequently updated since they were saved; a counter of 4 bytes for each row.
    - *ssu*: a list of rows that were updated in one of every `period` pushes, at most `fraction` of
      all; a row that is updated often is likely to be on it. 4 bytes for each entry.
    - *scar*: the farthest from where they were saved. Needs a second copy of the rows: it is here
      to be compared with.
    """

    kind: Kind = "ssu"
    fraction: float = 1 / 8
    period: int = 2

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"priority is one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        if not 0 < self.fraction <= 0.5:
            raise ConfigError(f"fraction must be above 0 and at most 0.5, not {self.fraction:g}")
        if self.period < 1:
            raise ConfigError(f"period must be 1 or more, not {self.period}")

    @property
    def rounds(self) -> int:
        """Saves in which as many rows are written as there are."""
        return max(2, round(1 / self.fraction))


def prioritised(sizes: Sequence[int]) -> set[int]:
    """Which tables, by their sizes, are large enough to be prioritised."""
    chosen: set[int] = set()
    held, total = 0, sum(sizes)
    for table in sorted(range(len(sizes)), key=lambda t: (-sizes[t], t)):
        if held >= _SHARE * total:
            break
        chosen.add(table)
        held += sizes[table]
    return chosen


@dataclass(frozen=True, slots=True)
class Span:
    """Table `index` of a slab: rows `base` to `base + rows`."""

    index: int
    base: int
    rows: int


class Ranking:
    """The rows of some tables of one slab by how much they matter.

    The slab's lock covers every method but `select`, which reads while rows change: an update that
    it just misses counts for the next time.
    """

    def __init__(self, spec: Priority, tables: Sequence[Span], pool: Pool) -> None:
        self.spec = spec
        self.tables = tables
        self.pool = pool
        self.limit = int(spec.fraction * sum(table.rows for table in tables))

    @property
    def nbytes(self) -> int:
        """What it takes, whether touched yet or not."""
        raise NotImplementedError

    def updating(self, rows: I64, start: int, stop: int) -> None:
        """Rows at these positions are about to change; called for disjoint ranges at once."""

    def updated(self, rows: I64, offsets_T: I64) -> None:
        """A push has changed these rows, table by table."""

    def removed(self, rows: I64) -> None:
        """These rows were deleted: they may get a new owner."""
        self.take(np.sort(rows))

    def select(self) -> I64:
        """The rows to save, ascending: at most `fraction` of them all, in linear time."""
        raise NotImplementedError

    def take(self, rows: I64) -> Any:
        """Forgets rows that are about to be saved; what `put_back` wants if that fails."""
        raise NotImplementedError

    def take_all(self) -> Any:
        """The same for all rows, in constant time."""
        raise NotImplementedError

    def put_back(self, taken: Any) -> None:
        raise NotImplementedError

    def _largest(self, keys: U32) -> I64:
        """The rows with the largest keys that are not 0, `limit` at most; exact, in linear time."""
        upper, above, equal = self._cut(keys, -1, self.limit)
        threshold = 0
        wanted = 0
        if upper >= 0:
            lower, more, equal = self._cut(keys, upper, self.limit - above)
            threshold = (upper << 16) + max(0, lower)  # keys may have grown since the first look
            wanted = self.limit - above - more
        out = np.empty(self.limit, np.int64)
        taken = seen = 0
        for table in self.tables:
            taken, seen = kernels.collect(
                keys, table.base, table.base + table.rows, threshold, equal, taken, wanted, seen,
                out,
            )  # fmt: skip
        return out[:taken]

    def _cut(self, keys: U32, prefix: int, limit: int) -> tuple[int, int, int]:
        """The bin in which the largest keys exceed the limit, how many are above it and in it;
        -1 where all fit."""
        bins = np.zeros(_BINS, np.int64)
        for table in self.tables:
            kernels.histogram(keys, table.base, table.base + table.rows, prefix, bins)
        from_top = np.cumsum(bins[::-1])
        at = int(np.searchsorted(from_top, limit, side="right"))
        if at == _BINS:
            return -1, 0, 1
        above = int(from_top[at - 1]) if at else 0
        return _BINS - 1 - at, above, int(from_top[at]) - above


class MostUsed(Ranking):
    """Counts the updates of every row."""

    def __init__(self, spec: Priority, tables: Sequence[Span], pool: Pool, rows: int) -> None:
        super().__init__(spec, tables, pool)
        self.counts: U32 = lazy_zeros((rows,), np.uint32)

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes

    def updating(self, rows: I64, start: int, stop: int) -> None:
        kernels.count(rows, start, stop, self.counts)

    def select(self) -> I64:
        return self._largest(self.counts)

    def take(self, rows: I64) -> Any:
        taken = self.counts[rows]
        self.counts[rows] = 0
        return rows, taken

    def take_all(self) -> Any:
        taken, self.counts = self.counts, lazy_zeros(self.counts.shape, np.uint32)
        return slice(None), taken

    def put_back(self, taken: Any) -> None:
        rows, counts = taken
        # Counters that ran full stay there: the sum of two is at most one short of wrapping twice.
        sums = self.counts[rows].astype(np.uint64) + counts
        self.counts[rows] = np.minimum(sums, np.uint64(2**32 - 1)).astype(np.uint32)


class SubSampled(Ranking):
    """Lists rows that are updated in one of every few pushes."""

    def __init__(
        self, spec: Priority, tables: Sequence[Span], pool: Pool, bases_T: I64, rows: int
    ) -> None:
        super().__init__(spec, tables, pool)
        self._rows = rows
        self._bases_T = bases_T
        self._buckets_T: I64 = np.zeros(bases_T.size, np.int64)
        for table in tables:
            entries = int(spec.fraction * table.rows)
            self._buckets_T[table.index] = max(1, entries // kernels.WAYS) if entries else 0
        self._firsts_T: I64 = np.cumsum(self._buckets_T) - self._buckets_T
        self._pushes = 0
        self.entries = self._no_entries()

    def _no_entries(self) -> I32:
        entries: I32 = lazy_zeros((int(self._buckets_T.sum()) * kernels.WAYS,), np.int32)
        return entries

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes

    def updated(self, rows: I64, offsets_T: I64) -> None:
        self._pushes += 1
        if self._pushes % self.spec.period == 0:
            self._remember(rows, offsets_T)

    def _remember(self, rows: I64, offsets_T: I64) -> None:
        # By tables: a list has one writer, so what it holds does not depend on the threads.
        tasks = [
            partial(
                kernels.remember, rows, offsets_T, first, last, self._bases_T, self._firsts_T,
                self._buckets_T, self._pushes, self.entries,
            )
            for first, last in spans(offsets_T.size - 1, self.pool.threads)
        ]  # fmt: skip
        self.pool.run(tasks)

    def select(self) -> I64:
        return self._rows_of(self.entries)

    def _rows_of(self, entries: I32) -> I64:
        """The rows on the lists, ascending: sorted by setting their bits, in linear time."""
        bits: U64 = np.zeros(-(-self._rows // 64), np.uint64)
        listed = 0
        for table in self.tables:
            found = self._listed(entries, table)
            bitmaps.set_bits(bits, found)
            listed += found.size
        rows = np.empty(listed, np.int64)
        bitmaps.list_bits(bits, 0, bits.size, rows)
        return rows

    def _listed(self, entries: I32, table: Span) -> I64:
        first, count = self._firsts_T[table.index], self._buckets_T[table.index]
        own = entries[first * kernels.WAYS : (first + count) * kernels.WAYS]
        # A table has up to 2³² rows: the upper half of them is negative here.
        found: I64 = own[own != 0].view(np.uint32).astype(np.int64) - 1 + table.base
        return found

    def take(self, rows: I64) -> Any:
        kernels.forget(
            rows, self._offsets_of(rows), self._bases_T, self._firsts_T, self._buckets_T,
            self.entries,
        )  # fmt: skip
        return rows

    def take_all(self) -> Any:
        taken, self.entries = self.entries, self._no_entries()
        return taken

    def put_back(self, taken: Any) -> None:
        if taken.dtype == np.int32:
            taken = self._rows_of(taken)
        self._remember(taken, self._offsets_of(taken))

    def _offsets_of(self, rows: I64) -> I64:
        """Where the rows of each table begin among ascending rows."""
        return np.append(np.searchsorted(rows, self._bases_T), rows.size).astype(np.int64)


class Farthest(Ranking):
    """Keeps every row as it was saved, and measures how far it has gone since."""

    def __init__(self, spec: Priority, tables: Sequence[Span], pool: Pool, weight_RD: F32) -> None:
        super().__init__(spec, tables, pool)
        self._weight_RD = weight_RD
        self._kept_RD: F32 = lazy_zeros(weight_RD.shape, np.float32)
        self._held = self._nothing()

    def _nothing(self) -> U64:
        bits: U64 = lazy_zeros((-(-self._weight_RD.shape[0] // 64),), np.uint64)
        return bits

    @property
    def nbytes(self) -> int:
        return self._kept_RD.nbytes + self._held.nbytes

    def updating(self, rows: I64, start: int, stop: int) -> None:
        kernels.keep_before(rows, start, stop, self._weight_RD, self._held, self._kept_RD)

    def select(self) -> I64:
        distances_R: F32 = np.zeros(self._weight_RD.shape[0], np.float32)
        for table in self.tables:
            cuts = spans(table.rows, self.pool.threads)
            self.pool.run(
                [
                    partial(
                        kernels.distances, table.base + start, table.base + stop, self._weight_RD,
                        self._held, self._kept_RD, distances_R,
                    )
                    for start, stop in cuts
                ]
            )  # fmt: skip
        # Floats that are not negative are ordered as their bits are.
        return self._largest(distances_R.view(np.uint32))

    def take(self, rows: I64) -> Any:
        bitmaps.clear_bits(self._held, rows)
        return rows

    def take_all(self) -> Any:
        taken, self._held = self._held, self._nothing()
        return taken

    def put_back(self, taken: Any) -> None:
        """A row that has changed meanwhile was kept again: it counts from there."""
        if taken.dtype == np.uint64:
            np.bitwise_or(self._held, taken, out=self._held)
        else:
            bitmaps.set_bits(self._held, taken)


def ranking(
    spec: Priority, tables: Sequence[Span], *, rows: int, bases_T: I64, weight_RD: F32, pool: Pool
) -> Ranking:
    """A ranking of the kind that was asked for, of a slab with so many rows."""
    if spec.kind == "mfu":
        return MostUsed(spec, tables, pool, rows)
    if spec.kind == "ssu":
        return SubSampled(spec, tables, pool, bases_T, rows)
    if weight_RD.shape[0] != rows:
        raise ConfigError("priority 'scar' compares rows that are all in memory: use mfu or ssu")
    return Farthest(spec, tables, pool, weight_RD)
