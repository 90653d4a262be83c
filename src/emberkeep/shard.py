"""One failure domain: the slabs that hold one shard's part of every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from emberkeep.errors import ShardLostError
from emberkeep.lookup import Lookup
from emberkeep.pool import ForkLock, Pool
from emberkeep.priority import Priority, prioritised
from emberkeep.slab import F32, I64, Planes, Push, RowIds
from emberkeep.snapshot import FrozenRows, freeze
from emberkeep.tables import Optimizer, Table, Tier, check_tables
from emberkeep.tiered.opening import open_slab
from emberkeep.tiered.slab import TieredSlab
from emberkeep.tracking import PRIORITISED

State = Literal["serving", "recovering", "lost"]


def slab_groups(tables: Sequence[Table]) -> list[list[int]]:
    """Which tables share a slab: those of one dim and tier, in the order in which they appear."""
    groups: dict[tuple[int, Tier | None], list[int]] = {}
    for index, table in enumerate(tables):
        groups.setdefault((table.dim, table.tier), []).append(index)
    return list(groups.values())


def plane_shapes(table: Table, optimizer: Optimizer) -> dict[str, list[Any]]:
    """Width and type of every plane of a table's rows."""
    planes: dict[str, list[Any]] = {"weight": [table.dim, "float32"]}
    for plane, width in optimizer.planes(table.dim).items():
        planes[plane] = [width, "int32" if plane == "step" else "float32"]
    if table.on_full == "evict_oldest":
        planes["used"] = [1, "int64"]
    return planes


