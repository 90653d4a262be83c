"""One failure domain: the slabs that hold one shard's part of every table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np

from emberkeep._types import F32, I64, Array, Bools, Planes, Rates, RowIds
from emberkeep.cluster.table_states import NO_EDIT, Edit
from emberkeep.erasure.coded_slabs import Recorder, state_of
from emberkeep.erasure.member import ParityMember
from emberkeep.erasure.messages import PushNumber
from emberkeep.errors import EmberkeepError, ShardLostError
from emberkeep.kernels import batch_rows
from emberkeep.rows import upsert as upserts
from emberkeep.rows.changed_rows import changed_ids, forget_rewound
from emberkeep.rows.copy_room import CopyRoom
from emberkeep.rows.lookup import Lookup
from emberkeep.rows.priority import Priority, prioritised
from emberkeep.rows.push import Push
from emberkeep.rows.row_digest import RowDigest, digest_chunk
from emberkeep.rows.slab import Slab
from emberkeep.rows.snapshot import Cut, FrozenRows, freeze
from emberkeep.rows.tracker import PRIORITISED
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.memory import Values
from emberkeep.runtime.pool import ForkLock, Pool
from emberkeep.tables import Optimizer, Table, Tier, check_tables
from emberkeep.tiers.durable_open import open_slab
from emberkeep.tiers.tier_use import TierStatus
from emberkeep.tiers.tiered_slab import TieredSlab

State = Literal["serving", "recovering", "lost"]
# Brings those of a slab's rows back that parity has yet to return.
BringBack = Callable[[int, I64], object]

# Rows that are taken back to their initial state at a time, where parity must learn of it.
_CLEAR_ROWS = 65536
# So many calls are remembered: one whose answer was lost is made again soon after.
_EDIT_CALLS = 256


def slab_groups(tables: Sequence[Table]) -> list[list[int]]:
    """Which tables share a slab, in their order: those of one dim, tier and optimizer."""
    groups: dict[tuple[int, Tier | None, Optimizer | None], list[int]] = {}
    for index, table in enumerate(tables):
        groups.setdefault((table.dim, table.tier, table.optimizer), []).append(index)
    return list(groups.values())


def plane_shapes(table: Table, optimizer: Optimizer) -> dict[str, list[Any]]:
    """Width and type of every plane of a table's rows."""
    planes: dict[str, list[Any]] = {"weight": [table.dim, "float32"]}
    for plane, width in table.trained_by(optimizer).planes(table.dim).items():
        planes[plane] = [width, "int32" if plane == "step" else "float32"]
    if table.on_full == "evict_oldest":
        planes["used"] = [1, "int64"]
    return planes


def _follows(place: tuple[Slab, int], before: tuple[Slab, int]) -> bool:
    """Whether a table stands in the same slab as another, further on."""
    return place[0] is before[0] and place[1] > before[1]


