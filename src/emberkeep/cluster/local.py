"""A cluster whose shards are objects in this process: the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep import pool as pools
from emberkeep.errors import ConfigError
from emberkeep.kernels import hashing
from emberkeep.lookup import Lookup
from emberkeep.shard import Shard
from emberkeep.slab import F32, I64, Planes, RowIds
from emberkeep.snapshot import Snapshot, freeze
from emberkeep.tables import Optimizer, Table, check_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Where rows live: `shards` shards in this process, working on `threads` threads.

    `threads` is the number of cores (or `EMBERKEEP_THREADS`) unless given.
    """

    shards: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigError(f"a cluster has 1 shard or more, not {self.shards}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be 1 or more, not {self.threads}")

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> LocalCluster:
        pool = pools.shared() if self.threads is None else pools.Pool(self.threads)
        return LocalCluster(tables, optimizer, shards=self.shards, seed=seed, pool=pool)


def local(*, shards: int = 1, threads: int | None = None) -> Local:
    """`shards` shards in this process: `ek.EmbeddingBags(..., cluster=ek.local(shards=8))`."""
    return Local(shards=shards, threads=threads)


class LocalCluster:
    """Tables spread row by row over shards of this process.

    Which shard owns a row changes neither its initial value nor its updates: results are the same
    bits for every number of shards.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        *,
        shards: int = 1,
        seed: int = 0,
        pool: pools.Pool,
    ) -> None:
        self.tables = check_tables(tables)
        self.optimizer = optimizer
        self.seed = seed
        self.pool = pool
        self.shards = [
            Shard(self.tables, optimizer, index=i, count=shards, seed=seed, pool=pool)
            for i in range(shards)
        ]
        self.groups = self.shards[0].groups
        self._dynamic = [np.array([self.tables[t].dynamic for t in group]) for group in self.groups]
        self._is_dynamic = {table.name: np.array([table.dynamic]) for table in self.tables}
        self._push_lock = pools.ForkLock()

    def pull(self, wanted: Sequence[RowIds]) -> list[F32]:
        """The weights of the wanted rows, slab by slab. Changes nothing, inserts nothing."""
        out = [
            np.empty((ids.ids.size, self.tables[group[0]].dim), np.float32)
            for ids, group in zip(wanted, self.groups, strict=True)
        ]
        if len(self.shards) == 1:
            self.shards[0].pull(wanted, out)
            return out
        routed = [self._route(g, ids) for g, ids in enumerate(wanted)]
        for s, shard in enumerate(self.shards):
            parts = [
                np.empty((r[s][0].ids.size, o.shape[1]), np.float32)
                for r, o in zip(routed, out, strict=True)
            ]
            shard.pull([r[s][0] for r in routed], parts)
            for r, o, part in zip(routed, out, parts, strict=True):
                o[r[s][1]] = part
        return out

    def pull_bags(self, lookups: Sequence[Lookup], out: Sequence[F32]) -> None:
        """Pooled bags, slab by slab: straight from the rows where they are on one shard."""
        rest = [g for g in range(len(lookups)) if not self._is_direct(g)]
        if rest:
            wanted = [
                lookup.wanted if g in rest else lookup.nothing for g, lookup in enumerate(lookups)
            ]
            pulled = self.pull(wanted)
        for g, (lookup, out_BFD) in enumerate(zip(lookups, out, strict=True)):
            if g in rest:
                lookup.pooled(pulled[g], out_BFD)
            else:
                self.shards[0].pull_bags(g, lookup, out_BFD)

    def _is_direct(self, group: int) -> bool:
        return len(self.shards) == 1 and self.shards[0].slabs[group].direct

    def push(
        self, wanted: Sequence[RowIds], grads: Sequence[F32], *, lr: float, finite: bool = False
    ) -> None:
        """Updates each wanted row once. On any error no row on any shard has changed.

        `finite` says that the gradients are known to be finite and need not be looked at.
        """
        with self._push_lock:
            if len(self.shards) == 1:
                checked = self.shards[0].check(wanted, grads, finite=finite)
                self.shards[0].apply(checked, lr)
                return
            routed = [self._route(g, ids) for g, ids in enumerate(wanted)]
            pushes_S = [
                shard.check(
                    [r[s][0] for r in routed],
                    [g[r[s][1]] for g, r in zip(grads, routed, strict=True)],
                    finite=finite,
                )
                for s, shard in enumerate(self.shards)
            ]
            for shard, pushes in zip(self.shards, pushes_S, strict=True):
                shard.apply(pushes, lr)

    def read(self, table: str, ids: I64) -> Planes:
        """All planes of the rows named, in the order of `ids`; untouched rows as they begin."""
        ids = np.ascontiguousarray(ids, np.int64)
        parts = [
            (order, shard.read(table, ids[order])) for order, shard in self._owners(table, ids)
        ]
        first = parts[0][1]
        planes = {
            name: np.empty((ids.size, values.shape[1]), values.dtype)
            for name, values in first.items()
        }
        for order, part in parts:
            for name, values in part.items():
                planes[name][order] = values
        return planes

    def read_all(self, table: str) -> tuple[I64, Planes]:
        """The ids, ascending, and all planes of every trained row of a table."""
        with self._push_lock:
            parts = [shard.read_all(table) for shard in self.shards]
        ids = np.concatenate([part[0] for part in parts])
        order = np.argsort(ids, kind="stable")
        planes = {
            name: np.concatenate([part[1][name] for part in parts])[order] for name in parts[0][1]
        }
        return ids[order], planes

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes whole rows, all planes together."""
        ids = np.ascontiguousarray(ids, np.int64)
        for order, shard in self._owners(table, ids):
            shard.install(table, ids[order], {name: v[order] for name, v in planes.items()})

    def delete(self, table: str, ids: I64) -> int:
        """Takes rows back to their initial state; returns how many had been trained."""
        ids = np.unique(np.asarray(ids, np.int64))
        with self._push_lock:
            return sum(shard.delete(table, ids[order]) for order, shard in self._owners(table, ids))

    def touched_ids(self, table: str) -> I64:
        """The ids of a table's rows that were trained and not deleted since, ascending."""
        return np.sort(np.concatenate([shard.touched_ids(table) for shard in self.shards]))

    def steps(self, table: str) -> int:
        """How many pushes the table has taken part in."""
        return self.shards[0].steps(table)

    def set_steps(self, table: str, steps: int) -> None:
        for shard in self.shards:
            shard.set_steps(table, steps)

    # -- what a checkpointer asks ----------------------------------------------------------------

    def schema(self) -> dict[str, Any]:
        """The tables as they are saved: a restore into another shape is refused by name."""
        slabs = [
            (slab, t, table) for slab in self.shards[0].slabs for t, table in enumerate(slab.tables)
        ]
        return {
            "shards": len(self.shards),
            "tables": {
                table.name: {
                    "rows": table.rows,
                    "planes": {
                        name: [plane.shape[1], plane.dtype.name]
                        for name, plane in slab.planes.items()
                        if slab.has_plane(t, name)
                    },
                    "origin": table.describe_origin(self.seed),
                }
                for slab, t, table in slabs
            },
        }

    def track(self) -> None:
        """Starts to follow changes; every row that was trained before counts as changed."""
        with self._push_lock:
            for shard in self.shards:
                for slab in shard.slabs:
                    slab.track()

    def freeze(self, since: str | None, buffer_nbytes: int) -> list[list[Snapshot]]:
        """Freezes the rows of all shards at one instant; returns at once."""
        with self._push_lock:
            return [
                freeze(shard.slabs, since=since, buffer_nbytes=buffer_nbytes)
                for shard in self.shards
            ]

    def table_state(self) -> dict[str, Any]:
        """The step of each table, and the next tick of those that evict."""
        return {
            table.name: {
                "steps": self.steps(table.name),
                "tick": max(shard.next_tick(table.name) for shard in self.shards),
            }
            for table in self.tables
        }

    def load_table_state(self, state: dict[str, Any]) -> None:
        for name, its in state.items():
            for shard in self.shards:
                shard.set_steps(name, its["steps"])
                shard.set_next_tick(name, its["tick"])

    def clear(self) -> None:
        """Takes every row of every table back to its initial state."""
        with self._push_lock:
            for shard in self.shards:
                shard.clear()

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        """Nothing has changed since the version just loaded; see `Tracker.reset`."""
        with self._push_lock:
            for shard in self.shards:
                for slab in shard.slabs:
                    slab.forget_changes(keep_since_baseline=keep_since_baseline)

    # -- details ---------------------------------------------------------------------------------

    def _route(self, group: int, wanted: RowIds) -> list[tuple[RowIds, I64]]:
        """For each shard its part of the ids, and where they stood."""
        count = len(self.shards)
        dynamic_T = self._dynamic[group]
        counts_ST = np.zeros((count, dynamic_T.size), np.int64)
        order = np.empty(wanted.ids.size, np.int64)
        hashing.route(wanted.ids, wanted.offsets, dynamic_T, count, counts_ST, order)
        ends = np.cumsum(counts_ST.sum(axis=1))
        parts = []
        for s in range(count):
            mine = order[(ends[s - 1] if s else 0) : ends[s]]
            offsets = np.zeros(dynamic_T.size + 1, np.int64)
            np.cumsum(counts_ST[s], out=offsets[1:])
            parts.append((RowIds(wanted.ids[mine], offsets), mine))
        return parts

    def _owners(self, table: str, ids: I64) -> list[tuple[I64, Shard]]:
        """Each shard with the positions of the ids that it owns."""
        counts_ST = np.zeros((len(self.shards), 1), np.int64)
        order = np.empty(ids.size, np.int64)
        hashing.route(
            ids,
            np.array([0, ids.size]),
            self._is_dynamic[table],
            len(self.shards),
            counts_ST,
            order,
        )
        cuts = np.cumsum(counts_ST[:, 0])[:-1]
        return list(zip(np.split(order, cuts), self.shards, strict=True))
