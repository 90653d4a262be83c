"""Parity over the shards of one process: its members, their mail, and the thread that rebuilds."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial

from emberkeep._types import I64
from emberkeep.cluster.local.mail import Letter, Mail
from emberkeep.cluster.shard import Shard
from emberkeep.erasure.coded_slabs import SlabRows, load_state, shapes_of, state_of
from emberkeep.erasure.codes import Parity, Placement
from emberkeep.erasure.host import ParityHost, receive_together
from emberkeep.erasure.local_rebuilder import LocalRebuilder, rows_of
from emberkeep.erasure.member import ParityMember, begin
from emberkeep.erasure.messages import Point
from emberkeep.erasure.source import Source
from emberkeep.erasure.status import ParityStatus, earliest
from emberkeep.errors import ConfigError, ShardLostError, StoppedError
from emberkeep.runtime.background import Retry, Worker, end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.pool import Pool

Renew = Callable[[int], Shard]

# Nobody has pushed for so long: a thread rebuilds alone.
_ALONE_SECONDS = 0.25
# What a single push may take for a rebuild, however long ago the last one was.
_MOST_ALONG_SECONDS = 0.05


class LocalParity:
    """The parity of a cluster of this process, and what is done when shards are lost.

    Rows that were trained before it began are protected once the thread that rebuilds has been
    through them.

    Where messages could not be delivered, or parity could not be filled, parity is not what the
    rows are. It starts over: the thread that rebuilds fills all of it again. Until then rows are
    unprotected, which the status says; a push says so by a warning, once, or is refused where the
    run shall stop then. Shards whose rows were not back yet are lost.
    """

    def __init__(
        self, spec: Parity, shards: Sequence[Shard], pool: Pool, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        for table in shards[0].tables:
            if table.tier is not None:
                raise ConfigError(
                    f"table {table.name!r} lives behind a tier, whose file brings a lost shard "
                    "back; parity over it would not fit into memory: leave out tier= or parity="
                )
        self.spec = spec
        self.placement = Placement(len(shards), spec.k, spec.r)
        self.lost: set[int] = set()
        self._pool = pool
        self._clock = clock
        self._shapes = shapes_of([shard.slabs for shard in shards])
        self._mail = Mail(
            len(shards), self._receive, window_nbytes=spec.window_nbytes,
            on_failure=self._void, clock=clock,
        )  # fmt: skip
        # Since when parity is not what the rows are, and whether a push has said so.
        self._void_since: float | None = None
        self._void_cause: BaseException | None = None
        self._void_said = False
        self._shards = list(shards)
        self._degraded_reads = 0
        self._recoveries = 0
        self._renewing = threading.Lock()
        self._rebuilds = self._new_rebuilds()
        self._rebuilding = False
        # When training last took part in a rebuild, what it may spend on it, and what it has spent
        # since on rows that it asked for.
        self._along_at = -math.inf
        self._credit_seconds = 0.0
        self._degraded_seconds = 0.0
        trained = any(slab.touched.any() for shard in shards for slab in shard.slabs)
        members = [
            self._member(shard, 0, Point({}, state_of(shard.slabs)), complete=not trained)
            for shard in shards
        ]
        self.rebuilder = LocalRebuilder(self.placement, members, self._mail.deliver)
        begin(members)
        for shard, member in zip(shards, members, strict=True):
            shard.protect(member)
        if spec.background:
            self._mail.start()
        if trained:
            self._sweep()

    def _member(
        self, shard: Shard, number: int, point: Point, *, lost: bool = False, complete: bool = False
    ) -> ParityMember:
        place = self.placement
        return ParityMember(
            source=Source(
                shard.index, shard.epoch, place.hosts(shard.index), number=number, point=point
            ),
            host=ParityHost(shard.index, place, self._shapes, complete=complete, pool=self._pool),
            rows=SlabRows(shard.slabs, place, lost=lost),
            placement=place,
            lock=shard.lock,
            post=self._mail.post,
            unsaid=self._mail.fail,
        )

    def _receive(self, letters: Sequence[Letter]) -> None:
        members = self.rebuilder.members
        current = [  # else posted by a shard that was replaced since, or to one that is lost
            (host, message)
            for host, message in letters
            if message.epoch == members[message.source].source.epoch and host not in self.lost
        ]
        held = receive_together([(members[h].host, m) for h, m in current], self._pool)
        for (host, message), number in zip(current, held, strict=True):
            members[message.source].source.acknowledge(host, number)

    # -- training --------------------------------------------------------------------------------

    def settle(self) -> None:
        """After a push: every host holds it, or, in the background, soon will."""
        if self.spec.background:
            self._mail.wait_for_room()
        else:
            self.flush()

    def check(self) -> None:
        """Before a push: says that rows are not protected, once; raises it, with no row changed,
        where the run shall stop then."""
        if self.spec.unprotected == "stop":
            self._check_protected()
        elif self._void_since is not None and not self._void_said:
            self._void_said = True
            warnings.warn(
                f"rows are not protected: {self._void_cause!r} while their parity was kept up; it "
                "is being filled again, and training goes on",
                stacklevel=3,
            )

    def _check_protected(self) -> None:
        if self._void_since is not None:
            cause = self._void_cause
            raise StoppedError(
                f"rows are not protected: {type(cause).__name__}: {cause} while their parity was "
                "kept up, and it is not filled again yet; no row was changed: try again later, or "
                "save a version"
            ) from cause
        self._rebuilds.check()

    def flush(self) -> None:
        """After any other write, which nobody would send again: every host holds it now, or rows
        are said to be unprotected."""
        try:
            self._mail.deliver()
        except Exception:
            if self.spec.unprotected == "stop":
                raise

    def settled(self, shard: int) -> int:
        """The number up to which nothing of a shard's stream can be lost any more."""
        return self.rebuilder.members[shard].source.settled

    def applied(self, shard: int, worker: str) -> int:
        """The last push of a worker that a shard has applied."""
        return self.rebuilder.members[shard].source.ledger.get(worker, 0)

    def clear(self) -> None:
        """All shards were cleared: so is all parity, and nothing is left to come back."""
        with self.rebuilder.lock:
            self._start_over_if_void()
            self.flush()
            for shard, member in zip(self._shards, self.rebuilder.members, strict=True):
                member.host.clear()
                with member.lock:
                    rows_of(member).give_up()
                    member.record((), None, state_of(shard.slabs))
                shard.bring_back = None
            self.flush()

    # -- parity that is not what the rows are ----------------------------------------------------

    def _void(self) -> None:
        """Delivery has failed, in any thread and with its locks held."""
        if self._void_since is None:
            self._void_since, self._void_said = self._mail.failed_since, False
        self._void_cause = self._mail.failure
        self._sweep()

    def _start_over_if_void(self) -> None:
        """Has parity filled again that is not what the rows are. With the rebuilder's lock."""
        if self._mail.failure is None:
            return
        members = self.rebuilder.members
        living = [member for member in members if member.index not in self.lost]
        # Their rows were to come from that parity.
        hurt = [member.index for member in living if rows_of(member).lost()]
        if hurt:
            self.lose(hurt)
        living = [member for member in living if member.index not in hurt]
        with self._mail.held():
            self._mail.start_over()
            for member in living:
                member.host.start_over()
                for host in member.source.hosts:
                    if host not in self.lost:
                        number, point = member.attach(host)
                        members[host].host.follow(member.index, member.source.epoch, number, point)

    # -- losses ----------------------------------------------------------------------------------

    def lose(self, shards: Collection[int]) -> None:
        """Ends shards: their memory is gone, and what they had not said with it."""
        with self.rebuilder.lock:  # nobody reads rows of them meanwhile
            for shard in shards:
                self._shards[shard].kill()
            with self._mail.held():
                self.lost |= set(shards)
                self._mail.drop(self.lost)
                for shard in shards:
                    member = self.rebuilder.members[shard]
                    with member.lock:
                        rows_of(member).drop()
                    member.host.let_go()

    def recover(self, lost: Collection[int], renew: Renew) -> None:
        """Puts replacements in the place of all lost shards, ready to serve.

        Raises `ParityLossError`, with nothing changed, where parity cannot bring them back.
        """
        with self.rebuilder.lock:
            self._start_over_if_void()
            with self._mail.held():
                self.rebuilder.recover(lost, partial(self._replace, renew))
                self.lost -= set(lost)
            self.rebuilder.recover_marks()
            for index in lost:
                shard = self._shards[index]
                shard.bring_back = partial(self._bring_back, index)
            self._recoveries += len(lost)
        self._along_at = self._clock.monotonic()
        self._credit_seconds = self._degraded_seconds = 0.0
        self._sweep()

    def _replace(self, renew: Renew, index: int, number: int, point: Point) -> ParityMember:
        shard = self._shards[index] = renew(index)
        load_state(shard.slabs, point.state)
        member = self._member(shard, number, point, lost=True)
        shard.protect(member)
        return member

    def start_over(self, shards: Collection[int], renew: Renew) -> None:
        """Puts empty shards in the place of others; their rows will come from a repository."""

        def replace(index: int, number: int, point: Point) -> ParityMember:
            shard = self._shards[index] = renew(index)
            member = self._member(shard, number, Point({}, state_of(shard.slabs)))
            shard.protect(member)
            return member

        with self.rebuilder.lock:
            self._start_over_if_void()
            with self._mail.held():
                self._mail.drop(shards)
                self.rebuilder.start_over(shards, replace)
                self.lost -= set(shards)
        self._sweep()

    def _bring_back(self, shard: int, slab: int, rows: I64) -> None:
        """A degraded read: decodes what a call needs and a replacement has not got back."""
        if self.lost:
            raise ShardLostError(sorted(self.lost))
        member = self.rebuilder.members[shard]
        if member.unknown(slab, "records", rows).any():
            self._degraded_reads += 1
            began = self._clock.monotonic()
            with self.rebuilder.lock:
                self._start_over_if_void()
                if self.lost:
                    raise ShardLostError(sorted(self.lost))
                try:
                    for start in range(0, rows.size, self.spec.chunk_rows):
                        part = rows[start : start + self.spec.chunk_rows]
                        self.rebuilder.recover_rows(shard, slab, part)
                except Exception:
                    self._start_over_if_void()
                    if self.lost:  # with the parity that the rows were to come from
                        raise ShardLostError(sorted(self.lost)) from None
                    raise
            self._degraded_seconds += self._clock.monotonic() - began

    # -- rebuilding ------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Brings everything back now: all rows, then all parity."""
        while self.rebuild_chunk():
            pass
        if self._rebuilds.stopped:
            self._sweep()  # what it met is over

    def rebuild_chunk(self) -> bool:
        """Brings the next rows back, or else the next parity; False when all is whole."""
        with self.rebuilder.lock:
            self._start_over_if_void()
            if self.lost:
                return False
            for shard in self._shards:
                member = self.rebuilder.members[shard.index]
                with member.lock:
                    chunk = rows_of(member).next_missing(self.spec.chunk_rows)
                if chunk is not None:
                    self.rebuilder.recover_rows(shard.index, *chunk)
                    return True
                shard.bring_back = None
            try:
                more = self.rebuilder.fill(-(-self.spec.chunk_rows // self.spec.k)) > 0
            except BaseException as error:
                # Some rows may have been added: adding them again would take them out.
                self._mail.fail(error)
                raise
            if not more and self._mail.failure is None:
                self._void_since = self._void_cause = None
            return more

    def rebuild_along(self) -> None:
        """After a push: the thread that trains brings back what is due, with the whole pool.

        That is `rebuild_share` of the time since the last push, less what rows have taken that
        were asked for, but at least a chunk: however short steps are, so many of them bring
        everything back. A thread beside training would cost more: each step lasts as long as the
        slowest of its threads, and all of them share caches and cores with it.
        """
        if not self._rebuilding:
            return
        share = self.spec.rebuild_share
        passed = self._clock.monotonic() - self._along_at
        due = passed * share - self._degraded_seconds
        self._degraded_seconds = 0.0
        self._credit_seconds = min(self._credit_seconds + due, _MOST_ALONG_SECONDS)
        while True:
            start = self._clock.monotonic()
            try:
                more = self.rebuild_chunk()
                if self._rebuilds.stopped:
                    self._sweep()  # what it met is over
            except Exception:  # not the fault of the push, which is done: the thread will tell
                more = False
            if not more:
                self._along_at = -math.inf
                self._rebuilds.wake()  # it looks whether anything is left
                return
            self._credit_seconds -= (self._clock.monotonic() - start) * (1 - share)
            if self._credit_seconds <= 0:
                break
        self._along_at = self._clock.monotonic()

    def _sweep(self) -> None:
        """Has the thread look at what is not back; starts another if it has given up."""
        self._rebuilding = True
        with self._renewing:
            if self._rebuilds.stopped:
                self._rebuilds.stop()  # it is not counted as stopped any more
                self._rebuilds = self._new_rebuilds()
            self._rebuilds.wake()

    def _new_rebuilds(self) -> Worker:
        """Rows are decoded again from the start, and parity starts over."""
        return Worker("emberkeep-rebuild", self._rebuild_and_rest, retry=Retry(), clock=self._clock)

    def _rebuild_and_rest(self) -> float | None:
        """Rebuilds while nobody pushes, until all is whole."""
        start = self._clock.monotonic()
        self._rebuilding = more = self._accompanied() or self.rebuild_chunk()
        if not more:
            return None
        taken = self._clock.monotonic() - start
        return _ALONE_SECONDS if self._accompanied() else taken * (1 / self.spec.rebuild_share - 1)

    def _accompanied(self) -> bool:
        """Whether somebody pushes, who rebuilds along with it."""
        return self._clock.monotonic() - self._along_at < _ALONE_SECONDS

    def close(self) -> None:
        """Ends the threads; raises why rows are not protected, where they are not."""
        end_all(
            self._rebuilds.stop, self._mail.close, self._rebuilds.join, self._check_protected
        )  # fmt: skip

    def status(self) -> ParityStatus:
        members = self.rebuilder.members
        rows = [rows_of(member) for member in members if member.index not in self.lost]
        return ParityStatus(
            k=self.spec.k,
            r=self.spec.r,
            lag=self._mail.waiting,
            unprotected_stripes=sum(member.host.unprotected_stripes for member in members),
            missing_rows=sum(shard.missing_rows for shard in rows),
            rebuilt_rows=self.rebuilder.decoded_rows,
            rebuilt_nbytes=self.rebuilder.decoded_nbytes,
            degraded_reads=self._degraded_reads,
            recoveries=self._recoveries,
            messages=self._mail.messages,
            sent_nbytes=self._mail.sent_nbytes,
            updates=tuple(member.host.updates for member in members),
            lost_shards=len(self.lost),
            unprotected_since=earliest(self._void_since, self._rebuilds.failed_since),
        )
