"""How two versions differ: which rows moved, and how far."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from emberkeep._types import F32, I64, Bools
from emberkeep.checkpoint.contents import Hold, IdSet, check_tables, checked_rows, merged_rows
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.repository.grid.catalog import grid_of, plan
from emberkeep.repository.pieces import KIND, counts_of
from emberkeep.runtime.pool import Pool

_BUDGET_NBYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A row that both versions hold, and the ℓ2 distance between its two weights."""

    id: int
    distance: float


@dataclass(slots=True, kw_only=True)
class TableDifference:
    """What became of the rows of one table from one version to the other.

    `removed` and `added` rows stand in one of the two alone: deleted or evicted, trained for the
    first time. Distances are about the weights of rows that both hold; `l2` is that of all such
    rows together, `largest` the most that a single number moved.
    """

    table: str
    removed: int = 0
    added: int = 0
    changed: int = 0
    l2: float = 0.0
    largest: float = 0.0
    top: list[Moved] = field(default_factory=list)


def compare(
    repository: Repository,
    before: VersionId,
    after: VersionId,
    pool: Pool,
    *,
    tables: Sequence[str] | None = None,
    top: int = 10,
    budget_nbytes: int = _BUDGET_NBYTES,
) -> list[TableDifference]:
    """The differences of every table. Unchanged rows of a shared baseline are not even compared.

    At most about `budget_nbytes` of rows are held at a time; beyond that, both versions are read
    several times, each time for a part of the ids.
    """
    names = check_tables(repository, tables)
    found = {name: _Table(name, top) for name in names}
    with Hold(repository, before) as one, Hold(repository, after) as two:
        chains = repository.chain(before), repository.chain(after)
        touched = _touched(repository, *chains, names, pool)
        parts = math.ceil(_nbytes(repository, chains[0], names, touched) / budget_nbytes) or 1
        for part in range(parts):
            held: dict[str, list[tuple[I64, F32]]] = defaultdict(list)
            for name, ids, weight in _weights(
                repository, chains[0], pool, names, touched, part, parts
            ):
                held[name].append((ids, weight))
                one.renew()
            tables_before = {name: _Before(held.pop(name, ())) for name in names}
            for name, ids, weight in _weights(
                repository, chains[1], pool, names, touched, part, parts
            ):
                found[name].compare(tables_before[name], ids, weight)
                two.renew()
            for name in names:
                found[name].difference.removed += tables_before[name].unmatched()
    return [table.finished() for table in found.values()]


def _touched(
    repository: Repository, before: Sequence[Manifest], after: Sequence[Manifest],
    names: Sequence[str], pool: Pool,
) -> dict[str, I64] | None:  # fmt: skip
    """The ids that can differ: those that either version wrote since the last one they share.

    None if they share none: then all can.
    """
    grid = grid_of(before[-1])
    if grid is not None and grid == grid_of(after[-1]):
        older, newer = sorted((before[-1], after[-1]), key=lambda manifest: manifest.version)
        sets = {name: IdSet() for name in names}
        for _, chunk in merged_rows(
            repository, [newer], pool, tables=names, after=older.version.number
        ):
            sets[chunk.table].add(chunk.ids)
        return {name: ids.all() for name, ids in sets.items()}
    shared = {m.version for m in before} & {m.version for m in after}
    if not shared:
        return None
    sets = {name: IdSet() for name in names}
    for manifest in (*before, *after):
        if manifest.version in shared:
            continue
        for file in manifest.of_kind(KIND):
            for chunk in checked_rows(repository, file, pool):
                if chunk.table in sets:
                    sets[chunk.table].add(chunk.ids)
    return {name: ids.all() for name, ids in sets.items()}


def _nbytes(
    repository: Repository, chain: Sequence[Manifest], names: Sequence[str],
    touched: Mapping[str, I64] | None,
) -> int:  # fmt: skip
    """About what the rows to be compared take in memory."""
    nbytes = 0
    if touched is None and (planned := plan(repository, chain[-1])) is not None:
        return planned.nbytes
    for name in names:
        stored = [counts_of(f, "rows").get(name, 0) for m in chain for f in m.of_kind(KIND)]
        rows = sum(stored) if touched is None else touched[name].size
        nbytes += rows * (4 * repository.tables[name]["planes"]["weight"][0] + 32)
    return nbytes


def _weights(
    repository: Repository, chain: Sequence[Manifest], pool: Pool, names: Sequence[str],
    touched: Mapping[str, I64] | None, part: int, parts: int,
) -> Iterator[tuple[str, I64, F32]]:  # fmt: skip
    """The weights of one part of the rows of a version."""
    for _, chunk in merged_rows(repository, chain, pool, tables=names):
        if chunk.planes is None:
            continue
        wanted = chunk.ids % parts == part
        if touched is not None:
            wanted &= np.isin(chunk.ids, touched[chunk.table], assume_unique=True)
        if wanted.any():
            yield chunk.table, chunk.ids[wanted], chunk.planes["weight"][wanted]


class _Before:
    """The rows of the earlier version, to be found by id."""

    def __init__(self, parts: Sequence[tuple[I64, F32]]) -> None:
        ids = np.concatenate([ids for ids, _ in parts]) if parts else np.empty(0, np.int64)
        self._order = np.argsort(ids)
        self._ids = ids[self._order]
        self._weight = (
            np.concatenate([weight for _, weight in parts]) if parts else np.empty((0, 0), "f4")
        )
        self._matched = np.zeros(ids.size, np.bool_)

    def find(self, ids: I64) -> tuple[Bools, F32]:
        """Which ids are there, and their weights."""
        if not self._ids.size:
            return np.zeros(ids.size, np.bool_), self._weight
        at = np.minimum(np.searchsorted(self._ids, ids), self._ids.size - 1)
        known = self._ids[at] == ids
        self._matched[at[known]] = True
        return known, self._weight[self._order[at[known]]]

    def unmatched(self) -> int:
        return int((~self._matched).sum())


class _Table:
    """Sums up the differences of one table."""

    def __init__(self, name: str, top: int) -> None:
        self.difference = TableDifference(table=name)
        self._squares = 0.0
        self._limit = top
        self._top: list[tuple[float, int]] = []

    def compare(self, before: _Before, ids: I64, weight: F32) -> None:
        known, old = before.find(ids)
        self.difference.added += int((~known).sum())
        ids, weight = ids[known], weight[known]
        if not ids.size:
            return
        changed = (old.view(np.uint32) != np.ascontiguousarray(weight).view(np.uint32)).any(axis=1)
        self.difference.changed += int(changed.sum())
        moves = weight[changed].astype(np.float64) - old[changed]
        if not moves.size:
            return
        distances = np.sqrt((moves**2).sum(axis=1))
        self._squares += float((distances**2).sum())
        self.difference.largest = max(self.difference.largest, float(np.abs(moves).max()))
        most = np.argsort(distances)[::-1][: self._limit]
        candidates = [(float(distances[i]), int(ids[changed][i])) for i in most]
        self._top = heapq.nlargest(self._limit, [*self._top, *candidates])

    def finished(self) -> TableDifference:
        self.difference.l2 = math.sqrt(self._squares)
        self.difference.top = [Moved(id=i, distance=d) for d, i in self._top]
        return self.difference
