"""The rows that matter most, frozen when they are read."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from emberkeep._types import U64
from emberkeep.kernels import batch_rows as bitmaps
from emberkeep.rows.copy_room import CopyRoom
from emberkeep.rows.priority import Ranking
from emberkeep.rows.snapshot import Chunk, RowHolder, Snapshot
from emberkeep.rows.tracker import PRIORITISED, SINCE_VERSION

# Rows whose rank is taken under one holding of the lock.
_SLICE_ROWS = 65536


class PrioritisedRows:
    """The rows of one slab that matter most, chosen and frozen when they are read, not before.

    So training never waits for the choice. Each row is whole, with all planes of one moment, which
    comes after this was made; small tables are there with all their rows.
    """

    def __init__(self, holder: RowHolder, whole: U64, room: CopyRoom) -> None:
        """`whole` has the bits of all rows of the small tables."""
        self.holder = holder
        self._whole = whole
        self._room = room
        self._names: dict[str, str] = {}
        self._taken: list[Any] = []
        self._inner: Snapshot | None = None
        self.held_seconds = 0.0

    @property
    def pressed(self) -> bool:
        return self._room.full

    def rename(self, names: Mapping[str, str]) -> None:
        self._names.update(names)

    def chunks(self, rows: int, cancelled: threading.Event | None = None) -> Iterator[Chunk]:
        ranking = self._ranking()
        selected = ranking.select()
        for start in range(0, selected.size, _SLICE_ROWS):
            with self.holder.lock:
                self._ranking()
                self._taken.append(ranking.take(selected[start : start + _SLICE_ROWS]))
        with self.holder.lock:
            self._ranking()
            chosen: U64 = self._whole & self.holder.touched
            bitmaps.set_bits(chosen, selected)
            self._inner = Snapshot(self.holder, SINCE_VERSION, self._room, chosen)
            self.holder.snapshot = self._inner
        self._inner.rename(self._names)
        yield from self._inner.chunks(rows, cancelled)

    def _ranking(self) -> Ranking:
        if self.holder.lost is not None:
            raise self.holder.lost
        assert self.holder.ranking is not None
        return self.holder.ranking

    def close(self, advanced: Collection[str]) -> None:
        if self._inner is not None:
            self._inner.close(())
            self.held_seconds = self._inner.held_seconds
        with self.holder.lock:
            if PRIORITISED not in advanced and self.holder.ranking is not None:
                for taken in self._taken:
                    self.holder.ranking.put_back(taken)