class Shard:
    """Shard `index` of `count`: its part of the rows of every table.

    Safe to call from several threads: calls are serialised, each uses the whole pool. A push is
    checked before it is applied, so it is applied whole or not at all; the cluster keeps other
    pushes out between the two.

    `epoch` names this life of the shard: its replacement has a later one. A shard that is
    "recovering" holds nothing yet that could be served, although its initial values would look
    like an answer: until `serve` it takes rows and refuses to train or to be read.
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
        epoch: int = 1,
        state: State = "serving",
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.state: State = state
        self.tables = check_tables(tables)
        self.groups = slab_groups(self.tables)
        self._lock = ForkLock()
        self.slabs = [
            open_slab(
                self.tables, group, optimizer, shard=index, shards=count, seed=seed, pool=pool,
                lock=self._lock,
            )
            for group in self.groups
        ]  # fmt: skip
        self._places = {
            self.tables[t].name: (self.slabs[g], i)
            for g, group in enumerate(self.groups)
            for i, t in enumerate(group)
        }

    def _must_serve(self) -> None:
        if self.state != "serving":
            raise ShardLostError((self.index,))

    def _must_live(self) -> None:
        if self.state == "lost":
            raise ShardLostError((self.index,))

    def serve(self) -> None:
        """Ends the recovery."""
        with self._lock:
            self._must_live()
            self.state = "serving"

    def kill(self) -> None:
        """Drops all memory; whoever copies rows out of it is told."""
        with self._lock:
            self.state = "lost"
            for slab in self.slabs:
                slab.drop(ShardLostError((self.index,)))
            self.slabs, self._places = [], {}

    def pull(self, wanted: Sequence[RowIds], out: Sequence[F32]) -> None:
        """Writes the weights of the wanted rows, slab by slab; changes nothing."""
        with self._lock:
            self._must_serve()
            for slab, ids, rows_UD in zip(self.slabs, wanted, out, strict=True):
                slab.pull(ids, rows_UD)

    def pull_bags(self, slab: int, lookup: Lookup, out_BFD: F32) -> None:
        """Pooled bags straight from the rows of a slab that is `direct`; changes nothing."""
        places = (
            lookup.firsts_F, lookup.lengths_F, lookup.ends_FB, lookup.scales_N, lookup.columns_F
        )  # fmt: skip
        with self._lock:
            self._must_serve()
            lookup.over_samples(
                lambda start, stop: self.slabs[slab].pull_bags(
                    lookup.ids_N, lookup.layout.tables_F, places, start, stop, out_BFD
                )
            )

    def fetch(self, wanted: Sequence[RowIds], *, ahead: bool) -> None:
        """Brings the rows of a batch that will be trained to memory; see `TieredSlab.fetch`."""
        self._must_serve()
        for slab, ids in zip(self.slabs, wanted, strict=True):
            if isinstance(slab, TieredSlab):
                slab.fetch(ids, ahead=ahead)

    def check(
        self, wanted: Sequence[RowIds], grads: Sequence[F32], *, finite: bool = False
    ) -> list[Push]:
        """Everything that can refuse a push, before any row changes."""
        with self._lock:
            self._must_serve()
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
            self._must_serve()
            for slab, push in zip(self.slabs, pushes, strict=True):
                slab.push(push, lr)

    def read(self, table: str, ids: I64) -> Planes:
        """All planes of the rows named, cut at one instant; untouched rows as they begin."""
        with self._lock:
            self._must_serve()
            slab, t = self._places[table]
            return slab.read(t, np.ascontiguousarray(ids, np.int64))

    def read_all(self, table: str) -> tuple[I64, Planes]:
        """The ids and all planes of every trained row of a table, cut at one instant."""
        with self._lock:
            self._must_serve()
            slab, t = self._places[table]
            ids = slab.touched_ids(t)
            return ids, slab.read(t, ids)

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes whole rows; they become touched and dirty."""
        with self._lock:
            self._must_live()
            slab, t = self._places[table]
            slab.install(t, np.ascontiguousarray(ids, np.int64), planes)

    def delete(self, table: str, ids: I64) -> int:
        """Takes rows back to their initial state; returns how many had been trained."""
        with self._lock:
            self._must_live()
            slab, t = self._places[table]
            return slab.delete(t, np.unique(np.asarray(ids, np.int64)))

    def touched_ids(self, table: str) -> I64:
        """The ids of a table's rows that were trained and not deleted since, ascending."""
        with self._lock:
            self._must_serve()
            slab, t = self._places[table]
            return slab.touched_ids(t)

    def table_state(self) -> dict[str, Any]:
        """Of each table: how many pushes it has taken part in, and the next tick if it evicts."""
        with self._lock:
            self._must_serve()
            return {
                name: {
                    "steps": int(slab.steps_T[t]),
                    "tick": slab.slots[t].next_tick if t in slab.slots else 0,
                }
                for name, (slab, t) in self._places.items()
            }

    def load_table_state(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._must_live()
            for name, its in state.items():
                slab, t = self._places[name]
                slab.steps_T[t] = its["steps"]
                if t in slab.slots:
                    slab.slots[t].go_on_from(its["tick"])

    def track(self, priority: Priority | None = None) -> None:
        """Starts to follow changes; every row that was trained before counts as changed."""
        chosen = prioritised([table.slots for table in self.tables])
        large = [self.tables[t].name for t in chosen]
        with self._lock:
            self._must_live()
            for slab in self.slabs:
                slab.track(priority, large)

    @property
    def ranking_nbytes(self) -> int:
        """What it takes to know which rows matter most."""
        return sum(slab.ranking.nbytes for slab in self.slabs if slab.ranking is not None)

    def freeze(self, since: str | None, buffer_nbytes: int) -> Sequence[FrozenRows]:
        """Freezes the rows of every slab; the cluster keeps pushes out meanwhile."""
        with self._lock:
            self._must_serve()
            if since == PRIORITISED:
                return [slab.prioritised(buffer_nbytes) for slab in self.slabs]
            return freeze(self.slabs, since=since, buffer_nbytes=buffer_nbytes)

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        """Nothing has changed since the version just loaded; see `Tracker.reset`."""
        with self._lock:
            self._must_live()
            for slab in self.slabs:
                slab.forget_changes(keep_since_baseline=keep_since_baseline)

    def clear(self) -> None:
        """Takes every row back to its initial state."""
        with self._lock:
            self._must_live()
            for slab in self.slabs:
                slab.clear()
