"""Which rows of the pieces of a version count: of each id the newest birth.

A version may stand in thousands of pieces. To look at them one by one in Python takes longer than
to read them, so here they are columns, with an entry for each piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from emberkeep._types import I64, U64, Bools
from emberkeep.errors import DamageError
from emberkeep.repository.grid.bundles import Family, check_pieces, unpack_heads
from emberkeep.repository.grid.piece_table import PieceTable, joined_columns
from emberkeep.runtime.memory import lazy_zeros

_MOST_BITS = 2**30  # 128 MiB of them


def _outside(table: int, limits: Sequence[int | None]) -> DamageError:
    return DamageError(f"ids of table {table} lie outside its {limits[table]} rows", name="grid")


@dataclass(frozen=True, slots=True)
class Listed:
    """The pieces of a plan, in the order in which their bodies stand in the files."""

    files: Sequence[str]
    families: Sequence[Family]
    file_P: I64
    birth_P: I64
    family_P: I64
    rows_P: I64
    offset_P: I64
    nbytes_P: I64
    head_P: I64
    head_nbytes_P: I64
    digest_P: U64
    head_digest_P: U64

    @classmethod
    def of(cls, tables: Sequence[PieceTable]) -> Listed:
        """Every table numbers its own files."""
        files: list[str] = []
        families: dict[Family, int] = {}
        of_files: list[int] = []  # the families of all files under one number each
        file_of, family_of = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for table in tables:
            numbers, inverse = np.unique(table["file"], return_inverse=True)
            described = [table.files[number] for number in numbers.tolist()]
            counts = [len(file.families) for file in described]
            firsts = np.cumsum([len(of_files), *counts])
            of_files += [
                families.setdefault(f, len(families)) for d in described for f in d.families
            ]
            inverse = inverse.reshape(-1)
            file_of.append(inverse + len(files))
            family_of.append(firsts[inverse] + table["family"])
            files += [file.name for file in described]
        every = joined_columns(tables)
        file_P = np.concatenate(file_of)
        family_P = np.array(of_files, np.int64)[np.concatenate(family_of)]
        # One without a body begins where its neighbour does, and comes before it.
        order = np.lexsort((every["nbytes"], every["offset"], file_P))
        return cls(
            files, list(families), file_P[order], every["birth"][order], family_P[order],
            every["rows"][order], every["offset"][order], every["nbytes"][order],
            every["head"][order], every["head_nbytes"][order], every["digest"][order],
            every["head_digest"][order],
        )  # fmt: skip

    def name(self, piece: int) -> str:
        """The file that a piece is in."""
        return self.files[int(self.file_P[piece])]


class Chosen:
    """The rows of pieces, and of each whether it is the newest of its id.

    Rows stand piece after piece, in groups of one table; the numbers of pieces are those that they
    are listed under. The head of each begins at `starts_P` of the data; `limits` are the sizes of
    the tables, None for those that take any id; of tables that are not `wanted` no row is chosen.
    """

    def __init__(
        self, listed: Listed, data: memoryview, starts_P: I64, limits: Sequence[int | None],
        wanted: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self.listed = listed
        check_pieces(data, starts_P, listed.head_nbytes_P, listed.head_digest_P, listed.name)
        # Newest first; of one birth rows before tombstones: an id that left and came back is both.
        deleted = np.array([not family for family in listed.families], np.bool_)
        order = np.lexsort((deleted[listed.family_P], -listed.birth_P))
        rows_P = listed.rows_P[order]
        groups_P, self.tables_G, self.counts_G, self.ids = unpack_heads(
            np.asarray(data), starts_P[order], listed.head_nbytes_P[order], rows_P,
            lambda number: listed.name(int(order[number])),
        )  # fmt: skip
        self.kept: Bools = lazy_zeros((self.ids.size,), np.bool_)
        self.kept_G: I64 = np.zeros(self.tables_G.size, np.int64)
        # Of each piece, by its number: its first row, its first group, how many groups.
        self.starts_P, self.firsts_P, self.groups_P = np.empty((3, order.size), np.int64)
        self.starts_P[order] = np.cumsum(rows_P) - rows_P
        self.firsts_P[order] = np.cumsum(groups_P) - groups_P
        self.groups_P[order] = groups_P
        self._deleted_P = np.flatnonzero(deleted[listed.family_P])
        if self.tables_G.size:
            self._choose(limits, wanted)

    def _choose(self, limits: Sequence[int | None], wanted: Collection[int] | None) -> None:
        from emberkeep.kernels import first_rows, grid_arrays

        outside = self.tables_G[(self.tables_G < 0) | (self.tables_G >= len(limits))]
        if outside.size:
            raise DamageError(f"rows of table {outside[0]}, which the schema lacks", name="grid")
        asked = range(len(limits)) if wanted is None else wanted
        # A bit for every row that tables can have, unless the rows here take far less to hash.
        fits = sum(limit or 0 for limit in limits) <= _MOST_BITS + 256 * self.ids.size
        fixed = [limit if fits else None for limit in limits]
        limits_T = np.array([limit or 0 for limit in fixed], np.int64)
        # No two tables share a word.
        sizes_T = (limits_T + 63) // 64 * 64
        fixed_T = np.array([t in asked and limit is not None for t, limit in enumerate(fixed)])
        bases_T = np.where(fixed_T, np.cumsum(sizes_T) - sizes_T, -1)
        wrong = first_rows.claim_fixed(
            self.tables_G, self.counts_G, self.ids, bases_T, limits_T,
            lazy_zeros((int(sizes_T.sum()) // 64,), np.uint64), self.kept, self.kept_G,
        )  # fmt: skip
        if wrong >= 0:
            raise _outside(int(self.tables_G[wrong]), limits)
        starts_G = np.cumsum(self.counts_G) - self.counts_G
        for table in asked:
            if fixed[table] is not None:
                continue
            groups = np.flatnonzero((self.tables_G == table) & (self.counts_G > 0))
            if groups.size:
                starts, counts = starts_G[groups], self.counts_G[groups]
                limit, lasts = limits[table], self.ids[starts + counts - 1]
                if limit is not None and (self.ids[starts].min() < 0 or lasts.max() >= limit):
                    raise _outside(table, limits)
                size = 1 << int(2 * counts.sum()).bit_length()
                found = np.empty(groups.size, np.int64)
                grid_arrays.claim_ids(starts, counts, self.ids, np.full(size, -1), self.kept, found)
                self.kept_G[groups] = found

    def tombstones(self) -> Iterator[tuple[int, I64]]:
        """Tables with the ids that were deleted and did not come back."""
        found: dict[int, list[I64]] = {}
        for piece in self._deleted_P.tolist():
            row = int(self.starts_P[piece])
            first = int(self.firsts_P[piece])
            for group in range(first, first + int(self.groups_P[piece])):
                some = slice(row, row + int(self.counts_G[group]))
                found.setdefault(int(self.tables_G[group]), []).append(
                    self.ids[some][self.kept[some]]
                )
                row = some.stop
        for table, parts in found.items():
            ids = np.unique(np.concatenate(parts))
            if ids.size:
                yield table, ids