class Shard:
    """Shard `index` of `count`: its part of the rows of every table.

    Safe to call from several threads: calls are serialised, each uses the whole pool. A push is
    checked before it is applied, so it is applied whole or not at all; the cluster keeps other
    pushes out between the two.

    `epoch` names this life of the shard: its replacement has a later one. A shard that is
    "recovering" holds nothing yet that could be served, although its initial values would look
    like an answer: until `serve` it takes rows and refuses to train or to be read.

    With a `member`, every change of rows is sent to the hosts of their parity. A replacement whose
    rows are still on their way back has `bring_back`: what a call needs is brought back first, and
    the rest has to wait for nobody.

    `slabs` opens them, as `open_slab` does. The tiers of tables are those of all shards together,
    unless it is `alone` on its machine. `advance` is called while files of tiers are read.
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
        clock: Clock = SYSTEM_CLOCK,
        slabs: Callable[..., Slab] = open_slab,
        alone: bool = False,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        self.index = index
        self._clock = clock
        self.epoch = epoch
        self.state: State = state
        self.tables = check_tables(tables)
        self.groups = slab_groups(self.tables)
        self._lock = ForkLock()
        self.slabs: list[Slab] = []
        self.member: ParityMember | None = None
        try:
            for group in self.groups:
                slab = slabs(
                    self.tables, group, optimizer, shard=index, shards=count, seed=seed, pool=pool,
                    lock=self._lock, clock=clock, alone=alone, advance=advance,
                )  # fmt: skip
                self.slabs.append(slab)
        except BaseException:  # the traceback keeps this alive: let go of files at once
            self.kill()
            raise
        self._edit_calls: deque[int] = deque(maxlen=_EDIT_CALLS)
        self._places = {
            self.tables[t].name: (self.slabs[g], i)
            for g, group in enumerate(self.groups)
            for i, t in enumerate(group)
        }
        self.bring_back: BringBack | None = None
        self.make_room: Callable[[], object] | None = None
        """Called before a write that is not a push, with no lock held: waits while too much is on
        its way to parity. A push waits when it is done."""
        self._recorders: list[Recorder] = []
        self.lost_with_writes = False
        """Whether a write that ends half-way loses the shard, for those who send again what was not
        answered: no row has the half of an update then, and parity hears nothing of it."""
        self.torn = ""
        """The error with which a write has ended half-way, where the shard is lost with it."""

    @property
    def lock(self) -> ForkLock:
        """Rows change, and messages to parity are numbered, with this lock held."""
        return self._lock

    def protect(self, member: ParityMember) -> None:
        """From here on every change of a row goes to its member of parity."""
        with self._lock:
            self.member = member
            self._recorders = [
                Recorder(g, slab, member.placement.k) for g, slab in enumerate(self.slabs)
            ]
            for slab, recorder in zip(self.slabs, self._recorders, strict=True):
                slab.recorder = recorder

    def _record(self, push: PushNumber | None = None) -> int:
        """Sends what a write has changed; the number of that message. With the lock held."""
        if self.member is None:
            return 0
        try:
            parts = [part for recorder in self._recorders if (part := recorder.take()) is not None]
            return self.member.record(parts, push, state_of(self.slabs))
        except BaseException as error:
            if self.lost_with_writes:
                self.tear(error)
            else:
                self._forget_recorded()
                self.member.unsaid(error)
            raise

    def _forget_recorded(self) -> None:
        for recorder in self._recorders:
            recorder.forget()

    @contextmanager
    def _recording_at_least(self, *, checked: bool = False) -> Iterator[None]:
        """Parity learns of rows that were changed also where a write ends half-way, unless the
        shard is lost with it. An error of emberkeep's is a refusal, but of what was `checked`."""
        try:
            yield
        except BaseException as error:
            if self.lost_with_writes and (checked or not isinstance(error, EmberkeepError)):
                self.tear(error)
            else:
                self._record()
            raise

    def tear(self, error: BaseException) -> None:
        """A write has ended half-way: the shard is lost."""
        with self._lock:
            self.torn = self.torn or repr(error)
            self.kill()

    def _need(self, wanted: Sequence[RowIds], *, push: bool = False) -> None:
        """Brings back what a call is about to look at; with no lock held.

        A push that evicts the oldest rows has to know how old all of them are.
        """
        bring_back = self.bring_back
        if bring_back is None:
            return
        for g, ids in enumerate(wanted):
            with self._lock:
                self._must_serve()
                slab = self.slabs[g]
                found, unknown = slab.resolve(ids)
                evicting = [
                    t
                    for t, slots in slab.slots.items()
                    if push and slots.ticks is not None
                    and slots.count + unknown[t] > slots.capacity
                ]  # fmt: skip
            bring_back(g, found[found >= 0])
            for t in evicting:
                self._need_rows(slab.tables[t].name)

    def _before_write(self) -> None:
        make_room = self.make_room
        if make_room is not None:
            make_room()

    def _need_rows(self, table: str, ids: I64 | None = None) -> None:
        """Brings rows of a table back: those with the ids, or all."""
        bring_back = self.bring_back
        if bring_back is None:
            return
        with self._lock:
            self._must_serve()
            slab, t = self._places[table]
            number = self.slabs.index(slab)
            if ids is None:
                found = slab.bases_T[t] + np.arange(slab.slots_T[t])
            else:
                found, _ = slab.resolve(slab.one_table(t, ids))
        bring_back(number, found[found >= 0])

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
        """Drops all memory; a copy of rows that is under way fails with the loss."""
        with self._lock:
            self.state = "lost"
            slabs, self.slabs, self._places = self.slabs, [], {}
            self._recorders, self.bring_back, self.make_room = [], None, None
            if self.member is not None:
                self.member.end()
            lost = ShardLostError((self.index,))
            end_all(*(partial(slab.drop, lost) for slab in slabs))

    def pull(self, wanted: Sequence[RowIds], out: Sequence[F32]) -> None:
        """Writes the weights of the wanted rows, slab by slab; changes nothing."""
        self._need(wanted)
        with self._lock:
            self._must_serve()
            for slab, ids, rows_UD in zip(self.slabs, wanted, out, strict=True):
                slab.pull(ids, rows_UD)

    def pull_placed(self, wanted: Sequence[RowIds], out: Sequence[F32]) -> list[I64]:
        """`pull`, and where in its slab each row stands, -1 for an unknown id: both of one
        instant."""
        self._need(wanted)
        places_G = []
        with self._lock:
            self._must_serve()
            for slab, ids, rows_UD in zip(self.slabs, wanted, out, strict=True):
                slab.pull(ids, rows_UD)
                places_G.append(slab.resolve(ids)[0])
        return places_G

    def pull_bags(self, slab: int, lookup: Lookup, out_BFD: F32) -> None:
        """Pooled bags straight from the rows of a slab that is `direct`; changes nothing."""
        places = (
            lookup.firsts_F, lookup.lengths_F, lookup.ends_FB, lookup.scales_N, lookup.columns_F
        )  # fmt: skip
        with self._lock:
            self._must_serve()
            self.slabs[slab].pull_bags(
                lookup.over_samples, lookup.ids_N, lookup.layout.tables_F, places, out_BFD
            )

    def tiers(self) -> list[TieredSlab]:
        """The slabs whose rows live in files."""
        self._must_serve()
        return self.tier_slabs()

    def tier_status(self) -> list[TierStatus]:
        """How the files of its tiers are doing, one entry for each; none of a lost shard."""
        with self._lock:
            return [slab.status() for slab in self.tier_slabs()]

    def tier_slabs(self) -> list[TieredSlab]:
        """As `tiers`, also of a shard that does not serve."""
        return [slab for slab in self.slabs if isinstance(slab, TieredSlab)]

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
        self._need(wanted, push=True)
        with self._lock:
            self._must_serve()
            return [
                slab.check_push(ids, grads_UD, finite=finite)
                for slab, ids, grads_UD in zip(self.slabs, wanted, grads, strict=True)
            ]

    def apply(
        self, pushes: Sequence[Push], lr: Rates, push_number: PushNumber | None = None
    ) -> int:
        """Applies a push that was checked, with no other push in between; `lr` is of all slabs, or
        of each.

        With parity, returns the number of the message that its hosts are sent.
        """
        for slab in self.slabs:
            if slab.snapshot is not None:
                slab.snapshot.wait_for_room()
        with self._lock:
            self._must_serve()
            rates = [lr] * len(pushes) if isinstance(lr, float | int) else lr
            with self._recording_at_least(checked=True):
                for slab, push, rate in zip(self.slabs, pushes, rates, strict=True):
                    slab.push(push, rate)
            return self._record(push_number)

    def read(self, table: str, ids: I64) -> Planes:
        """All planes of the rows named, cut at one instant; untouched rows as they begin."""
        ids = np.ascontiguousarray(ids, np.int64)
        self._need_rows(table, ids)
        with self._lock:
            self._must_serve()
            slab, t = self._places[table]
            return slab.read(t, ids)

    def read_all(self, table: str) -> tuple[I64, Planes]:
        """The ids and all planes of every trained row of a table, cut at one instant."""
        self._need_rows(table)
        with self._lock:
            self._must_serve()
            slab, t = self._places[table]
            ids = slab.touched_ids(t)
            return ids, slab.read(t, ids)

    def digest(self, table: str) -> RowDigest:
        """Of all trained rows of a table, some of them at a time: of one instant if nobody pushes
        meanwhile."""
        self._need_rows(table)
        digest, at = RowDigest(), 0
        while at >= 0:
            with self._lock:
                self._must_serve()
                part, at = digest_chunk(*self._places[table], at)
            digest = digest.joined(part)
        return digest

    def install(self, table: str, ids: I64, planes: Mapping[str, Values]) -> None:
        """Writes whole rows; they become touched and dirty."""
        self._before_write()
        ids = np.ascontiguousarray(ids, np.int64)
        self._need_rows(table, ids)
        with self._lock:
            self._must_live()
            slab, t = self._places[table]
            rows = slab.newest_of(slab.one_table(t, ids), planes)
            with self._recording_at_least():
                slab.install(*rows)
            self._record()

    def install_scattered(
        self,
        tables: Sequence[str],
        offsets: Sequence[int],
        ids: I64,
        planes: Mapping[str, Values],
        *,
        busy: int = 0,
    ) -> None:
        """`install` of rows of several tables, those of `tables[i]` at offsets[i]:offsets[i + 1].

        Tables of one slab that are given in its order are written at once.
        """
        self._before_write()
        ids = np.ascontiguousarray(ids, np.int64)
        for table, start, stop in zip(tables, offsets, offsets[1:], strict=False):
            self._need_rows(table, ids[start:stop])
        with self._lock:
            self._must_live()
            places = [self._places[table] for table in tables]
            first = 0
            for last in range(1, len(places) + 1):
                if last < len(places) and _follows(places[last], places[last - 1]):
                    continue
                slab, some = places[first][0], slice(offsets[first], offsets[last])
                counts_T = np.zeros(len(slab.tables) + 1, np.int64)
                for (_, t), count in zip(
                    places[first:last], np.diff(offsets[first : last + 1]), strict=True
                ):
                    counts_T[t + 1] = count
                wanted = RowIds(ids[some], np.cumsum(counts_T))
                rows = slab.newest_of(wanted, {name: v[some] for name, v in planes.items()})
                with self._recording_at_least():
                    slab.install(*rows, busy=busy)
                first = last
            self._record()

    def check_upsert(self, table: str, ids: I64) -> Bools:
        """Everything that can refuse an upsert whose rows were checked, before any row changes;
        which of the ids have rows."""
        with self._lock:
            return upserts.check_room(*self._place(table), ids)

    def upsert(
        self, table: str, ids: I64, planes: Mapping[str, Array], edit: Edit = NO_EDIT
    ) -> None:
        """Writes rows from outside, which were checked; see `Cluster.upsert`."""
        self._before_write()
        slab, t = self._place(table)
        # Who is evicted depends on how old all rows are.
        self._need_rows(table, None if slab.has_plane(t, upserts.USED) else ids)
        if slab.snapshot is not None:
            slab.snapshot.wait_for_room()
        with self._lock:
            self._must_serve()
            self._note_edit(table, edit)
            with self._recording_at_least():
                upserts.write(*self._places[table], ids, planes)
            self._record()

    def _place(self, table: str) -> tuple[Slab, int]:
        with self._lock:
            self._must_serve()
            return self._places[table]

    def _note_edit(self, table: str, edit: Edit) -> None:
        """Counts an edit that is about to be made, unless it was before: its answer was lost, or
        another shard. With the lock held."""
        if edit.stamp and edit.call not in self._edit_calls:
            self._edit_calls.append(edit.call)
            slab, t = self._places[table]
            slab.edits_T[t] = edit.after(int(slab.edits_T[t]))

    def delete(self, table: str, ids: I64, edit: Edit = NO_EDIT) -> int:
        """Takes rows back to their initial state; returns how many had been trained."""
        self._before_write()
        ids = np.unique(np.asarray(ids, np.int64))
        self._need_rows(table, ids)
        with self._lock:
            self._must_live()
            slab, t = self._places[table]
            self._note_edit(table, edit)
            with self._recording_at_least():
                count = slab.delete(t, ids)
            self._record()
            return count

    def touched_ids(self, table: str) -> I64:
        """The ids of a table's rows that were trained and not deleted since, ascending."""
        with self._lock:
            slab, t = self._place(table)
            return slab.touched_ids(t)

    def table_state(self) -> dict[str, Any]:
        """Of each table: how many pushes it has taken part in, and which edits; of dynamic ones
        also the next tick and how many rows they hold."""
        with self._lock:
            self._must_serve()
            return {
                name: {
                    "steps": int(slab.steps_T[t]),
                    "tick": slab.slots[t].next_tick if t in slab.slots else 0,
                    **({"rows": slab.slots[t].count} if t in slab.slots else {}),
                    **({"edits": edits} if (edits := int(slab.edits_T[t])) else {}),
                }
                for name, (slab, t) in self._places.items()
            }

    def load_table_state(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Goes on from a state; returns how many rows the dynamic tables among them hold."""
        with self._lock:
            self._must_live()
            for name, table in state.items():
                slab, t = self._places[name]
                slab.steps_T[t] = table["steps"]
                slab.edits_T[t] = table.get("edits", 0)
                if t in slab.slots:
                    slab.slots[t].go_on_from(table["tick"])
            self._record()
            places = {name: self._places[name] for name in state}
            return {n: slab.slots[t].count for n, (slab, t) in places.items() if t in slab.slots}

    def track(self, priority: Priority | None = None) -> None:
        """Starts to follow changes; every row that was trained before counts as changed."""
        chosen = prioritised([table.slots for table in self.tables])
        large = [self.tables[t].name for t in chosen]
        with self._lock:
            self._must_live()
            for slab in self.slabs:
                slab.track(priority, large)

    def changed_ids(self) -> dict[str, I64]:
        """By table: the rows that changed, came or left since the last version."""
        with self._lock:
            self._must_live()
            return {name: changed_ids(slab, t) for name, (slab, t) in self._places.items()}

    def forget_rewound(self) -> None:
        """What had changed since the last version is again as it was."""
        with self._lock:
            self._must_live()
            for slab in self.slabs:
                forget_rewound(slab)

    def dirty_rows(self) -> int:
        """How many rows changed since the dirty bits were last taken."""
        with self._lock:
            return sum(slab.dirty_rows() for slab in self.slabs)

    def held(self) -> tuple[int, int]:
        """Rows that were trained, and the bytes of all their planes."""
        with self._lock:
            touched = [slab.touched for slab in self.slabs]
            counts = [int(batch_rows.count_bits(bits, 0, bits.size)) for bits in touched]
            sizes = [sum(p.itemsize * p.shape[1] for p in s.planes.values()) for s in self.slabs]
        return sum(counts), sum(n * size for n, size in zip(counts, sizes, strict=True))

    def steps(self) -> int:
        """The most pushes that any table has taken part in."""
        with self._lock:
            return max((int(steps) for slab in self.slabs for steps in slab.steps_T), default=0)

    @property
    def ranking_nbytes(self) -> int:
        """What it takes to know which rows matter most."""
        return sum(slab.ranking.nbytes for slab in self.slabs if slab.ranking is not None)

    def freeze(self, since: str | None, buffer: int | CopyRoom) -> Cut[FrozenRows]:
        """Freezes the rows of every slab, and the state of their tables: no push comes between.

        The `buffer` for copies, or its size, is one for all slabs.
        """
        room = buffer if isinstance(buffer, CopyRoom) else CopyRoom(buffer, self._clock)
        for table in self.tables:
            self._need_rows(table.name)
        with self._lock:
            self._must_serve()
            tables = self.table_state()
            if since == PRIORITISED:
                return Cut((slab.prioritised(room) for slab in self.slabs), tables)
            return Cut(freeze(self.slabs, since=since, room=room), tables)

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        """Nothing has changed since the version just loaded; see `Tracker.reset`."""
        with self._lock:
            self._must_live()
            for slab in self.slabs:
                slab.forget_changes(keep_since_baseline=keep_since_baseline)

    def clear(self) -> None:
        """Takes every row back to its initial state."""
        if self.member is not None:
            with self._lock:
                trained = {name: slab.touched_ids(t) for name, (slab, t) in self._places.items()}
            for name, ids in trained.items():
                for start in range(0, ids.size, _CLEAR_ROWS):
                    self.delete(name, ids[start : start + _CLEAR_ROWS])
        with self._lock:
            self._must_live()
            with self._recording_at_least():
                for slab in self.slabs:
                    slab.clear()
            self._record()

    def clear_with_parity(self) -> None:
        """`clear` for when all shards are, and their parity with them: no message is needed."""
        with self._lock:
            self._must_live()
            for slab in self.slabs:
                slab.clear()
            self._forget_recorded()
