"""The client side of a cluster: rows by table and id, wherever their shards are.

`Cluster` routes ids, splits pushes, joins answers, and is what a checkpointer protects. What is
below it is a sequence of shards that answer `ShardHandle`: objects in this process, or servers.
Each kind of cluster moves the rows of pulls and pushes, and makes replacements, in its own way.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from emberkeep._types import F32, I64, Json, Planes, Rates, RowIds
from emberkeep.cluster.failure_schedule import When
from emberkeep.cluster.outage import SaidLosses, surviving
from emberkeep.cluster.shard import State, plane_shapes, slab_groups
from emberkeep.cluster.shard_handle import ShardHandle
from emberkeep.cluster.table_states import Edit, holds, joined, of_shard, rows_of_shards
from emberkeep.erasure.codes import Parity
from emberkeep.erasure.status import ParityStatus
from emberkeep.errors import (
    ConfigError,
    PeerError,
    ShardLostError,
    StateError,
    TableFullError,
)
from emberkeep.kernels import hash_index
from emberkeep.rows import upsert as upserts
from emberkeep.rows.copy_room import CopyRoom
from emberkeep.rows.lookup import Lookup
from emberkeep.rows.priority import Priority
from emberkeep.rows.row_digest import RowDigest
from emberkeep.rows.snapshot import Cut, FrozenRows
from emberkeep.runtime import pool as pools
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.stopping import Stop
from emberkeep.tables import Optimizer, Table, check_tables

_T = TypeVar("_T")

PATIENCE = timedelta(minutes=15)
"""How long a run waits, unless configured otherwise, for what somebody else has to do."""
Routed = list[list[tuple[RowIds, I64]]]
"""By slab and shard: the shard's ids, and where they stood."""


def check_size(shards: int, threads: int | None = None, parity: Parity | None = None) -> None:
    """Refuses a cluster without shards or threads, or too small for its parity."""
    if shards < 1:
        raise ConfigError(f"a cluster has 1 shard or more, not {shards}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be 1 or more, not {threads}")
    if parity is not None:
        parity.check_shards(shards)


class ClusterSpec(Protocol):
    """Where rows shall live: what `cluster=` of a module takes."""

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> Cluster: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """One shard as the cluster sees it."""

    index: int
    epoch: int
    state: State


OnLoss = Callable[[ShardLostError], bool]
OnEvent = Callable[[str, Json], object]


