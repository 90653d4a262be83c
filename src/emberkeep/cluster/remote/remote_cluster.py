"""Servers under one coordinator: their epochs, leases and parity, and how lost ones return.

Pulls and pushes are the business of `flight_cluster`.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TypeVar

from emberkeep._types import Json
from emberkeep.blobs import is_shared
from emberkeep.cluster.outage import surviving
from emberkeep.cluster.protected_cluster import ProtectedCluster
from emberkeep.cluster.remote.adoptable_rows import OnRestart, adoptable, rows_in_files
from emberkeep.cluster.remote.launcher import Launcher
from emberkeep.cluster.remote.leases import Leases, let_go
from emberkeep.cluster.remote.remote_parity import (
    RemoteParity,
    not_from_parity,
    stuck_shards,
)
from emberkeep.cluster.remote.remote_shard import RemoteShard, nobody_there, places
from emberkeep.cluster.remote.timing import Timing
from emberkeep.cluster.spread import refuse_parity
from emberkeep.erasure.codes import Parity
from emberkeep.errors import (
    ConfigError,
    PeerError,
    ServerError,
    ShardLostError,
    StateError,
)
from emberkeep.repository import Manifest, Repository
from emberkeep.repository.grid.shard_extraction import RoundOrder, ShardRound
from emberkeep.rows.slab import slab_rows
from emberkeep.rows.snapshot import Cut, FrozenRows
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.waiting import Waiting
from emberkeep.tables import Optimizer, Table
from emberkeep.tiers.tier_use import TierStatus
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import PROTOCOL, describe_table
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

_T = TypeVar("_T")

_POLL_SECONDS = 0.1
# How often it is said again that a server is waited for.
_REMINDER_SECONDS = 5.0
# So often in a row a shard may be lost while parity brings shards back. What dies that often is
# killed by its own recovery, by its need of memory say, and the repository is asked instead.
_MOST_LOSSES = 8
# Between these attempts, twice as long each time.
_LONGEST_PAUSE_SECONDS = 2.0
_Pushes = Mapping[int, Mapping[str, int]]


class RemoteCluster(ProtectedCluster[RemoteShard, RemoteParity]):
    """Shards on servers. The process that coordinates takes them over (`_take_over`), renews lost
    ones and keeps their parity; others follow.

    A subclass, which carries rows, says what becomes of requests under way: `_drop_ahead` and
    `_forget_sent`.
    """

    shared = True

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        launcher: Launcher,
        *,
        seed: int,
        pool: pools.Pool,
        security: Security | None,
        timing: Timing | None,
        coordinate: bool,
        on_restart: OnRestart = "rewind",
        transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.launcher = launcher
        self._on_restart = on_restart
        self.adopted: str | None = None
        """Where live servers have kept their rows, for as long as all of them have: the id of the
        repository of their run."""
        self.timing = timing or Timing()
        self.security = security or Security()
        self.coordinates = coordinate
        self._over: Json = {"transport": transport, "clock": clock}
        self._incarnation = secrets.randbits(63)
        shards = [
            RemoteShard(
                i, launcher.address(i), self.security, self.timing, self._incarnation, **self._over
            )
            for i in range(launcher.count)
        ]
        super().__init__(tables, optimizer, shards, seed=seed, pool=pool, clock=clock)
        launcher.stop = self.stop
        for shard in shards:
            shard.stop = self.stop
        given = [table.name for table in tables if table.tier is not None]
        if given:
            raise ConfigError(
                f"table {given[0]!r} has a tier of its own, and on servers the tier is the "
                "servers': leave out tier= of the tables, and give cluster=ek.servers(tier=...), "
                "ek.ray_cluster(tier=...), or start servers with emberkeep serve --tier"
            )
        self._tiered = False
        self.keeps_batches = False
        """Whether servers come back at the batch that is durable in their files; else empty."""
        self._threads = transport.executor(len(shards), "emberkeep-shard")
        self._returning = threading.RLock()
        # Shards that were lost when it was decided to renew them.
        self._missed: set[int] = set()
        self._coordinator = secrets.token_hex(8)
        self._term = 0
        self._leases: Leases | None = None
        self._finalizer: Callable[[], object] | None = None

    def _drop_ahead(self) -> None:
        """Forgets rows that were pulled ahead."""
        raise NotImplementedError

    def _forget_sent(self) -> None:
        """Nothing of the pushes so far is left, or will be made again."""
        raise NotImplementedError

    def _last_together(self) -> int:
        """The last step of several ranks that has ended here; 0 for one that trains alone."""
        raise NotImplementedError

    # -- beginning and ending --------------------------------------------------------------------

    def _take_over(self, parity: Parity | None) -> None:
        """Begins the run on the servers, or joins the one that its coordinator has started."""
        try:
            if self.coordinates:
                self._begin()
                if parity is not None:
                    self.protect(parity)
            else:
                self.on_loss = lambda _lost: self._rejoin()
                self._rejoin()
        except BaseException:
            with suppress(BaseException):
                self._let_go()
            raise

    def _begin(self) -> None:
        """Takes the servers over: a new epoch on each, all rows at their beginning."""
        until = self._clock.monotonic() + 1.5 * self.timing.lease.total_seconds()
        waiting = Waiting(self._clock)
        while True:
            try:
                statuses = self._each([partial(self._reach, shard) for shard in self.handles])
                epoch = 1 + max(status["last_epoch"] for status in statuses)
                self._term = 1 + max(status["term"] for status in statuses)
                about = {**self._about(), "begins": True}
                if self._on_restart == "adopt":
                    self.adopted = adoptable(statuses, about)
                    about["adopt"] = self.adopted is not None
                self._check_tiers()
                self._each([partial(shard.admit, epoch, about) for shard in self.handles])
                # First: one that has opened its files holds its lease while others are at it.
                self._leases = Leases(
                    self._coordinator, self.handles, self.security, self.timing, say=self._say,
                    **self._over,
                )  # fmt: skip
                stay = self._on_restart == "adopt"
                self._finalizer = weakref.finalize(self, let_go, self._leases, self.handles, stay)
                self._each([shard.await_open for shard in self.handles])
                break
            except ServerError as error:
                # A coordinator that died holds the lease for a while; a server may be starting.
                if self._finalizer is not None:
                    self._finalizer()
                left = until - self._clock.monotonic()
                if left < 0:
                    raise
                waiting.say(f"waiting for servers, {left:.0f} s more at most: {error}")
                self._clock.sleep(_POLL_SECONDS)
        self._each([shard.serve for shard in self.handles])
        if self._tiered and self.adopted is None:
            self.found_rows = rows_in_files(self.handles, self.ask_tiers({"ask": "points"}))

    def _check_tiers(self) -> None:
        """Rows of all servers live in files, or those of none."""
        without = [shard for shard in self.handles if shard.tier is None]
        self._tiered = not without
        if without and len(without) < len(self.handles):
            raise ConfigError(
                f"{places(without)}: has no tier, and others have: start all of them with "
                "emberkeep serve --tier, or none"
            )

    @property
    def tiered(self) -> bool:
        return self._tiered

    @surviving
    def ask_tiers(self, header: Json) -> list[Json]:
        """Asks all servers between two pushes."""
        with self._push_lock:
            self._serving()
            return self._each([partial(shard.ask, "tier", header) for shard in self.handles])

    def tier_status(self) -> list[TierStatus]:
        """How the files of the servers' tiers are doing, one entry for each; of those that
        answer."""
        handles = self.handles if self._tiered else ()
        return [TierStatus(**file) for shard in handles for file in shard.tier_files()]

    def _reach(self, shard: RemoteShard) -> Json:
        try:
            return shard.connect(self.launcher.address(shard.index))
        except ServerError:
            return shard.connect(self.launcher.replace(shard.index, ""))

    def _about(self) -> Json:
        return {
            "protocol": PROTOCOL,
            "coordinator": self._coordinator,
            "trainer": f"{socket.gethostname()}/{os.getpid()}",
            "term": self._term,
            "shards": len(self.handles),
            "tables": [describe_table(table) for table in self.tables],
            "optimizer": self.optimizer.describe(),
            "seed": self.seed,
            "tracked": self._tracked,
            "priority": None if self._priority is None else asdict(self._priority),
            "lease_seconds": self.timing.lease.total_seconds(),
            "meeting_seconds": min(self.timing.deadline / 2, self.timing.patience).total_seconds(),
        }

    def _rejoin(self) -> bool:
        """A worker follows what the coordinator does: waits until every shard serves."""
        self._drop_ahead()
        patience = self.patience.total_seconds()
        until = self._clock.monotonic() + patience
        expected = [describe_table(table) for table in self.tables]
        while True:
            cause: Exception | None = None
            try:
                for shard in self.handles:
                    if shard.state != "serving":
                        shard.follow(shard.connect(self.launcher.address(shard.index)))
                        self._catch_up(shard)
            except (ServerError, ShardLostError, PeerError) as error:
                cause = error
            if all(shard.state == "serving" for shard in self.handles):
                break
            if self._clock.monotonic() > until:
                raise ServerError(
                    f"shards {', '.join(map(str, self.lost()))} do not serve after {patience:g} s "
                    f"({cause}): the coordinator brings them back with its next call: see that it "
                    "trains"
                ) from cause
            self.stop.pause(_POLL_SECONDS, "the coordinator to bring lost shards back")
        for shard in self.handles:
            if shard.tables != expected:
                raise StateError(f"{shard.address} serves other tables than this model has")
        self._check_tiers()
        return True

    def _catch_up(self, shard: RemoteShard) -> None:
        """Sends a shard what it may be without. Until it has all, it does not count as back."""
        try:
            self._send_again(shard.index)
        except BaseException:  # it may serve and wait for peers
            shard.lose()
            raise

    def close(self) -> None:
        """Ends the run: servers let go of their rows, unless the next trainer may adopt them, and
        end if this cluster started them."""
        end_all(self._let_go, self.launcher.close)

    def _let_go(self) -> None:
        """Ends leases, connections and threads, all of them whatever one of them meets."""
        end_all(
            self._drop_ahead,
            *([] if self._protection is None else [self._protection.close]),
            *([] if self._finalizer is None else [self._finalizer]),
            *(shard.disconnect for shard in self.handles),
            partial(self._threads.shutdown, wait=False),
        )

    def tell(self, **run: float | str) -> None:
        """Goes to the servers with the next renewal of their leases."""
        if self._leases is not None:
            self._leases.tell(run, now="repository" in run)

    # -- shards ----------------------------------------------------------------------------------

    def renew(self, *shards: int) -> None:
        if not self.coordinates:
            raise ConfigError("shards are renewed by the process that coordinates the cluster")
        self.adopted = None
        self._drop_ahead()
        # All or none: of a model that goes back, no server may return with what it had.
        self._give_up(self._named(shards))
        try:
            super().renew(*shards)
        except ShardLostError as error:
            # Another connection may have found it: the next attempt must know of it.
            for index in error.shards:
                if self.handles[index].state != "lost":
                    self.handles[index].alive()
            raise

    def _forget_pushes(self, shards: Collection[int]) -> None:
        if len(shards) == len(self.handles):
            self._forget_sent()  # full recovery goes behind all of them

    def _renew(self, index: int) -> None:
        shard = self.handles[index]
        known, life = shard.epoch, shard.life
        assert self._leases is not None
        self._leases.rest(shard.index)
        address = None
        try:
            status = shard.connect()
            if status["draining"] or (status["life"] != life and status["epoch"]):
                raise ServerError(f"{shard.address} is not this run's any more")
        except ServerError:
            status = None
        if status is None and not self.launcher.replaceable:
            address = self.launcher.replace(shard.index, life)  # nobody else can come
        try:
            if status is None:
                status = shard.connect(address or self.launcher.replace(shard.index, life))
            shard.admit(max(known, status["last_epoch"]) + 1, self._about())
            if self._tiered:
                self._check_tiers()
                shard.await_open()
                if not self.keeps_batches:
                    shard.clear()  # what a batch of another run may have left there
        except ServerError as error:  # it died too, maybe while it was starting
            raise shard.lose() from error
        if index in self._missed or shard.life != life:
            self.losses.append(index)
        self._missed.discard(index)
        self._leases.keep(shard)

    def serve(self, *shards: int, exact: bool = False, pushes: _Pushes | None = None) -> None:
        """`pushes` says of some of them what their rows hold; of others it is what the newest
        version does. Where that is `exact`, workers send what else they were answered again.
        With parity, `ShardLostError` for those that are lost before it holds what they were given,
        and for all where others are lost: they could come back from it without that."""
        for index in (named := self._named(shards)):
            shard = self.handles[index]
            shard.began_with = dict((pushes or {}).get(index, shard.saved_pushes))
            shard.rows_since = shard.rows_since if exact else shard.epoch
            # What this rank counts as lost is not made again by another, what it does not is.
            shard.serve(self._last_together())
        epochs, again = [shard.epoch for shard in self.handles], named
        if not (others := self.lost()):
            self._settle_writes()
            again = [i for i in named if self.handles[i].epoch != epochs[i]]
        if again and self._protection is not None:
            self._give_up(again)
            raise ShardLostError(sorted({*again, *others}))

    def clear(self) -> None:
        self.adopted = None
        super().clear()

    def load_version(
        self, repository: Repository, chain: Sequence[Manifest], names: Mapping[str, str]
    ) -> None:
        """Every server reads its own rows of a version, all at once; the coordinator sees to it."""
        if not self.coordinates:
            return
        self.adopted = self.found_rows = None
        self._drop_ahead()
        self._present()
        loads = [partial(shard.load_version, repository, chain, names) for shard in self.handles]
        self._until_settled(partial(self._each, loads))

    def extract(
        self, url: str, order: RoundOrder, *, most_mb_per_second: float | None
    ) -> ShardRound:
        """Has the server of a shard prepare a round of extraction in its part of a grid."""
        return self.handles[order.shard].extract(url, order, most_mb_per_second=most_mb_per_second)

    def reaches(self, url: str) -> bool:
        """Whether the servers can open that store themselves."""
        return is_shared(url)

    def check_repository(self, url: str, repository: str | None) -> None:
        """Raises `ConfigError` unless every server finds the repository of that id there."""
        self._each([partial(shard.check_repository, url, repository) for shard in self.handles])

    def _each(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
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
        """Has servers keep parity of each other's rows: rows that were trained before are
        protected soon after. Workers other than the coordinator need not ask for it."""
        if self._tiered:
            raise refuse_parity()
        if self.coordinates:
            super().protect(parity)
        else:
            parity.check_shards(len(self.handles))

    def _new_protection(self, parity: Parity) -> RemoteParity:
        assert self._leases is not None
        n = len(self.handles)
        rows = [
            max(slab_rows([self.tables[t] for t in group], i, n) for i in range(n))
            for group in self.groups
        ]
        return RemoteParity(
            parity, self.handles, security=self.security, timing=self.timing,
            stripes=[-(-count // parity.k) for count in rows], each=self._each,
            left_out=self._leases.left_out, give_up=self._give_up, stop=self.stop, **self._over,
        )  # fmt: skip

    @surviving
    def rebuild(self) -> None:
        super().rebuild()
        if self._protection is not None:
            self._serving()

    def _from_parity(self) -> bool:
        protection = self._protection
        if protection is None:
            return False
        with self._push_lock:
            self._drop_ahead()
            losses, pause = 0, _POLL_SECONDS
            while lost := self.lost():
                # From here on streams are sealed: none of them can be taken back any more.
                self._give_up(lost)
                try:
                    if not self._recovered(protection, lost):
                        return False
                except ServerError:  # nobody can take its place, or somebody else coordinates
                    raise
                except Exception as error:
                    # The recovery of all that are not whole starts over. Who did not answer is
                    # not given up for that: no stream of it is sealed, and it may have its rows.
                    self._give_up(lost)
                    for shard in self.handles:
                        if shard.state != "lost":
                            shard.alive()
                    losses += 1
                    if losses == _MOST_LOSSES or not isinstance(error, ShardLostError | PeerError):
                        warnings.warn(not_from_parity(lost, error, losses), stacklevel=2)
                        return False
                    # Else all attempts would be over before a disk has room again, or a server
                    # asks another again that it could not reach.
                    self.stop.pause(pause, f"{places([self.handles[i] for i in lost])} to start")
                    pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause)
                    self._taken_back(error)
            return True

    @property
    def patience(self) -> timedelta:
        return self.timing.patience

    def _second_opinion(self, lost: ShardLostError) -> ShardLostError | PeerError:
        # Another connection may have found a server gone that this process counts as serving: to
        # go on as if nothing were lost would fail again at once.
        answering = [
            index
            for index in lost.shards
            if self.handles[index].state == "serving" and self.handles[index].alive()
        ]
        if lost.shards and len(answering) == len(lost.shards):
            return PeerError(f"shards {answering} answer, but not every connection")
        return lost

    def _bring_back(self, lost: ShardLostError) -> bool:
        return self._taken_back(lost) or super()._bring_back(lost)

    def await_silent(self) -> None:
        if newly_lost := [shard.index for shard in self.handles if shard.newly_lost]:
            self._taken_back(ShardLostError(newly_lost))

    def _taken_back(self, lost: ShardLostError | PeerError) -> bool:
        """Whether all lost shards are back with the rows that they had: their servers had been cut
        off or stopped, or had not heard of this process.

        A server that is not known to have ended is waited for: for its lease, where another can
        take its place (which may not serve before the lease has passed anyway), else as long as
        this cluster has patience. No push is missing on one that returns: it was asked for none,
        or has applied it, or gets it again under the same number.
        """
        if not self.coordinates:
            return False
        assert self._leases is not None
        with self._returning:
            start = said = self._clock.monotonic()
            waits = self.timing.lease if self.launcher.replaceable else self.patience
            gone: set[int] = set()
            # Also after one is known to be gone: the others need not go with it.
            while silent := [
                shard for shard in self.handles if shard.state == "lost" and shard.index not in gone
            ]:
                for shard in silent:
                    returned = shard.returned()
                    if returned:
                        self._said.returned(shard.index)
                        self._say("returned", shard=shard.index, address=shard.address)
                    elif returned is False or self.launcher.gone(shard.index, shard.life):
                        gone.add(shard.index)
                    else:  # it may be there again, and be silent until its lease is renewed
                        self._leases.keep_lost(shard)
                if all(shard.state != "lost" or shard.index in gone for shard in silent):
                    continue
                now = self._clock.monotonic()
                quiet = {s.index: self._leases.silent_seconds(s.index, start) for s in silent}
                if (left := start + waits.total_seconds() - now) < 0:
                    if self.launcher.replaceable:
                        return False
                    raise ServerError(nobody_there(silent, max(quiet.values()))) from lost
                if now - said > _REMINDER_SECONDS:
                    said = now
                    for shard in silent:
                        self._say(
                            "silent", shard=shard.index, address=shard.address,
                            seconds=quiet[shard.index], until=quiet[shard.index] + left,
                        )  # fmt: skip
                self.stop.pause(_POLL_SECONDS, f"{places(silent)} to answer")
            return not self.lost()

    def _give_up(self, shards: Sequence[int]) -> None:
        """Decides that these are renewed: none of them is taken back any more."""
        self._missed.update(i for i in shards if self.handles[i].newly_lost)
        for index in shards:
            self.handles[index].give_up()

    def _await_peers(self, error: PeerError, seconds: float) -> bool:
        dead = [shard.index for shard in self.handles if not shard.alive()]
        if dead:
            if not self._bring_back(ShardLostError(dead)):
                raise ShardLostError(dead) from error
            return True
        # A server drops a host of its parity that is silent for a deadline: then it answers.
        if seconds > 3 * self.timing.deadline.total_seconds() and (
            stuck := stuck_shards(self.handles, error, self.timing.deadline, self._clock)
        ):
            # Rows that do not come back, because a host of their parity is out of reach, are lost.
            if not self.coordinates:
                raise error
            self._give_up(stuck)
            if not self._bring_back(ShardLostError(stuck)):
                raise ShardLostError(stuck) from error
            return True
        self.stop.pause(_POLL_SECONDS / 5, f"servers that do not reach each other ({error})")
        return False

    def _settle_writes(self) -> None:
        """Parity holds what was written; rows of shards that are recovered, when they serve."""
        if self._protection and not any(shard.state == "recovering" for shard in self.handles):
            self._flush()

    @surviving
    def _flush(self) -> None:
        assert self._protection is not None
        self._serving()
        self._protection.flush()

    @surviving
    def freeze(self, since: str | None, buffer_nbytes: int) -> Cut[Sequence[FrozenRows]]:
        if self._protection is not None:
            self._protection.wait(lambda status: not status.missing_rows or status.lost_shards > 0)
        return super().freeze(since, buffer_nbytes)
