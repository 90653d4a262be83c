"""A cluster whose shards are servers: pulls and pushes over Arrow Flight, all shards at once.

One process *coordinates* (see `remote_cluster`): it gives servers their epochs, keeps their leases
alive, cuts versions and brings lost shards back. Others may join as workers. In a synchronous job
of several ranks every shard joins the ranks' parts of a step and applies them once.
"""

from __future__ import annotations

import secrets
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from emberkeep._types import F32, I64, U8, Json, Rates, RowIds
from emberkeep.cluster.base import Routed
from emberkeep.cluster.outage import UnsettledError, surviving
from emberkeep.cluster.remote import row_requests
from emberkeep.cluster.remote.adoptable_rows import OnRestart
from emberkeep.cluster.remote.launcher import Launcher
from emberkeep.cluster.remote.remote_cluster import RemoteCluster
from emberkeep.cluster.remote.row_requests import check_push, check_rows, packed, pull_parts
from emberkeep.cluster.remote.sent_pushes import Ahead, SentPush, same_ids
from emberkeep.cluster.remote.timing import Timing
from emberkeep.cluster.shard_handle import ShardHandle
from emberkeep.cluster.table_states import Edit
from emberkeep.erasure.codes import Parity
from emberkeep.errors import (
    ConfigError,
    EmberkeepError,
    GradientError,
    IdError,
    PeerError,
    ProtocolError,
    RankError,
    ServerError,
    ShardLostError,
    StateError,
    TableFullError,
)
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock, Progress
from emberkeep.tables import Optimizer, Table
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import (
    APPLY,
    CHECK,
    FETCH,
    PREFETCH,
    PULL,
    PUSH,
    Request,
    settled_of,
    take_rows,
    unpack_done,
)
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

_T = TypeVar("_T")

# Numbers of pushes start over, above all earlier ones, when a push was given up.
_ROUND = 2**32
# Parity that is written in the background is behind by that much, or by what a window holds.
_SETTLING_SECONDS = 0.02
# What a server answers to a push that it will never take; anything else may pass.
_REFUSALS = (TableFullError, IdError, GradientError, ProtocolError, ConfigError, StateError)