class Cluster:
    """Tables spread row by row over shards.

    Which shard owns a row changes neither its initial value nor its updates: results are the same
    bits for every number of shards. Safe to call from several threads.

    When shards are lost, every call that reads or trains rows raises `ShardLostError`, naming
    them; what goes on afterwards is `on_loss`'s to decide: called with the error and no lock held,
    it returns True when the shards serve again, and the call is made once more. To bring shards
    back: `renew` them, fill them, let them `serve`. A push that raised it has changed nothing on
    shards of this process; on servers it is finished as soon as the shards are back (see
    `FlightCluster`).
    """

    shared = False
    """Whether other processes train the same rows: one of them alone saves and restores."""

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        shards: Sequence[ShardHandle],
        *,
        seed: int,
        pool: pools.Pool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self.tables = check_tables(tables)
        self.optimizer = optimizer
        self.seed = seed
        self.pool = pool
        self.handles: list[ShardHandle] = list(shards)
        self.groups = slab_groups(self.tables)
        self.on_loss: OnLoss | None = None
        self.on_event: OnEvent | None = None
        """Hears of what an operator may want to know: shards that are silent, lost, back."""
        self.lost_since: float | None = None
        """By the clock of the cluster, when the call began that found shards lost; None if all
        serve."""
        self.stop = Stop(clock)
        """Ends what waits for shards, when the process is asked to stop."""
        self.losses: list[int] = []
        """The shards whose rows were lost, each time that one was."""
        self.found_rows: str | None = None
        """Where opening has found the rows of which step in files, for as long as nobody has chosen
        those rows, or others."""
        self._said = SaidLosses()
        self._forgot = False
        self._dynamic = [np.array([self.tables[t].dynamic for t in group]) for group in self.groups]
        self._is_dynamic = {table.name: np.array([table.dynamic]) for table in self.tables}
        self._push_lock = pools.ForkLock()

    # -- shards ----------------------------------------------------------------------------------

    @property
    def shard_count(self) -> int:
        return len(self.handles)

    def status(self) -> tuple[ShardStatus, ...]:
        """Every shard's epoch and state."""
        return tuple(
            ShardStatus(index=shard.index, epoch=shard.epoch, state=shard.state)
            for shard in self.handles
        )

    def lost(self) -> tuple[int, ...]:
        """The shards that do not serve: lost, or not recovered yet."""
        return tuple(shard.index for shard in self.handles if shard.state != "serving")

    def renew(self, *shards: int) -> None:
        """Begins a new epoch of these shards, lost or not: empty, refusing to serve.

        A caller that still names the old epoch is refused from here on.
        """
        raise NotImplementedError

    def serve(self, *shards: int, exact: bool = False) -> None:
        """Says that these shards were recovered: they answer again. `exact` says that no push was
        acknowledged which their rows are without."""
        raise NotImplementedError

    def protect(self, parity: Parity) -> None:
        """Begins to keep parity; a cluster that has just that parity goes on with it."""
        raise NotImplementedError

    @property
    def parity(self) -> ParityStatus | None:
        """How well rows are protected; None without parity."""
        return None

    def tell(self, **run: float | str) -> None:
        """What is known of the run, for those who watch its servers: `name`, `step`, `version`,
        `version_at` (seconds since 1970) and `pls`."""

    @property
    def patience(self) -> timedelta:
        """How long a recovery may take that loses shards again and again."""
        return PATIENCE

    def await_silent(self) -> None:
        """Waits for shards that do not answer and may be alive, as a call that needs them would;
        for a recovery that meets them: nobody has decided yet to renew them."""

    def _say(self, event: str, **details: Any) -> None:
        if self.on_event is not None:
            self.on_event(event, details)

    def _second_opinion(self, lost: ShardLostError) -> ShardLostError | PeerError:
        """What is known of shards that one connection found lost."""
        return lost

    def _bring_back(self, lost: ShardLostError) -> bool:
        """Whether lost shards serve again; with no lock held."""
        if news := self._said.news(lost, self.handles):
            self._say("lost", shards=news)
        return self._from_parity() or (self.on_loss is not None and self.on_loss(lost))

    def _from_parity(self) -> bool:
        """Brings lost shards back from the others; False without parity, or if they were too
        many."""
        return False

    def _await_peers(self, error: PeerError, seconds: float) -> bool:
        """A shard could not do something because of another, for so long by now: returns when
        that is worth another try, else raises. Whether lost shards were brought back for it."""
        raise error

    def _serving(self) -> list[ShardHandle]:
        for shard in self.handles:
            if shard.state != "serving":
                raise ShardLostError(self.lost())
        return self.handles

    def _present(self) -> list[ShardHandle]:
        if gone := self._gone():
            raise ShardLostError(gone)
        return self.handles

    def _gone(self) -> tuple[int, ...]:
        return tuple(shard.index for shard in self.handles if shard.state == "lost")

    def _each(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Makes one call per shard. In turn, as each uses the whole pool; servers are asked at
        once."""
        return [call() for call in calls]

    # -- training --------------------------------------------------------------------------------

    def check_rows(self) -> None:
        """Refuses rows that nobody has asked for."""
        if self.found_rows is not None:
            raise StateError(
                f"{self.found_rows}, which an earlier run has made durable there and this one has "
                "not asked for; nothing was trained or changed. To go on from them, resume with "
                "ek.tiered(...) or without a repository (TOML: tier.every); to start over, call "
                "start_over() (--fresh), name another path for the tier, or remove the files"
            )

    def choose_rows(self) -> None:
        """The rows are those that are wanted, wherever they have come from."""
        self.found_rows = None

    def pull(self, wanted: Sequence[RowIds]) -> list[F32]:
        """The weights of the wanted rows, slab by slab. Changes nothing, inserts nothing."""
        raise NotImplementedError

    @property
    def tiered(self) -> bool:
        """Whether rows live in files: `fetch` then saves pulls and pushes from waiting for them."""
        return any(table.tier is not None for table in self.tables)

    @property
    def reads_ahead(self) -> bool:
        """Whether `fetch` with `ahead` is of any use."""
        return self.tiered

    def fetch(self, wanted: Sequence[RowIds], *, ahead: bool = False) -> None:
        """Says which rows will be pulled and pushed, where they live in files.

        With `ahead` it returns at once, and they are read beside whatever comes next.
        """

    def pull_bags(self, lookups: Sequence[Lookup], out: Sequence[F32]) -> None:
        """Pooled bags, slab by slab."""
        pulled = self.pull([lookup.wanted for lookup in lookups])
        for lookup, rows_UD, out_BFD in zip(lookups, pulled, out, strict=True):
            lookup.pooled(rows_UD, out_BFD)

    def push(
        self, wanted: Sequence[RowIds], grads: Sequence[F32], *, lr: Rates, finite: bool = False
    ) -> None:
        """Updates each wanted row once. On any error of Emberkeep's no row on any shard has
        changed, but for what `ShardLostError` says of servers. An error of the system half-way,
        such as `MemoryError`, leaves rows of this process with a part of the update: recover, or
        resume a version. A server lets its rows go then, and is recovered as a lost shard.

        `finite` says that the gradients are known to be finite and need not be looked at; `lr` is
        that of all slabs, or of each.
        """
        raise NotImplementedError

    def _before(self, scope: When) -> None:
        """Called before every pull and push; where failures are injected."""

    # -- rows ------------------------------------------------------------------------------------

    @surviving
    def read(self, table: str, ids: I64) -> Planes:
        """All planes of the rows named, in the order of `ids`; untouched rows as they begin."""
        self._serving()
        ids = np.ascontiguousarray(ids, np.int64)
        parts = [
            (order, shard.read(table, ids[order])) for order, shard in self._owners(table, ids)
        ]
        planes = {
            name: np.empty((ids.size, values.shape[1]), values.dtype)
            for name, values in parts[0][1].items()
        }
        for order, part in parts:
            for name, values in part.items():
                planes[name][order] = values
        return planes

    @surviving
    def read_all(self, table: str) -> tuple[I64, Planes]:
        """The ids, ascending, and all planes of every trained row of a table."""
        with self._push_lock:
            parts = [shard.read_all(table) for shard in self._serving()]
        ids = np.concatenate([part[0] for part in parts])
        order = np.argsort(ids, kind="stable")
        planes = {
            name: np.concatenate([part[1][name] for part in parts])[order] for name in parts[0][1]
        }
        return ids[order], planes

    @surviving
    def touched_ids(self, table: str) -> I64:
        """The ids of a table's rows that were trained and not deleted since, ascending."""
        return np.sort(np.concatenate([shard.touched_ids(table) for shard in self._serving()]))

    @surviving
    def digest(self, table: str) -> RowDigest:
        """Of all trained rows of a table, made where they live: the same for the same rows,
        whatever number of shards holds them."""
        with self._push_lock:
            shards = self._serving()
            parts = self._each([functools.partial(shard.digest, table) for shard in shards])
        return functools.reduce(RowDigest.joined, parts, RowDigest())

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes whole rows, all planes together."""
        self._present()
        ids = np.ascontiguousarray(ids, np.int64)
        if len(self.handles) == 1:
            self.handles[0].install(table, ids, planes)
            return
        for order, shard in self._owners(table, ids):
            shard.install(table, ids[order], {name: v[order] for name, v in planes.items()})

    def upsert(self, table: str, ids: npt.ArrayLike, planes: Mapping[str, npt.ArrayLike]) -> None:
        """Writes rows that come from outside: new ones, and over those that are there.

        Planes that are not given stay as they are, or begin as those of any new row. The rows count
        as trained: the next version has them, parity covers them when this returns, and a table
        that evicts holds them for its newest. What is refused is refused before any row changes.
        A shard that is lost meanwhile gets them, as all others do, once it is back. Where it does
        not come back, `ShardLostError`: on servers others may have written theirs, and the same
        upsert may be made again.
        """
        spec = self._spec(table)
        ids, own = upserts.checked(spec, plane_shapes(spec, self.optimizer), ids, planes)
        self._upsert_all(spec, ids, own, Edit.of(table, ids, own))

    @surviving
    def _upsert_all(
        self, spec: Table, ids: I64, own: Mapping[str, npt.NDArray[Any]], edit: Edit
    ) -> None:
        table = spec.name
        with self._push_lock:
            parts = [
                (shard, ids[order], {name: v[order] for name, v in own.items()})
                for (order, shard) in self._owners(table, ids)
            ]
            self._drop_ahead()
            self._serving()
            # All shards are asked first, also those that have no table to fill: one that is lost
            # is found before any other has written.
            nothing = ids[:0]
            self._each([
                functools.partial(s.check_upsert, table, i if spec.dynamic else nothing)
                for s, i, _ in parts
            ])  # fmt: skip
            try:
                self._each([
                    functools.partial(self._upsert, s, table, i, v, edit) for s, i, v in parts
                ])  # fmt: skip
            except TableFullError as error:
                if sum(i.size > 0 for _, i, _ in parts) == 1:
                    raise
                # Another worker has filled the table since all shards agreed.
                raise TableFullError(
                    f"{error}; rows of other shards may have been written: make room, upsert again"
                ) from error
            self._settle_writes()

    def _upsert(
        self, shard: ShardHandle, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]],
        edit: Edit,
    ) -> None:  # fmt: skip
        shard.upsert(table, ids, planes, edit)

    def _drop_ahead(self) -> None:
        """Forgets rows that were pulled ahead, where some are: they are about to change."""

    def _settle_writes(self) -> None:
        """After a write that is no push: whatever protects rows has it when this returns."""

    def _spec(self, name: str) -> Table:
        for table in self.tables:
            if table.name == name:
                return table
        have = ", ".join(table.name for table in self.tables)
        raise ConfigError(f"there is no table {name!r}; the tables are {have}")

    def delete(self, table: str, ids: I64) -> int:
        """Takes rows back to their initial state; returns how many had been trained, where a shard
        is lost meanwhile of those that were left."""
        ids = np.unique(np.asarray(ids, np.int64))
        return self._delete_all(table, ids, Edit.of(table, ids))

    @surviving
    def _delete_all(self, table: str, ids: I64, edit: Edit) -> int:
        with self._push_lock:
            self._drop_ahead()
            self._present()
            if not self.lost():  # pushes that were given up come first, as before any other write
                self._serving()
            return sum(
                shard.delete(table, ids[order], edit) for order, shard in self._owners(table, ids)
            )

    def unfinished(self, shard: int) -> int:
        """How many pushes this shard has applied that those which do not serve will be sent."""
        return 0

    def saved_all(self, shard: int) -> bool:
        """Whether the newest whole version has every push that this lost shard will not be sent."""
        return True

    def steps(self, table: str) -> int:
        """How many pushes the table has taken part in."""
        return int(self.table_state()[table]["steps"])

    def set_steps(self, table: str, steps: int, rows: int = 0) -> None:
        """Goes on from these steps; warns unless so many rows are there that were installed."""
        state = {**self.table_state()[table], "steps": steps, "rows": [rows]}
        self.load_table_state({table: state})

    # -- what a checkpointer asks ----------------------------------------------------------------

    def schema(self) -> Json:
        """The tables as they are saved: a restore into another shape is refused by name."""
        tables = [self.tables[t] for group in self.groups for t in group]
        return {
            "shards": len(self.handles),
            "tables": {
                table.name: {
                    "rows": table.rows,
                    "planes": plane_shapes(table, self.optimizer),
                    "origin": table.describe_origin(self.seed),
                }
                for table in tables
            },
        }

    def track(self, priority: Priority | None = None) -> None:
        """Starts to follow changes; every row that was trained before counts as changed.

        With `priority` also which rows matter most, for prioritised versions.
        """
        with self._push_lock:
            for shard in self._present():
                shard.track(priority)

    @surviving
    def freeze(self, since: str | None, buffer_nbytes: int) -> Cut[Sequence[FrozenRows]]:
        """Freezes the rows of all shards at one instant; returns at once.

        Pushes of this process do not come between. Those of other workers may, from shard to
        shard, where they are asynchronous; the state of a shard's tables is always that of its
        rows, because the shard reads it under the lock under which it freezes.
        """
        taken: dict[int, Cut[FrozenRows]] = {}
        room = CopyRoom(buffer_nbytes, self._clock)

        def take(shard: ShardHandle) -> None:
            taken[shard.index] = self._freeze_shard(shard, since, room)

        with self._push_lock:
            shards = self._serving()
            try:
                self._each([functools.partial(take, shard) for shard in shards])
                cuts = [taken[shard.index] for shard in shards]
                return Cut(cuts, joined([cut.tables for cut in cuts]))
            except BaseException:
                for frozen in (frozen for part in taken.values() for frozen in part):
                    frozen.close(())
                raise

    def _freeze_shard(
        self, shard: ShardHandle, since: str | None, room: CopyRoom
    ) -> Cut[FrozenRows]:
        """Freezes one of the shards. A server has a process, and a buffer, of its own."""
        return shard.freeze(since, room.nbytes)

    @surviving
    def table_state(self) -> Json:
        """The step of each table, and the next tick of those that evict."""
        return joined([shard.table_state() for shard in self._serving()])

    def check_room(self, state: Json) -> None:
        """Raises `TableFullError` if a table that does not evict has no room for the rows of that
        state, before any of them is there."""
        count = len(self.handles)
        for table in self.tables:
            rows_S = rows_of_shards(state, table.name)
            if rows_S is None or table.on_full == "evict_oldest":
                continue
            enough = table.slots
            while not holds(table, enough, rows_S, count):
                enough = max(sum(rows_S), enough + enough // 8 + 1)
            if enough > table.slots:
                raise TableFullError(
                    f"table {table.name!r} has {sum(rows_S)} rows in the version, saved by "
                    f"{len(rows_S)} shards, and capacity={table.slots} here on {count}: nothing "
                    f"was loaded; raise capacity= to {enough} or more"
                )

    def load_table_state(self, state: Json) -> None:
        """Goes on from a state; warns if tables that evict did not have room for all its rows."""
        count = len(self.handles)
        held_S = [
            shard.load_table_state(of_shard(state, shard.index, count)) for shard in self._present()
        ]
        for name in state:
            rows = sum(rows_of_shards(state, name) or ())
            gone = rows - sum(held.get(name, 0) for held in held_S)
            if gone > 0:
                warnings.warn(
                    f"table {name!r}: {gone} of {rows} rows had no room and were "
                    "evicted, those trained least recently; raise capacity= to keep all",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def clear(self) -> None:
        """Takes every row of every table back to its initial state."""
        with self._push_lock:
            for shard in self._present():
                shard.clear()
        self.choose_rows()

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        """Nothing has changed since the version just loaded; see `Tracker.reset`."""
        with self._push_lock:
            self._forgot = False
            for shard in self._present():
                shard.forget_changes(keep_since_baseline=keep_since_baseline)

    def forgot_changes(self) -> bool:
        """Whether shards came back without knowing what had been deleted; says so once."""
        forgot, self._forgot = self._forgot, False
        return forgot

    # -- details ---------------------------------------------------------------------------------

    def _routed(self, wanted: Sequence[RowIds]) -> Routed:
        if len(self.handles) == 1:
            return [[(ids, np.arange(ids.ids.size))] for ids in wanted]
        return [self._route(g, ids) for g, ids in enumerate(wanted)]

    def _route(self, group: int, wanted: RowIds) -> list[tuple[RowIds, I64]]:
        """For each shard its part of the ids, and where they stood."""
        count = len(self.handles)
        dynamic_T = self._dynamic[group]
        counts_ST = np.zeros((count, dynamic_T.size), np.int64)
        order = np.empty(wanted.ids.size, np.int64)
        hash_index.route(wanted.ids, wanted.offsets, dynamic_T, count, counts_ST, order)
        offsets_ST = np.zeros((count, dynamic_T.size + 1), np.int64)
        np.cumsum(counts_ST, axis=1, out=offsets_ST[:, 1:])
        sorted_ids, parts, first = wanted.ids.take(order), [], 0
        for offsets in offsets_ST:
            after = first + int(offsets[-1])
            parts.append((RowIds(sorted_ids[first:after], offsets), order[first:after]))
            first = after
        return parts

    def _owners(self, table: str, ids: I64) -> list[tuple[I64, ShardHandle]]:
        """Each shard with the positions of the ids that it owns."""
        return list(zip(self.positions(table, ids), self.handles, strict=True))

    def positions(self, table: str, ids: I64) -> list[I64]:
        """For each shard the positions of the ids that it owns."""
        count, order = len(self.handles), np.empty(ids.size, np.int64)
        counts_ST = np.zeros((count, 1), np.int64)
        hash_index.route(
            ids, np.array([0, ids.size]), self._is_dynamic[table], count, counts_ST, order
        )
        return np.split(order, np.cumsum(counts_ST[:, 0])[:-1])
