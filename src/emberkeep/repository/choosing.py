"""Which rows of the pieces of a version count: of each id the newest birth."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from emberkeep.errors import DamageError
from emberkeep.pool import Pool
from emberkeep.repository.bundles import Bundle, Piece, Rows

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class Chosen:
    """The rows of pieces, and of each whether it is the newest of its id.

    Rows stand piece after piece, in groups of one table. `limits` are the sizes of the tables, None
    for those that take any id; of tables that are not `wanted` no row is chosen.
    """

    def __init__(
        self, heads: Sequence[tuple[Bundle, Piece, Rows]], limits: Sequence[int | None],
        wanted: Collection[int] | None, pool: Pool,
    ) -> None:  # fmt: skip
        # Newest first; of one birth rows before tombstones: an id that left and came back is both.
        heads = sorted(
            heads, key=lambda found: (-found[1].birth, not found[0].families[found[1].family])
        )
        rows = [found for _, _, found in heads]
        self._numbers = {(b.name, p.head): number for number, (b, p, _) in enumerate(heads)}
        self._no_planes = [n for n, (b, p, _) in enumerate(heads) if not b.families[p.family]]
        ends = np.cumsum([0, *(each.counts_G.size for each in rows)])
        self._firsts_P: I64 = ends[:-1]
        self._groups_P: I64 = np.diff(ends)
        none = np.empty(0, np.int64)
        self.ids: I64 = np.concatenate([none, *(each.ids for each in rows)])
        self.tables_G: I32 = np.concatenate(
            [none.astype(np.int32), *(each.tables_G for each in rows)]
        )
        self._counts_G: I64 = np.concatenate([none, *(each.counts_G for each in rows)])
        self._starts_G: I64 = np.cumsum(self._counts_G) - self._counts_G
        pieces = np.cumsum([0, *(each.ids.size for each in rows)])[:-1]
        self._local_G: I64 = self._starts_G - np.repeat(pieces, self._groups_P)
        self.kept: Bools = np.zeros(self.ids.size, np.bool_)
        self._choose(limits, wanted, pool)
        before = np.zeros(self.ids.size + 1, np.int64)
        np.cumsum(self.kept, out=before[1:])
        self._kept_G: I64 = before[self._starts_G + self._counts_G] - before[self._starts_G]

    def _choose(
        self, limits: Sequence[int | None], wanted: Collection[int] | None, pool: Pool
    ) -> None:
        from emberkeep.kernels import grid

        if not self.tables_G.size:
            return
        by_table = np.argsort(self.tables_G, kind="stable")
        present, firsts = np.unique(self.tables_G[by_table], return_index=True)

        def choose(table: int, groups: I64) -> None:
            starts, counts = self._starts_G[groups], self._counts_G[groups]
            limit = limits[table]
            if limit is not None:
                self._check_limit(table, starts, counts, limit)
                bits = np.zeros((limit + 63) // 64, np.uint64)
                grid.claim_bits(starts, counts, self.ids, bits, self.kept)
            else:
                size = 1 << int(2 * counts.sum()).bit_length()
                grid.claim_ids(starts, counts, self.ids, np.full(size, -1), self.kept)

        tasks = []
        for table, groups in zip(present.tolist(), np.split(by_table, firsts[1:]), strict=True):
            if not 0 <= table < len(limits):
                raise DamageError(f"rows of table {table}, which the schema lacks", name="grid")
            if wanted is None or table in wanted:
                tasks.append(partial(choose, table, groups))
        pool.run(tasks)

    def _check_limit(self, table: int, starts: I64, counts: I64, limit: int) -> None:
        # Ids ascend within a group: its ends bound it. Kernels do not look.
        held = counts > 0
        low, high = self.ids[starts[held]], self.ids[starts[held] + counts[held] - 1]
        if low.size and (low.min() < 0 or high.max() >= limit):
            raise DamageError(f"ids of table {table} lie outside its {limit} rows", name="grid")

    def segments(self, pieces: Sequence[tuple[str, Piece, int]]) -> tuple[I32, I64, int]:
        """The groups with chosen rows of pieces whose bodies begin at given places, table by
        table, as `kernels.gather` takes them: the table of each, where its rows stand and go, and
        how many rows these are."""
        numbers = np.array([self._numbers[name, piece.head] for name, piece, _ in pieces])
        counts = self._groups_P[numbers]
        groups = np.arange(counts.sum()) + np.repeat(
            self._firsts_P[numbers] - (np.cumsum(counts) - counts), counts
        )
        bodies = np.repeat(np.array([body for _, _, body in pieces]), counts)
        rows = np.repeat(np.array([piece.rows for _, piece, _ in pieces]), counts)
        order = np.argsort(self.tables_G[groups], kind="stable")
        order = order[self._kept_G[groups[order]] > 0]
        groups = groups[order]
        kept = self._kept_G[groups]
        goes = np.cumsum(kept) - kept
        segments = np.stack(
            [
                self._starts_G[groups], self._counts_G[groups], bodies[order], rows[order],
                self._local_G[groups], goes,
            ],
            axis=1,
        )  # fmt: skip
        return self.tables_G[groups], segments, int(kept.sum())

    def tombstones(self) -> Iterator[tuple[int, I64]]:
        """Tables with the ids that were deleted and did not come back."""
        found: dict[int, list[I64]] = {}
        for number in self._no_planes:
            first = int(self._firsts_P[number])
            for group in range(first, first + int(self._groups_P[number])):
                start = self._starts_G[group]
                some = slice(start, start + self._counts_G[group])
                ids = self.ids[some][self.kept[some]]
                found.setdefault(int(self.tables_G[group]), []).append(ids)
        for table, parts in found.items():
            ids = np.unique(np.concatenate(parts))
            if ids.size:
                yield table, ids
