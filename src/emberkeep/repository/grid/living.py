"""The rows of a shard's living pieces: where each stands, and which have ended.

About 40 bytes for each row. A version that arrives is looked up row by row, so what that takes
follows from the version and not from how many pieces, or versions, there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emberkeep._types import I32, I64, U32, Array
from emberkeep.repository.grid.bundles import Bundle, Piece, Rows

Key = tuple[str, int]
"""A piece: the name of its file and where its head stands."""

Deaths = dict[tuple[int, int], int]
"""When rows, each by table and id, have ended."""

_LEAST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Living:
    """A piece that has no death yet; its rows are first:last of all."""

    bundle: Bundle
    piece: Piece
    number: int
    first: int

    @property
    def key(self) -> Key:
        return self.bundle.name, self.piece.head

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes + self.piece.head_nbytes

    @property
    def is_tombstones(self) -> bool:
        return not self.bundle.families[self.piece.family]


class LivingRows:
    """All living pieces of a shard."""

    def __init__(self) -> None:
        self.pieces: dict[Key, Living] = {}
        self._clear(_LEAST_ROWS)

    def _clear(self, rows: int) -> None:
        self._tables: I32 = np.empty(rows, np.int32)
        self._ids: I64 = np.empty(rows, np.int64)
        self._deaths: I32 = np.empty(rows, np.int32)
        self._pieces: I32 = np.empty(rows, np.int32)
        self._births_P: I64 = np.empty(64, np.int64)
        self._dead_P: I64 = np.empty(64, np.int64)
        self._slots: U32 = np.zeros(_slots_for(rows), np.uint32)
        self._used = self._names = self._count = 0

    # -- asked -----------------------------------------------------------------------------------

    def dead(self, living: Living) -> int:
        """How many rows of a piece have ended."""
        return int(self._dead_P[living.number])

    def rows_of(self, living: Living) -> tuple[I32, I64, I32]:
        """The rows of a piece in their order: tables, ids, and deaths, 0 for those that live."""
        some = slice(living.first, living.first + living.piece.rows)
        return self._tables[some], self._ids[some], self._deaths[some]

    def totals(self) -> tuple[int, int]:
        """Rows of all pieces, and how many of them have ended."""
        rows = sum(living.piece.rows for living in self.pieces.values())
        return rows, sum(map(self.dead, self.pieces.values()))

    # -- changed ---------------------------------------------------------------------------------

    def admit(self, heads: Iterable[tuple[Bundle, Piece, Rows]]) -> None:
        """The pieces of one version: they end rows of others, and their own begin to live.

        Of an id that left and came back both the row and the tombstone are there: the row counts.
        """
        from emberkeep.kernels import living_rows

        for bundle, piece, rows in sorted(heads, key=_is_tombstones):
            living = self._add(bundle, piece, rows)
            self._names += living_rows.admit(
                self._slots, self._tables, self._ids, self._deaths, self._pieces, self._births_P,
                self._dead_P, living.first, living.first + piece.rows,
            )  # fmt: skip

    def replace(
        self, gone: Iterable[Key], new: Iterable[tuple[Bundle, Piece, Rows]],
        ended: Mapping[tuple[int, bool], Deaths],
    ) -> None:  # fmt: skip
        """Pieces went, and rows of them that live stand elsewhere now; with them some that have
        ended, by their births and whether they are tombstones."""
        for key in gone:
            self.pieces.pop(key, None)
        for bundle, piece, rows in new:
            living = self._add(bundle, piece, rows)
            self._end(living, ended.get((piece.birth, living.is_tombstones), {}))
            self._enter(living)
        if self._used > 2 * max(_LEAST_ROWS, sum(p.piece.rows for p in self.pieces.values())):
            self._rebuild()

    def _end(self, living: Living, ended: Deaths) -> None:
        """Rows of a piece that came have ended before."""
        if not ended:
            return
        tables, ids, deaths = self.rows_of(living)
        wanted = np.array([identity for _, identity in ended], np.int64)
        for row in np.flatnonzero(np.isin(ids, wanted)).tolist():
            death = ended.get((int(tables[row]), int(ids[row])))
            if death is not None:
                deaths[row] = death
                self._dead_P[living.number] += 1

    def _enter(self, living: Living) -> None:
        from emberkeep.kernels import living_rows

        self._names += living_rows.enter(
            self._slots, self._tables, self._ids, self._deaths, living.first,
            living.first + living.piece.rows,
        )  # fmt: skip

    def _add(self, bundle: Bundle, piece: Piece, rows: Rows) -> Living:
        self._make_room(piece.rows)
        living = Living(bundle, piece, self._count, self._used)
        some = slice(self._used, self._used + piece.rows)
        self._tables[some], self._ids[some] = rows.tables(), rows.ids
        self._deaths[some], self._pieces[some] = 0, self._count
        self._births_P[self._count], self._dead_P[self._count] = piece.birth, 0
        self._used += piece.rows
        self._count += 1
        self.pieces[living.key] = living
        return living

    def _make_room(self, rows: int) -> None:
        if self._used + rows > self._ids.size:
            size = 2 * (self._used + rows)
            for name in ("_tables", "_ids", "_deaths", "_pieces"):
                setattr(self, name, _grown(getattr(self, name), size, self._used))
        if self._count == self._births_P.size:
            for name in ("_births_P", "_dead_P"):
                setattr(self, name, _grown(getattr(self, name), 2 * self._count, self._count))
        if _slots_for(self._names + rows) > self._slots.size:
            from emberkeep.kernels import living_rows

            # Rows that ended are known by nobody any more, unless they never lived.
            self._slots = np.zeros(_slots_for(2 * (self._names + rows)), np.uint32)
            self._names = living_rows.enter(
                self._slots, self._tables, self._ids, self._alive_deaths(), 0, self._used
            )

    def _alive_deaths(self) -> I32:
        """Deaths of all rows so far; those of pieces that are gone count as ended."""
        deaths = np.ones(self._used, np.int32)
        for living in self.pieces.values():
            some = slice(living.first, living.first + living.piece.rows)
            deaths[some] = self._deaths[some]
        return deaths

    def _rebuild(self) -> None:
        """Lets go of the rows of pieces that went."""
        known = [
            (living, list[Array](c.copy() for c in self.rows_of(living)), self.dead(living))
            for living in self.pieces.values()
        ]
        self.pieces = {}
        self._clear(max(_LEAST_ROWS, sum(living.piece.rows for living, _, _ in known)))
        for living, (tables, ids, deaths), dead in known:
            # As a head would have them, each row a group.
            rows = Rows(tables, np.ones(tables.size, np.int64), ids)
            added = self._add(living.bundle, living.piece, rows)
            self._deaths[added.first : added.first + ids.size] = deaths
            self._dead_P[added.number] = dead
            self._enter(added)


def _is_tombstones(head: tuple[Bundle, Piece, Rows]) -> bool:
    bundle, piece, _ = head
    return not bundle.families[piece.family]


def _slots_for(rows: int) -> int:
    return 1 << int(2 * max(_LEAST_ROWS, rows) - 1).bit_length()


def _grown(values: Array, size: int, used: int) -> Array:
    grown = np.empty(size, values.dtype)
    grown[:used] = values[:used]
    return grown


def by_birth(
    heads: Sequence[tuple[Bundle, Piece, Rows]],
) -> list[list[tuple[Bundle, Piece, Rows]]]:
    """Heads of one version each, oldest first."""
    found: dict[int, list[tuple[Bundle, Piece, Rows]]] = {}
    for head in heads:
        found.setdefault(head[1].birth, []).append(head)
    return [found[birth] for birth in sorted(found)]
