"""A cluster whose shards are servers: pulls and pushes over Arrow Flight, all shards at once.

One process *coordinates*: it gives servers their epochs, keeps their leases alive, cuts versions
and brings lost shards back. Others may join as workers. In a synchronous job of several ranks every
shard joins the ranks' parts of a step and applies them once.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from emberkeep import pool as pools
from emberkeep.cluster.client import Cluster, Part, surviving
from emberkeep.cluster.connection import Connection
from emberkeep.cluster.distant import DistantProtection
from emberkeep.cluster.hosts import Hosts
from emberkeep.cluster.protection import ParityStatus
from emberkeep.cluster.remote import RemoteShard, Timing, is_shared
from emberkeep.cluster.security import Security
from emberkeep.cluster.wire import (
    APPLY,
    CHECK,
    PREFETCH,
    PULL,
    PUSH,
    Bytes,
    Json,
    Request,
    describe_table,
    pack_request,
    settled_of,
    take_rows,
    unpack_done,
)
from emberkeep.erasure.codes import Parity
from emberkeep.errors import (
    ConfigError,
    EmberkeepError,
    ParityLossError,
    PeerError,
    ServerError,
    ShardLostError,
    StateError,
)
from emberkeep.kernels import rows as row_kernels
from emberkeep.priority import Priority
from emberkeep.repository import Manifest, Repository
from emberkeep.slab import F32, I64, RowIds, not_finite, outside, slab_rows
from emberkeep.snapshot import FrozenRows
from emberkeep.tables import Optimizer, Table

_T = TypeVar("_T")

Routed = list[list[tuple[RowIds, I64]]]
"""By slab and shard: the shard's ids, and where they stood."""

_POLL_SECONDS = 0.1
# Numbers of pushes start anew, above all earlier ones, when a push was given up.
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


