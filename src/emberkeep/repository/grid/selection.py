"""Which rows of the pieces of a version count: of each id the newest birth.

A version may stand in thousands of pieces. To look at them one by one in Python takes longer than
to read them, so here they are columns, with an entry for each piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, Bools
from emberkeep.errors import DamageError
from emberkeep.repository.grid.bundle_reader import Heads
from emberkeep.repository.grid.bundles import Bundle, Family, check, unpack_heads
from emberkeep.runtime.memory import lazy_zeros

_MOST_BITS = 2**30  # 128 MiB of them


def _outside(table: int, limits: Sequence[int | None]) -> DamageError:
    return DamageError(f"ids of table {table} lie outside its {limits[table]} rows", name="grid")


@dataclass(frozen=True, slots=True)
class Listed:
    """The pieces of bundles, in the order in which their bodies stand in the files."""

    bundles: Sequence[Bundle]
    families: Sequence[Family]
    bundle_P: I64
    birth_P: I64
    family_P: I64
    rows_P: I64
    offset_P: I64
    nbytes_P: I64
    head_P: I64
    head_nbytes_P: I64
    digests: Sequence[str]
    head_digests: Sequence[str]

    @classmethod
    def of(cls, bundles: Sequence[Bundle]) -> Listed:
        families: dict[Family, int] = {}
        every = [each for bundle in bundles for each in bundle.listed]
        columns = list(zip(*every, strict=True)) if every else [()] * 11
        birth, _, family, rows, offset, nbytes, digests, head, head_nbytes, head_digests, _ = (
            columns
        )
        numbers = np.array([birth, family, rows, offset, nbytes, head, head_nbytes], np.int64)
        counts = np.array([len(bundle.listed) for bundle in bundles], np.int64)
        bundle_P = np.repeat(np.arange(len(bundles)), counts)
        # The families of all files under one number each.
        of_files = [families.setdefault(f, len(families)) for b in bundles for f in b.families]
        firsts = np.cumsum([0, *(len(bundle.families) for bundle in bundles)])
        numbers[1] = np.array(of_files, np.int64)[firsts[bundle_P] + numbers[1]]
        order = np.lexsort((numbers[3], bundle_P))
        birth_P, family_P, rows_P, offset_P, nbytes_P, head_P, head_nbytes_P = np.take(
            numbers, order, axis=1
        )
        listed = order.tolist()
        return cls(
            bundles, list(families), bundle_P, birth_P, family_P, rows_P, offset_P, nbytes_P,
            head_P, head_nbytes_P, [digests[piece] for piece in listed],
            [head_digests[piece] for piece in listed],
        )  # fmt: skip

    def name(self, piece: int) -> str:
        """The file that a piece is in."""
        return self.bundles[int(self.bundle_P[piece])].name

    def of_bundles(self) -> Iterator[tuple[str, slice]]:
        """The files, and which pieces are in each."""
        ends = np.searchsorted(self.bundle_P, np.arange(len(self.bundles) + 1)).tolist()
        for bundle, first, last in zip(self.bundles, ends, ends[1:], strict=False):
            yield bundle.name, slice(first, last)


class Chosen:
    """The rows of pieces, and of each whether it is the newest of its id.

    Rows stand piece after piece, in groups of one table; the numbers of pieces are those that they
    are listed under. `heads` are those of each file, `limits` the sizes of the tables, None for
    those that take any id; of tables that are not `wanted` no row is chosen.
    """

    def __init__(
        self, listed: Listed, heads: Sequence[Heads], limits: Sequence[int | None],
        wanted: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self.listed = listed
        data, starts_P = self._checked(heads)
        # Newest first; of one birth rows before tombstones: an id that left and came back is both.
        deleted = np.array([not family for family in listed.families], np.bool_)
        order = np.lexsort((deleted[listed.family_P], -listed.birth_P))
        rows_P = listed.rows_P[order]
        groups_P, self.tables_G, self.counts_G, self.ids = unpack_heads(
            data, starts_P[order], listed.head_nbytes_P[order], rows_P,
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

    def _checked(self, every: Sequence[Heads]) -> tuple[npt.NDArray[np.uint8], I64]:
        """The bytes of all heads, which match their digests, and where each begins."""
        listed = self.listed
        starts_P = np.empty(listed.head_P.size, np.int64)
        begin = 0
        for (name, pieces), heads in zip(listed.of_bundles(), every, strict=True):
            view = memoryview(heads.data)
            about = zip(
                heads.starts, listed.head_nbytes_P[pieces].tolist(), listed.head_digests[pieces],
                strict=True,
            )  # fmt: skip
            for at, nbytes, digest in about:
                check(name, view[at : at + nbytes], digest)
            starts_P[pieces] = heads.starts
            starts_P[pieces] += begin
            begin += len(view)
        return np.frombuffer(bytearray().join(heads.data for heads in every), np.uint8), starts_P

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
                grid_arrays.claim_ids(starts, counts, self.ids, np.full(size, -1), self.kept)
                before = np.append(0, np.cumsum(self.kept))
                self.kept_G[groups] = before[starts + counts] - before[starts]

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
