"""A cluster whose shards are servers: pulls and pushes over Arrow Flight, all shards at once.

One process *coordinates* (see `remote_cluster`): it gives servers their epochs, keeps their leases
alive, cuts versions and brings lost shards back. Others may join as workers. In a synchronous job
of several ranks every shard joins the ranks' parts of a step and applies them once.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from functools import partial

import numpy as np

from emberkeep._types import F32, U8, RowIds
from emberkeep.cluster.base import Routed, surviving
from emberkeep.cluster.remote.launcher import Launcher
from emberkeep.cluster.remote.remote_cluster import RemoteCluster
from emberkeep.cluster.remote.remote_shard import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import EmberkeepError, PeerError, ServerError, ShardLostError
from emberkeep.kernels import batch_rows as row_kernels
from emberkeep.rows.push import not_finite, outside
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.tables import Optimizer, Table
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import (
    APPLY,
    CHECK,
    PREFETCH,
    PULL,
    PUSH,
    Request,
    pack_request,
    settled_of,
    take_rows,
    unpack_done,
)
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

# Numbers of pushes start over, above all earlier ones, when a push was given up.
_ROUND = 2**32


class _Ahead:
    """A prefetched pull, and what it needs to be completed by the push before it."""

    def __init__(self, wanted: Sequence[RowIds], routed: Routed, rows: Future[list[F32]]) -> None:
        self.wanted = wanted
        self.routed = routed
        self.rows = rows
        self.complete = False

    def answers(self, wanted: Sequence[RowIds]) -> bool:
        return len(wanted) == len(self.wanted) and all(
            a.ids is b.ids for a, b in zip(wanted, self.wanted, strict=True)
        )


class FlightCluster(RemoteCluster):
    """Tables spread over shard servers.

    Everything that `Cluster` promises, and: each push is applied once on every shard, also when
    answers are lost, servers are replaced by partial recovery, or the call is made again. Pushes to
    tables that cannot refuse (all fixed) take one round trip; if a shard is lost in it and the push
    is given up, other shards may have applied it.

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
        transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(
            tables, optimizer, launcher, seed=seed, pool=pool, security=security, timing=timing,
            coordinate=coordinate, transport=transport, clock=clock,
        )  # fmt: skip
        self.rank = rank
        self.world = world
        self._number = 0
        self._turn = threading.RLock()
        self._ahead: _Ahead | None = None
        self._dims = tuple(self.tables[group[0]].dim for group in self.groups)
        self._limits_G = [
            np.array([self.tables[t].rows or -1 for t in group], np.int64) for group in self.groups
        ]
        self._refusable = any(table.dynamic for table in self.tables) and len(self.handles) > 1
        self._reader = transport.executor(1, "emberkeep-prefetch")
        # Pushes that parity in the background may yet lose with a shard: number, parts, lr.
        self._unsettled: deque[tuple[int, Routed, Sequence[F32], float]] = deque()
        self._take_over(parity)

    def _let_go(self) -> None:
        end_all(super()._let_go, partial(self._reader.shutdown, wait=False))

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
            replies = self._exchange(self._requests(PULL, routed), self.timing.deadline)
            return self._rows(wanted, routed, replies)

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
                blobs = self._requests(PREFETCH, routed)
                for shard, blob in zip(self.handles, blobs, strict=True):
                    shard.send(blob, self.timing.deadline)
            except EmberkeepError:
                self._settle()
                return  # the pull itself will find out what is wrong
            rows = self._reader.submit(self._receive_ahead, wanted, routed)
            self._ahead = _Ahead(wanted, routed, rows)

    @property
    def reads_ahead(self) -> bool:
        return True

    def fetch(self, wanted: Sequence[RowIds], *, ahead: bool = False) -> None:
        if ahead:
            self.prefetch(wanted)

    def _receive_ahead(self, wanted: Sequence[RowIds], routed: Routed) -> list[F32]:
        replies = [shard.receive() for shard in self.handles]
        return self._rows(wanted, routed, replies)

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
        patience = 2 * self.timing.deadline.total_seconds()  # streams end by their deadline
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

    def _rows(self, wanted: Sequence[RowIds], routed: Routed, replies: Sequence[U8]) -> list[F32]:
        out: list[F32] = [
            np.empty((ids.ids.size, dim), np.float32)
            for ids, dim in zip(wanted, self._dims, strict=True)
        ]
        for s, blob in enumerate(replies):
            take_rows(blob, [parts[s][1] for parts in routed], self._dims, out)
        return out

    # -- pushes ----------------------------------------------------------------------------------

    def push(
        self, wanted: Sequence[RowIds], grads: Sequence[F32], *, lr: float, finite: bool = False
    ) -> None:
        """Updates each wanted row once, on all shards at once."""
        self._check(wanted, grads, finite=finite)
        with self._turn:
            try:
                self._push(wanted, grads, lr)
            except BaseException:
                # Refused or given up: what has that number must not be taken for the next push.
                self._start_round()
                raise
            self._number += 1

    @surviving
    def _push(self, wanted: Sequence[RowIds], grads: Sequence[F32], lr: float) -> None:
        self._before("push")
        # For each attempt: where all shards were lost together, numbers have started over.
        number = self._number + 1
        with self._push_lock:
            rows = self._await_ahead()
            self._serving()
            routed = self._routed(wanted)
            patience = self.timing.deadline
            if self.world > 1:
                patience += self.timing.joining
            kind = CHECK if self._refusable else PUSH
            blobs = self._requests(kind, routed, grads, number=number, lr=lr)
            replies = self._exchange(blobs, patience)
            if self._refusable:
                blobs = self._requests(APPLY, routed, number=number, lr=lr)
                replies = self._exchange(blobs, patience)
            if any(settled_of(blob)[1] for blob in replies):
                raise PeerError(f"push {number} is not settled: a host of its parity is silent")
            settled = min(settled_of(blob)[0] for blob in replies)
            if settled < number:
                kept = [rows_UD.copy() for rows_UD in grads]  # the caller may write to its own
                self._unsettled.append((number, routed, kept, lr))
            while self._unsettled and self._unsettled[0][0] <= settled:
                self._unsettled.popleft()
            self._complete(rows, replies)

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

    def _check(self, wanted: Sequence[RowIds], grads: Sequence[F32], *, finite: bool) -> None:
        """Refuses what one shard would refuse after others have applied it."""
        for g, ids in enumerate(wanted):
            limits_T = self._limits_G[g]
            scratch = np.empty(ids.ids.size, np.int64)
            bases_T = np.zeros(limits_T.size, np.int64)
            bad = row_kernels.fixed_rows(ids.ids, ids.offsets, limits_T, bases_T, 1, scratch)
            if bad >= 0:
                table = self.tables[self.groups[g][ids.table_of(bad)]]
                raise outside(table, int(ids.ids[bad]))
            if not finite:
                bad = row_kernels.first_nonfinite(0, grads[g].shape[0], grads[g])
                if bad >= 0:
                    table = self.tables[self.groups[g][ids.table_of(bad)]]
                    raise not_finite(table, int(ids.ids[bad]))

    def _start_round(self) -> None:
        self._number = (self._number // _ROUND + 1) * _ROUND
        self._incarnation = secrets.randbits(63)
        self._unsettled.clear()

    def _send_again(self, index: int) -> None:
        shard = self.handles[index]
        if not self._unsettled or shard.state != "serving":
            return
        status = shard.ask("status", {"incarnation": self._incarnation, "world": self.world})
        if not status["from_parity"]:
            return  # its rows came from a repository since
        for number, routed, grads, lr in self._unsettled:
            if number > status["applied"]:
                (blob,) = self._requests(PUSH, routed, grads, number=number, lr=lr, only=index)
                shard.send(blob, self.timing.deadline + self.timing.joining)
                shard.receive()

    # -- details ---------------------------------------------------------------------------------

    def _requests(
        self,
        kind: int,
        routed: Routed,
        grads: Sequence[F32] = (),
        *,
        number: int = 0,
        lr: float = 0.0,
        only: int | None = None,
    ) -> list[U8]:
        """One request for each shard, or for one of them."""
        blobs = []
        for s, shard in enumerate(self.handles):
            if only not in (None, s):
                continue
            request = Request(
                kind=kind,
                epoch=shard.epoch,
                incarnation=self._incarnation,
                number=number,
                rank=self.rank,
                world=self.world,
                lr=lr,
                wanted=[] if kind == APPLY else [parts[s][0] for parts in routed],
                grads=grads,
            )
            blobs.append(pack_request(request, [parts[s][1] for parts in routed]))
        return blobs

    def _exchange(self, blobs: Sequence[U8], deadline: timedelta) -> list[U8]:
        """Sends one request to each shard, then takes all replies.

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
            self._settle()
        if lost:
            raise ShardLostError(lost)
        if errors:
            raise errors[0]
        return [blob for blob in replies if blob is not None]

    def _settle(self) -> None:
        for shard in self.handles:
            shard.settle()