class FlightCluster(Cluster):
    """Tables spread over shard servers.

    Everything that `Cluster` promises, and: each push is applied once on every shard, also when
    answers are lost, servers are replaced by partial recovery, or the call is made again. Pushes to
    tables that cannot refuse (all fixed) take one round trip; if a shard is lost in it and the push
    is given up, other shards may have applied it.

    `rank` and `world` make this client one rank of a synchronous job; rank 0 coordinates. Without
    them pushes are applied as they come, and several clients (one coordinates, the others `join`)
    train asynchronously.
    """

    shared = True
    handles: list[RemoteShard]  # type: ignore[assignment]

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        hosts: Hosts,
        *,
        seed: int = 0,
        pool: pools.Pool,
        security: Security | None = None,
        timing: Timing | None = None,
        rank: int = 0,
        world: int = 1,
        coordinate: bool = True,
        parity: Parity | None = None,
    ) -> None:
        self.hosts = hosts
        self.timing = timing or Timing()
        self.security = security or Security()
        self.rank = rank
        self.world = world
        self.coordinates = coordinate
        self._incarnation = secrets.randbits(63)
        self._number = 0
        self._turn = threading.RLock()
        self._ahead: _Ahead | None = None
        shards = [
            RemoteShard(i, hosts.address(i), self.security, self.timing, self._incarnation)
            for i in range(hosts.count)
        ]
        super().__init__(tables, optimizer, shards, seed=seed, pool=pool)
        self._dims = tuple(self.tables[group[0]].dim for group in self.groups)
        self._limits_G = [
            np.array([self.tables[t].rows or -1 for t in group], np.int64) for group in self.groups
        ]
        if self.tiered:
            raise ConfigError("tables on servers are kept in memory: leave out tier=, or cluster=")
        self._refusable = any(table.dynamic for table in self.tables) and len(shards) > 1
        self._threads = ThreadPoolExecutor(len(shards), "emberkeep-shard")
        self._reader = ThreadPoolExecutor(1, "emberkeep-prefetch")
        self._tracked = False
        self._priority: Priority | None = None
        self._protection: DistantProtection | None = None
        # Pushes that parity in the background may yet lose with a shard: number, parts, lr.
        self._unsettled: deque[tuple[int, Routed, Sequence[F32], float]] = deque()
        self._silent_since = 0.0
        self._coordinator = secrets.token_hex(8)
        self._heart: _Heart | None = None
        try:
            if coordinate:
                self._begin()
                if parity is not None:
                    self.protect(parity)
            else:
                self.on_loss = lambda _lost: self._rejoin()
                self._rejoin()
        except BaseException:
            for shard in self.handles:
                shard.disconnect()
            raise

    # -- beginning and ending --------------------------------------------------------------------

    def _begin(self) -> None:
        """Takes the servers over: a new epoch on each, all rows at their beginning."""
        until = time.monotonic() + 1.5 * self.timing.lease.total_seconds()
        while True:
            try:
                statuses = self._at_once([partial(self._reach, shard) for shard in self.handles])
                epoch = 1 + max(status["epoch"] for status in statuses)
                self._at_once(
                    [partial(shard.admit, epoch, self._about()) for shard in self.handles]
                )
                break
            except ServerError:
                # A coordinator that died holds the lease for a while; a server may be starting.
                if time.monotonic() > until:
                    raise
                time.sleep(_POLL_SECONDS)
        self._at_once([shard.serve for shard in self.handles])
        self._heart = _Heart(self._coordinator, self.handles, self.security, self.timing)
        self._finalizer = weakref.finalize(self, _let_go, self._heart, self.handles)

    def _reach(self, shard: RemoteShard) -> Json:
        try:
            return shard.connect(self.hosts.address(shard.index))
        except ServerError:
            return shard.connect(self.hosts.replace(shard.index, ""))

    def _about(self) -> Json:
        return {
            "coordinator": self._coordinator,
            "shards": len(self.handles),
            "tables": [describe_table(table) for table in self.tables],
            "optimizer": self.optimizer.describe(),
            "seed": self.seed,
            "tracked": self._tracked,
            "priority": None if self._priority is None else asdict(self._priority),
            "lease_seconds": self.timing.lease.total_seconds(),
            "patience_seconds": self.timing.joining.total_seconds(),
        }

    def _rejoin(self) -> bool:
        """A worker follows what the coordinator does: waits until every shard serves."""
        self._drop_ahead()
        patience = self.timing.joining.total_seconds()
        until = time.monotonic() + patience
        expected = [describe_table(table) for table in self.tables]
        while True:
            try:
                for shard in self.handles:
                    if shard.state != "serving":
                        shard.follow(shard.connect(self.hosts.address(shard.index)))
                        self._send_again(shard)
            except ServerError:
                pass
            if all(shard.state == "serving" for shard in self.handles):
                break
            if time.monotonic() > until:
                raise ServerError(
                    f"shards {', '.join(map(str, self.lost()))} do not serve after {patience:g} s: "
                    "is the coordinator alive?"
                )
            time.sleep(_POLL_SECONDS)
        for shard in self.handles:
            if shard.tables != expected:
                raise StateError(f"{shard.address} serves other tables than this model has")
        return True

    def close(self) -> None:
        """Ends the run: servers let go of their rows, and end if this cluster started them."""
        self._drop_ahead()
        if self._protection is not None:
            self._protection.close()
        if self.coordinates:
            self._finalizer()
        for shard in self.handles:
            shard.disconnect()
        self._threads.shutdown(wait=False)
        self._reader.shutdown(wait=False)
        self.hosts.close()

    def tell(self, **run: float) -> None:
        """Goes to the servers with the next renewal of their leases."""
        if self._heart is not None:
            self._heart.run.update(run)

    # -- shards ----------------------------------------------------------------------------------

    def renew(self, *shards: int) -> None:
        named = self._named(shards)
        if not self.coordinates:
            raise ConfigError("shards are renewed by the process that coordinates the cluster")
        self._drop_ahead()
        with self._push_lock:
            if self._protection is None:
                self._at_once([partial(self._renew, self.handles[i]) for i in named])
            else:
                self._protection.begin_anew(named, lambda i: self._renew(self.handles[i]))
            if len(named) == len(self.handles):
                self._start_round()  # full recovery: nothing of the old pushes is left

    def _renew(self, shard: RemoteShard) -> None:
        known, life = shard.epoch, shard.life
        assert self._heart is not None
        self._heart.rest(shard.index)
        address = None
        try:
            status = shard.connect()
            if status["draining"] or (status["life"] != life and status["epoch"]):
                raise ServerError(f"{shard.address} is not this run's any more")
        except ServerError:
            address = self.hosts.replace(shard.index, life)
        try:
            if address is not None:
                status = shard.connect(address)
            shard.admit(max(known, status["epoch"]) + 1, self._about())
        except ServerError:  # it died too
            shard.disconnect()
            shard.state = "lost"
            raise ShardLostError((shard.index,)) from None
        self._heart.beat_for(shard)

    def serve(self, *shards: int) -> None:
        for index in self._named(shards):
            self.handles[index].serve()
        if not self.lost():
            self._settle_writes()

    def _named(self, shards: Sequence[int]) -> list[int]:
        for shard in shards:
            if not 0 <= shard < len(self.handles):
                raise ConfigError(
                    f"there is no shard {shard}: there are 0..{len(self.handles) - 1}"
                )
        return sorted(set(shards))

    def track(self, priority: Priority | None = None) -> None:
        super().track(priority)
        self._tracked = True
        self._priority = priority or self._priority

    def part(self, shard: int) -> Part:
        return _ServerPart(self, shard)

    def load_version(
        self, repository: Repository, chain: Sequence[Manifest], pool: pools.Pool,
        names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Every server reads its own rows of a version, all at once; the coordinator sees to it."""
        if not self.coordinates:
            return
        told = dict(names or {table.name: table.name for table in self.tables})
        self._drop_ahead()
        self._present()
        self._at_once(
            [partial(shard.load_version, repository, chain, told) for shard in self.handles]
        )
        self._settle_writes()

    def reaches(self, url: str) -> bool:
        """Whether the servers can open that store themselves."""
        return is_shared(url)

    def _each(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        return self._at_once(calls)

    def _at_once(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Makes all calls, each in a thread; raises the first error once all have ended, and names
        all shards that were lost."""
        if len(calls) == 1:
            return [calls[0]()]
        futures = [self._threads.submit(call) for call in calls]
        errors = [error for error in (future.exception() for future in futures) if error]
        lost = sorted({i for e in errors if isinstance(e, ShardLostError) for i in e.shards})
        for error in errors:
            if not isinstance(error, ShardLostError):
                raise error
        if lost:
            raise ShardLostError(lost)
        return [future.result() for future in futures]

    # -- parity ----------------------------------------------------------------------------------

    def protect(self, parity: Parity) -> None:
        """Has servers keep parity of each other's rows: what was trained before is protected
        before long. Workers other than the coordinator need not ask for it."""
        parity.check_shards(len(self.handles))
        if not self.coordinates:
            return
        with self._push_lock:
            if self._protection is not None:
                self._protection.spec.check_same(parity)
                return
            self._serving()
            n = len(self.handles)
            rows = [
                max(slab_rows([self.tables[t] for t in group], i, n) for i in range(n))
                for group in self.groups
            ]
            self._protection = DistantProtection(
                parity, self.handles, security=self.security, timing=self.timing,
                stripes=[-(-count // parity.k) for count in rows], each=self._at_once,
            )  # fmt: skip

    @property
    def parity(self) -> ParityStatus | None:
        """How well rows are protected; None without parity."""
        return None if self._protection is None else self._protection.status()

    @surviving
    def rebuild(self) -> None:
        """Waits until all that was lost is back: rows and parity."""
        if self._protection is not None:
            self._protection.flush()
            self._protection.wait(lambda status: status.protected or bool(self.lost()))
            self._serving()

    def _bring_back(self, lost: ShardLostError) -> bool:
        if self._protection is not None and self._from_parity():
            return True
        return super()._bring_back(lost)

    def _from_parity(self) -> bool:
        """Brings lost shards back from the others; False if they were too many."""
        protection = self._protection
        assert protection is not None
        with self._push_lock:
            self._drop_ahead()
            while lost := self.lost():
                try:
                    protection.recover(lost, lambda i: self._renew(self.handles[i]))
                    self._forgot = self._tracked
                    for index in lost:
                        self.handles[index].serve()
                        self._send_again(self.handles[index])
                except ParityLossError as error:
                    # Rows that were on their way back went with the shards that had their parity.
                    for index in protection.hopeless(lost):
                        self.handles[index].state = "lost"
                    warnings.warn(str(error), stacklevel=2)
                    return False
                except (ShardLostError, PeerError) as error:
                    # One more was lost: all that are not whole are begun anew.
                    gone = error.shards if isinstance(error, ShardLostError) else ()
                    for index in (*lost, *gone):
                        self.handles[index].state = "lost"
                    for shard in self.handles:
                        if shard.state != "lost":
                            shard.alive()
            return True

    def _await_peers(self, error: PeerError) -> None:
        dead = [shard.index for shard in self.handles if not shard.alive()]
        if dead:
            if not self._bring_back(ShardLostError(dead)):
                raise ShardLostError(dead) from error
            return
        now = time.monotonic()
        if now - self._silent_since > 2 * self.timing.deadline.total_seconds():
            self._silent_since = now
        elif now - self._silent_since > self.timing.deadline.total_seconds():
            raise error
        time.sleep(_POLL_SECONDS / 5)

    def _send_again(self, shard: RemoteShard) -> None:
        """Has a replacement apply what the shard before had not told everybody."""
        if not self._unsettled or shard.state != "serving":
            return
        status = shard.ask("status", {"incarnation": self._incarnation, "world": self.world})
        if not status["from_parity"]:
            return  # its rows came from a repository since
        for number, routed, grads, lr in self._unsettled:
            if number > status["applied"]:
                (blob,) = self._requests(
                    PUSH, routed, grads, number=number, lr=lr, only=shard.index
                )
                shard.send(blob, self.timing.deadline + self.timing.joining)
                shard.receive()

    def _settle_writes(self) -> None:
        """Parity holds what was written. Rows of shards that are recovered are settled when they
        serve."""
        recovered = any(shard.state == "recovering" for shard in self.handles)
        if self._protection is not None and not recovered:
            self._flush()

    @surviving
    def _flush(self) -> None:
        assert self._protection is not None
        self._serving()
        self._protection.flush()

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        super().install(table, ids, planes)
        self._settle_writes()

    def delete(self, table: str, ids: I64) -> int:
        count = super().delete(table, ids)
        self._settle_writes()
        return count

    def load_table_state(self, state: Json) -> None:
        super().load_table_state(state)
        self._settle_writes()

    def clear(self) -> None:
        super().clear()
        self._settle_writes()

    @surviving
    def freeze(self, since: str | None, buffer_nbytes: int) -> list[Sequence[FrozenRows]]:
        if self._protection is not None:
            self._protection.wait(lambda status: not status.missing_rows or bool(self.lost()))
        return super().freeze(since, buffer_nbytes)

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

        The `pull` of the same ids then finds them here: with the values that they have after that
        push, also where it was other ranks of a synchronous job who changed them. Asynchronous
        workers may see rows that are one push of another worker old.
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
        """The prefetched rows once they are here; None if that failed."""
        ahead = self._ahead
        if ahead is None:
            return None
        try:
            return ahead.rows.result()
        except EmberkeepError:
            self._ahead = None
            self._settle()
            return None

    def _drop_ahead(self) -> None:
        self._await_ahead()
        self._ahead = None

    def _rows(
        self, wanted: Sequence[RowIds], routed: Routed, replies: Sequence[Bytes]
    ) -> list[F32]:
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
        # Of each attempt anew: where all shards were lost together, numbers have started anew.
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

    def _complete(self, rows: list[F32] | None, replies: Sequence[Bytes]) -> None:
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
        """Refuses here what one shard would refuse after others have applied it."""
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

    # -- details ---------------------------------------------------------------------------------

    def _routed(self, wanted: Sequence[RowIds]) -> Routed:
        if len(self.handles) == 1:
            return [[(ids, np.arange(ids.ids.size))] for ids in wanted]
        return [self._route(g, ids) for g, ids in enumerate(wanted)]

    def _requests(
        self,
        kind: int,
        routed: Routed,
        grads: Sequence[F32] = (),
        *,
        number: int = 0,
        lr: float = 0.0,
        only: int | None = None,
    ) -> list[Bytes]:
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

    def _exchange(self, blobs: Sequence[Bytes], deadline: timedelta) -> list[Bytes]:
        """Sends one request to each shard, then takes all replies.

        A request whose reply was lost is sent again if its server is still there. Errors come out
        once all shards have answered: streams stay in step.
        """
        replies: list[Bytes | None] = [None] * len(blobs)
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


class _ServerPart(Part):
    """One server as the target of a load: it reads its own rows."""

    def reaches(self, url: str) -> bool:
        return is_shared(url)

    def load_version(
        self, repository: Repository, chain: Sequence[Manifest], pool: pools.Pool,
        names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        told = names or {table.name: table.name for table in self._cluster.tables}
        self._handle.load_version(repository, chain, told)  # type: ignore[attr-defined]


class _Heart:
    """Keeps the leases of all servers alive, one thread for each; knows nothing of the cluster, so
    that it can end."""

    def __init__(
        self, coordinator: str, shards: Sequence[RemoteShard], security: Security, timing: Timing
    ) -> None:
        self.run: dict[str, float] = {}
        self._coordinator = coordinator
        self._security = security
        self._pause = timing.lease.total_seconds() / 4
        self._deadline = max(timedelta(seconds=self._pause), timedelta(seconds=1))
        self._stopped = threading.Event()
        self._epochs: dict[int, tuple[str, int]] = {}
        for shard in shards:
            self.beat_for(shard)
            threading.Thread(
                target=self._beat, args=(shard.index,), name="emberkeep-lease", daemon=True
            ).start()

    def beat_for(self, shard: RemoteShard) -> None:
        """Keeps this server's lease from now on."""
        self._epochs[shard.index] = (shard.address, shard.epoch)

    def rest(self, index: int) -> None:
        self._epochs.pop(index, None)

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self, index: int) -> None:
        connection: Connection | None = None
        # What the server's clock said in its last answer: the lease runs from there, so that a
        # renewal which is read late renews nothing.
        known, clock = ("", 0), 0.0
        while not self._stopped.wait(self._pause):
            address, epoch = self._epochs.get(index, ("", 0))
            if not address:
                continue
            if known != (address, epoch):
                known, clock = (address, epoch), 0.0
            try:
                if connection is None or connection.address != address:
                    connection = Connection(address, self._security)
                header = {
                    "epoch": epoch,
                    "coordinator": self._coordinator,
                    "clock": clock,
                    "run": self.run,
                }
                answer, _ = connection.act("renew", header, deadline=self._deadline)
                clock = float(answer["clock"])
            except EmberkeepError:
                # Whoever pulls or pushes next finds out, and has the shard replaced.
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()


def _let_go(heart: _Heart, shards: Sequence[RemoteShard]) -> None:
    """Ends a run on the servers that can be reached: the next coordinator need not wait."""
    heart.stop()
    for shard in shards:
        shard.release(heart._coordinator)