class FlightCluster(RemoteCluster):
    """Tables spread over shard servers.

    Everything that `Cluster` promises, and: each push is applied once on every shard, also when
    answers are lost, servers are replaced by partial recovery, or the call is made again.

    A push that raises `ShardLostError` may have been applied by the shards that are not lost: do
    not make it again. It is finished on the others before rows are next read, changed or frozen,
    under its own number; a full recovery goes behind it. So it takes effect on every shard or on
    none.

    `rank` and `world` make this client one rank of a synchronous job; rank 0 coordinates. Without
    them pushes are applied as they come, and several clients (one coordinates, the others `join`)
    train asynchronously.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        launcher: Launcher,
        *,
        seed: int = 0,
        pool: pools.Pool,
        security: Security | None = None,
        timing: Timing | None = None,
        rank: int = 0,
        world: int = 1,
        coordinate: bool = True,
        parity: Parity | None = None,
        on_restart: OnRestart = "rewind",
        transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(
            tables, optimizer, launcher, seed=seed, pool=pool, security=security, timing=timing,
            coordinate=coordinate, on_restart=on_restart, transport=transport, clock=clock,
        )  # fmt: skip
        self.rank = rank
        self.world = world
        self._number, self._check_failed = 0, False
        self._turn = threading.RLock()
        self._ahead: Ahead | None = None
        self._trained: Sequence[RowIds] = ()
        self._applying: SentPush | None = None
        self._dims = tuple(self.tables[group[0]].dim for group in self.groups)
        self._tables_G = [[self.tables[t] for t in group] for group in self.groups]
        self._limits_G = [np.array([t.rows or -1 for t in own], np.int64) for own in self._tables_G]
        self._reader = transport.executor(1, "emberkeep-prefetch")
        # A rank that follows is answered sooner than the one that coordinates, at times. If a shard
        # is lost in between, the step is not over there: so such a rank keeps its last one. So does
        # a worker: who brings a shard back may not know of a push that this one alone has answered.
        self._follows = world > 1 and not coordinate
        # A push leaves when it is settled on every shard, was refused before any shard applied it,
        # or a full recovery goes behind it, and for no other reason.
        self._unsettled: deque[SentPush] = deque()
        self._take_over(parity)

    @property
    def _refusable(self) -> bool:
        """Whether one shard may refuse what others would apply, for want of room."""
        refuses = self.tiered or any(table.dynamic for table in self.tables)
        return refuses and len(self.handles) > 1

    def _let_go(self) -> None:
        end_all(self._settle_kept, super()._let_go, partial(self._reader.shutdown, wait=False))

    # -- pulls -----------------------------------------------------------------------------------

    @surviving
    def pull(self, wanted: Sequence[RowIds]) -> list[F32]:
        """The weights of the wanted rows, slab by slab: from all shards at once."""
        self._before("pull")
        with self._push_lock:
            ahead = self._take_ahead(wanted)
            if ahead is not None:
                return ahead
            self._serving()
            routed = self._routed(wanted)
            trained, self._trained = self._trained, ()
            kind = FETCH if same_ids(wanted, trained) else PULL
            out = self._no_rows(wanted)
            for part in pull_parts(routed, self._dims):
                replies = self._exchange(self._requests(kind, part), self._deadline(part))
                self._take(part, replies, out)
            return out

    def prefetch(self, wanted: Sequence[RowIds]) -> None:
        """Begins to pull rows that will be wanted after the next push.

        The `pull` of the same ids then returns them at once, with the values that they have after
        that push, also where other ranks of a synchronous job changed them. Asynchronous workers
        may see rows that are one push of another worker old.
        """
        with self._push_lock:
            self._drop_ahead()
            try:
                self._serving()
                routed = self._routed(wanted)
                if len(pull_parts(routed, self._dims)) > 1:
                    return  # a stream knows of one at a time
                blobs = self._requests(PREFETCH, routed)
                for shard, blob in zip(self.handles, blobs, strict=True):
                    shard.send(blob, self._deadline(routed))
                rows = self._reader.submit(self._receive_ahead, wanted, routed)
                self._ahead = Ahead(wanted, routed, rows)
            except BaseException as error:
                self._settle()  # its reply would be taken for that to the next request
                if not isinstance(error, EmberkeepError):
                    raise  # the pull itself will find out what else is wrong

    @property
    def reads_ahead(self) -> bool:
        return True

    def fetch(self, wanted: Sequence[RowIds], *, ahead: bool = False) -> None:
        if ahead:
            self.prefetch(wanted)
        elif self.tiered:
            self._trained = wanted  # the pull that comes next has its rows brought to memory

    def _receive_ahead(self, wanted: Sequence[RowIds], routed: Routed) -> list[F32]:
        replies = [shard.receive() for shard in self.handles]
        self._take(routed, replies, out := self._no_rows(wanted))
        return out

    def _take_ahead(self, wanted: Sequence[RowIds]) -> list[F32] | None:
        ahead = self._ahead
        if ahead is None:
            return None
        rows = self._await_ahead()
        self._ahead = None
        return rows if ahead.answers(wanted) else None

    def _await_ahead(self) -> list[F32] | None:
        """The prefetched rows once they have arrived; None if that failed, whatever the error: it
        was counted, and the rows will be pulled."""
        # Not kept meanwhile: a prefetch that failed must not be awaited again.
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        patience = 2 * self._deadline(ahead.routed).total_seconds()  # streams end by their deadline
        try:
            failed = ahead.rows.exception(patience) is not None
        except TimeoutError:
            failed = True
        except BaseException:
            self._settle()
            raise
        if failed:
            self._settle()
            return None
        self._ahead = ahead
        return ahead.rows.result()

    def _drop_ahead(self) -> None:
        self._await_ahead()
        self._ahead = None

    def _no_rows(self, wanted: Sequence[RowIds]) -> list[F32]:
        return [
            np.empty((ids.ids.size, dim), np.float32)
            for ids, dim in zip(wanted, self._dims, strict=True)
        ]

    def _take(self, routed: Routed, replies: Sequence[U8], out: Sequence[F32]) -> None:
        for s, blob in enumerate(replies):
            take_rows(blob, [parts[s][1] for parts in routed], self._dims, out)

    # -- pushes ----------------------------------------------------------------------------------

    def push(
        self, wanted: Sequence[RowIds], grads: Sequence[F32], *, lr: Rates, finite: bool = False
    ) -> None:
        """Updates each wanted row once, on all shards at once."""
        check_rows(self._tables_G, self._limits_G, wanted, grads, finite=finite)
        with self._turn:
            self._applying = None
            try:
                self._push(wanted, grads, lr)
            except BaseException as error:
                self._give_up_push(error)
                raise
            self._number += 1

    @surviving
    def _push(self, wanted: Sequence[RowIds], grads: Sequence[F32], lr: Rates) -> None:
        self._before("push")
        # For each attempt: where all shards were lost together, numbers have started over.
        number = self._number + 1
        with self._push_lock:
            rows = self._await_ahead()
            self._serving()
            routed = self._routed(wanted)
            check_push(routed, self._dims)
            kind = CHECK if self._refusable else PUSH
            blobs = self._requests(kind, routed, grads, number=number, lr=lr)
            if self._refusable:
                self._exchange_together(blobs, routed)
                blobs = self._requests(APPLY, routed, number=number, lr=lr)
            sent = SentPush(self._incarnation, number, routed, grads, lr, self._answered(number))
            self._applying = sent
            replies = self._exchange_together(blobs, routed, sent)
            if any(settled_of(blob)[1] for blob in replies):
                raise UnsettledError(
                    f"push {number} is not settled: a host of its parity is silent"
                )
            self._applying = None
            settled = min(settled_of(blob)[0] for blob in replies)
            sent.settled = settled >= number
            if not self.coordinates:
                settled = min(settled, number - 1)
            if settled < number:
                self._keep(sent)
            while (
                self._unsettled
                and not self._unsettled[0].missing
                and self._unsettled[0].number <= settled
            ):
                self._unsettled.popleft()
            self._complete(rows, replies)
            if self._protection is not None:
                self._protection.mend()

    def _settle_kept(self) -> None:
        """Where parity is behind, nobody but this worker can send its last pushes again: it stays
        until no loss can undo them. With the one that coordinates, all rows go."""
        if self.coordinates or self.world > 1 or all(sent.settled for sent in self._unsettled):
            return
        try:
            self._await_settled()
        except EmberkeepError as error:
            warnings.warn(
                f"the last {len(self._unsettled)} pushes of a worker that ends are lost if a "
                f"server is lost before its parity has them: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    @surviving
    def _await_settled(self) -> None:
        progress = Progress(self.patience, self._clock)
        while self._unsettled:
            self._serving()
            epochs = [shard.status().get("epoch", shard.epoch) for shard in self.handles]
            if all(now != shard.epoch for now, shard in zip(epochs, self.handles, strict=True)):
                return  # the run is over, or went back behind them
            sent = self._unsettled[0]
            asked = [self._status_of(shard.index, sent.incarnation) for shard in self.handles]
            settled = [status["settled"] for status in asked]
            if not sent.missing and min(settled) >= sent.number:
                self._unsettled.popleft()
                continue
            progress.require(settled, lambda: "parity to hold the last pushes of a worker")
            self._clock.sleep(_SETTLING_SECONDS)

    def _answered(self, number: int) -> dict[int, int]:
        """Who has answered the push under way in an earlier attempt."""
        before, push = self._applying, (self._incarnation, number)
        same = before is not None and (before.incarnation, before.number) == push
        return before.answered if before is not None and same else {}

    def _keep(self, sent: SentPush) -> None:
        sent.grads = [rows_UD.copy() for rows_UD in sent.grads]  # the caller may write to its own
        self._unsettled.append(sent)

    def _give_up_push(self, error: BaseException) -> None:
        """A push ends with an error: what shards may have applied of it is remembered."""
        sent, self._applying = self._applying, None
        self._ahead = None  # rows that were pulled ahead are without it
        if sent is not None and not self._refused(error):
            # Whatever the error names: each shard may have had a reason of its own.
            sent.missing = {
                shard.index
                for shard in self.handles
                if sent.answered.get(shard.index) != shard.epoch
            }
            self._keep(sent)
        elif self._refusable:
            self._withdraw(error)
        # What has that number must not be taken for the next push.
        self._start_round()

    def _refused(self, error: BaseException) -> bool:
        """Whether a push was applied nowhere, or nobody goes on from it."""
        if isinstance(error, RankError):
            return True  # all ranks start again, from a version
        unknown = isinstance(error, ShardLostError | PeerError)
        return len(self.handles) == 1 and isinstance(error, EmberkeepError) and not unknown

    def _withdraw(self, error: BaseException) -> None:
        """Has shards let go of a push that they have checked; they do with the next one, else. Of
        several ranks others may be about to apply it, unless a shard has refused it to all."""
        if self.world > 1 and not (self._check_failed and isinstance(error, _REFUSALS)):
            return
        about = {"incarnation": self._incarnation, "number": self._number + 1, "world": self.world}
        for shard in self.handles:
            with suppress(EmberkeepError):
                shard.ask("withdraw", about)

    def _exchange_together(
        self, blobs: Sequence[U8], routed: Routed, sent: SentPush | None = None
    ) -> list[U8]:
        """Sends a part of a push to each shard; as one rank of several, until all have sent theirs.

        A server does not let a rank wait for longer than half of a deadline at a time, so one that
        is silent does not pass for one that waits for others.
        """
        return self._until_all_ranks(lambda: self._exchange(blobs, self._deadline(routed), sent))

    def _until_all_ranks(self, send: Callable[[], _T]) -> _T:
        until = self._clock.monotonic() + self.patience.total_seconds()
        while True:
            try:
                return send()
            except RankError:
                if self._clock.monotonic() > until:
                    raise
                self.stop.look("other ranks to take their part in a step", others=True)

    def _complete(self, rows: list[F32] | None, replies: Sequence[U8]) -> None:
        """Brings what the push has changed of the prefetched rows into them."""
        ahead = self._ahead
        if ahead is None or rows is None:
            return
        changed_S = [unpack_done(blob, self._dims) for blob in replies]
        if ahead.complete or not all(changed_S):
            self._ahead = None  # pushed twice, or some server knows nothing of the prefetch
            return
        for s, changed in enumerate(changed_S):
            for rows_UD, parts, part in zip(rows, ahead.routed, changed, strict=True):
                rows_UD[parts[s][1][part.positions]] = part.rows_UD
        ahead.complete = True

    def _start_round(self) -> None:
        self._number = (self._number // _ROUND + 1) * _ROUND
        self._incarnation = secrets.randbits(63)

    def _forget_sent(self) -> None:
        self._unsettled.clear()
        self._applying = None
        self._start_round()

    def unfinished(self, shard: int) -> int:
        waiting = {handle.index for handle in self.handles if handle.state != "serving"}
        pushes = [sent for sent in list(self._unsettled) if sent.missing & waiting]
        pushes += [] if self._applying is None else [self._applying]
        applied = {
            incarnation: self._status_of(shard, incarnation)["applied"]
            for incarnation in sorted({sent.incarnation for sent in pushes})
        }
        return sum(sent.number <= applied[sent.incarnation] for sent in pushes)

    def saved_all(self, shard: int) -> bool:
        # Not by steps: where rows are frozen, some shards may have the push of another worker that
        # others do not, so shards with as many steps may be without different pushes.
        if self.world > 1:
            return True  # no rank is ahead of another then
        saved = self.handles[shard].wholly_saved
        kept = [sent for sent in list(self._unsettled) if shard in sent.missing]
        kept += [] if self._applying is None else [self._applying]
        again = {(f"{sent.incarnation:x}", sent.number) for sent in kept}
        for other in self.handles:
            if other.state != "serving":
                continue
            for worker, number in other.own_status({"pushes": True})["pushes"].items():
                while (worker, number) in again:
                    number -= 1
                if number % _ROUND and number > saved.get(worker, 0):
                    return False
        return True

    def _status_of(self, shard: int, incarnation: int) -> Json:
        """What the server of a shard says of itself, and of the pushes of an incarnation."""
        about = {"incarnation": incarnation, "world": self.world}
        return self.handles[shard].own_status(about)

    def _last_together(self) -> int:
        return self._number if self.world > 1 else 0

    def _serving(self) -> list[ShardHandle]:
        """All shards, each with every push that was sent to it."""
        shards = super()._serving()
        if any(sent.missing for sent in self._unsettled):
            with self._push_lock:
                for index in sorted({index for sent in self._unsettled for index in sent.missing}):
                    self._send_again(index)
        return shards

    def _send_again(self, index: int) -> None:
        """Has a shard that is back apply what it may be without: the pushes that it did not answer,
        and, where it goes on from parity, those that not every host held.

        Those that it had answered before its rows came from a repository are lost, also if parity
        has brought these rows back since. Of the steps of several ranks these are the ones that had
        ended on the rank that coordinates.
        """
        shard = self.handles[index]
        if shard.state != "serving":
            return
        status_of: dict[int, Json] = {}  # asked once for each incarnation, not for each push
        for sent in self._unsettled:
            if sent.incarnation not in status_of:
                status_of[sent.incarnation] = self._status_of(index, sent.incarnation)
            status = status_of[sent.incarnation]
            undone = sent.answered.get(index, 0) >= status["rows_since"]
            needed = index in sent.missing or undone
            if (needed or self._follows) and sent.number > status["applied"]:
                self._send_one(sent, index)
            if needed or self._follows:
                sent.answer(shard)
            sent.missing.discard(index)

    def _send_one(self, sent: SentPush, index: int) -> None:
        shard = self.handles[index]
        (blob,) = self._requests(
            PUSH, sent.routed, sent.grads, number=sent.number, lr=sent.lr, only=index,
            incarnation=sent.incarnation,
        )  # fmt: skip

        try:
            self._until_all_ranks(partial(shard.exchange, blob, self._deadline(sent.routed)))
        except ServerError:
            raise shard.lose() from None
        except (RankError, PeerError):  # worth asking again: it is not refused
            raise
        except _REFUSALS as error:
            warnings.warn(
                f"shard {index} refuses a push that others have applied: {error}; its rows are "
                "without that update",
                RuntimeWarning,
                stacklevel=2,
            )
        except EmberkeepError as error:  # no refusal: it may take it the next time
            raise PeerError(f"shard {index} has not taken a push again: {error}") from error

    # -- rows from outside -----------------------------------------------------------------------

    def upsert(self, table: str, ids: npt.ArrayLike, planes: Mapping[str, npt.ArrayLike]) -> None:
        """`Cluster.upsert`, between two pushes of this client. A request for it that arrives after
        the next push is refused by the server, so no update is overwritten by it."""
        with self._turn:
            super().upsert(table, ids, planes)

    def _upsert(
        self, shard: Any, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]], edit: Edit
    ) -> None:
        after = {"incarnation": self._incarnation, "number": self._number, "world": self.world}
        shard.upsert(table, ids, planes, edit, after)

    # -- details ---------------------------------------------------------------------------------

    def _requests(
        self,
        kind: int,
        routed: Routed,
        grads: Sequence[F32] = (),
        *,
        number: int = 0,
        lr: Rates = 0.0,
        only: int | None = None,
        incarnation: int | None = None,
    ) -> list[U8]:
        """One request for each shard, or for one of them."""
        request = Request(
            kind=kind, epoch=0, number=number, rank=self.rank, world=self.world, lr=lr, grads=grads,
            incarnation=self._incarnation if incarnation is None else incarnation,
        )  # fmt: skip
        return packed(request, routed, self.handles if only is None else [self.handles[only]])

    def _deadline(self, routed: Routed) -> timedelta:
        return self.timing.moving(row_requests.rows_nbytes(routed, self._dims))

    def _exchange(
        self, blobs: Sequence[U8], deadline: timedelta, sent: SentPush | None = None
    ) -> list[U8]:
        """Sends one request to each shard, then takes all replies; `sent` hears who has answered.

        A request whose reply was lost is sent again if its server is still there. Errors come out
        once all shards have answered: streams stay in step.
        """
        replies: list[U8 | None] = [None] * len(blobs)
        errors: list[EmberkeepError] = []
        failed: list[int] = []
        try:
            for s, (shard, blob) in enumerate(zip(self.handles, blobs, strict=True)):
                try:
                    shard.send(blob, deadline)
                except ServerError:
                    failed.append(s)
            for s, shard in enumerate(self.handles):
                if s not in failed:
                    try:
                        replies[s] = shard.receive()
                    except ServerError:
                        failed.append(s)
                    except EmberkeepError as error:
                        errors.append(error)
            lost = []
            for s in failed:
                try:
                    replies[s] = self.handles[s].again(blobs[s], deadline)
                except ShardLostError:
                    lost.append(s)
                except EmberkeepError as error:
                    errors.append(error)
        finally:
            for shard, reply in zip(self.handles, replies, strict=True):
                if sent is not None and reply is not None:
                    sent.answer(shard)
            self._settle()
        if lost:
            raise ShardLostError(lost)
        self._check_failed = sent is None and bool(errors)
        if errors:
            raise errors[0]
        return [blob for blob in replies if blob is not None]

    def _settle(self) -> None:
        for shard in self.handles:
            shard.settle()
