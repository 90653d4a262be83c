"""One failure domain: the slabs that hold one shard's part of every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep.lookup import Lookup
from emberkeep.pool import ForkLock, Pool
from emberkeep.slab import F32, I64, Planes, Push, RowIds, Slab
from emberkeep.tables import Optimizer, Table, check_tables


def slab_groups(tables: Sequence[Table]) -> list[list[int]]:
    """Which tables share a slab: those of one dim, in the order in which dims first appear."""
    groups: dict[int, list[int]] = {}
    for index, table in enumerate(tables):
        groups.setdefault(table.dim, []).append(index)
    return list(groups.values())


class Shard:
    """Shard `index` of `count`: its part of the rows of every table.

    Safe to call from several threads: calls are serialised, each uses the whole pool. A push is
    checked before it is applied, so it is applied whole or not at all; the cluster keeps other
    pushes out between the two.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        *,
        index: int = 0,
        count: int = 1,
        seed: int = 0,
        pool: Pool,
    ) -> None:
        self.tables = check_tables(tables)
        self.groups = slab_groups(self.tables)
        self._lock = ForkLock()
        self.slabs = [
            Slab(
                [self.tables[t] for t in group],
                optimizer,
                shard=index,
                shards=count,
                seed=seed,
                pool=pool,
                lock=self._lock,
            )
            for group in self.groups
        ]
        self._places = {
            self.tables[t].name: (self.slabs[g], i)
            for g, group in enumerate(self.groups)
            for i, t in enumerate(group)
        }

    def pull(self, wanted: Sequence[RowIds], out: Sequence[F32]) -> None:
        """Writes the weights of the wanted rows, slab by slab; changes nothing."""
        with self._lock:
            for slab, ids, rows_UD in zip(self.slabs, wanted, out, strict=True):
                slab.pull(ids, rows_UD)

    def pull_bags(self, slab: int, lookup: Lookup, out_BFD: F32) -> None:
        """Pooled bags straight from the rows of a slab that is `direct`; changes nothing."""
        places = (
            lookup.firsts_F, lookup.lengths_F, lookup.ends_FB, lookup.scales_N, lookup.columns_F
        )  # fmt: skip
        with self._lock:
            lookup.over_samples(
                lambda start, stop: self.slabs[slab].pull_bags(
                    lookup.ids_N, lookup.layout.tables_F, places, start, stop, out_BFD
                )
            )

    def check(
        self, wanted: Sequence[RowIds], grads: Sequence[F32], *, finite: bool = False
    ) -> list[Push]:
        """Everything that can refuse a push, before any row changes."""
        with self._lock:
            return [
                slab.check_push(ids, grads_UD, finite=finite)
                for slab, ids, grads_UD in zip(self.slabs, wanted, grads, strict=True)
            ]

    def apply(self, pushes: Sequence[Push], lr: float) -> None:
        """Applies a push that was checked, with no other push in between."""
        for slab in self.slabs:
            if slab.snapshot is not None:
                slab.snapshot.wait_for_room()
        with self._lock:
            for slab, push in zip(self.slabs, pushes, strict=True):
                slab.push(push, lr)

    def read(self, table: str, ids: I64) -> Planes:
        """All planes of the rows named, cut at one instant; untouched rows as they begin."""
        slab, t = self._places[table]
        with self._lock:
            return slab.read(t, np.ascontiguousarray(ids, np.int64))

    def read_all(self, table: str) -> tuple[I64, Planes]:
        """The ids and all planes of every trained row of a table, cut at one instant."""
        slab, t = self._places[table]
        with self._lock:
            ids = slab.touched_ids(t)
            return ids, slab.read(t, ids)

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes whole rows; they become touched and dirty."""
        slab, t = self._places[table]
        with self._lock:
            slab.install(t, np.ascontiguousarray(ids, np.int64), planes)

    def delete(self, table: str, ids: I64) -> int:
        """Takes rows back to their initial state; returns how many had been trained."""
        slab, t = self._places[table]
        with self._lock:
            return slab.delete(t, np.unique(np.asarray(ids, np.int64)))

    def touched_ids(self, table: str) -> I64:
        """The ids of a table's rows that were trained and not deleted since, ascending."""
        slab, t = self._places[table]
        with self._lock:
            return slab.touched_ids(t)

    def steps(self, table: str) -> int:
        """How many pushes the table has taken part in."""
        slab, t = self._places[table]
        return int(slab.steps_T[t])

    def set_steps(self, table: str, steps: int) -> None:
        slab, t = self._places[table]
        with self._lock:
            slab.steps_T[t] = steps

    def next_tick(self, table: str) -> int:
        """The next tick of a table that evicts, 0 for others."""
        slab, t = self._places[table]
        return slab.slots[t].next_tick if t in slab.slots else 0

    def set_next_tick(self, table: str, tick: int) -> None:
        slab, t = self._places[table]
        with self._lock:
            if t in slab.slots:
                slab.slots[t].next_tick = tick

    def clear(self) -> None:
        """Takes every row back to its initial state."""
        with self._lock:
            for slab in self.slabs:
                slab.clear()
