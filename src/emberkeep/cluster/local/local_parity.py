"""Parity over the shards of one process: its members, their mail, and the thread that rebuilds."""

from __future__ import annotations

import math
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
from emberkeep.errors import ConfigError, ParityLossError, ShardLostError
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
        self._mail = Mail(len(shards), self._receive, window_nbytes=spec.window_nbytes, clock=clock)
        self._shards = list(shards)
        self._degraded_reads = 0
        self._recoveries = 0
        # Rows are decoded again from the start; `rebuild_chunk` sees to what cannot be repeated.
        self._rebuilds = Worker(
            "emberkeep-rebuild", self._rebuild_and_rest, retry=Retry(), clock=clock
        )
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
            self._mail.deliver()

    def check(self) -> None:
        """Before a push: raises what has ended protection, with no row changed."""
        self._mail.check()
        self._rebuilds.check()

    def flush(self) -> None:
        """After any other write, which nobody would send again: every host holds it now."""
        self._mail.deliver()

    def settled(self, shard: int) -> int:
        """The number up to which nothing of a shard's stream can be lost any more."""
        return self.rebuilder.members[shard].source.settled

    def applied(self, shard: int, worker: str) -> int:
        """The last push of a worker that a shard has applied."""
        return self.rebuilder.members[shard].source.ledger.get(worker, 0)

    def clear(self) -> None:
        """All shards were cleared: so is all parity, and nothing is left to come back."""
        with self.rebuilder.lock:
            self._mail.deliver()
            for shard, member in zip(self._shards, self.rebuilder.members, strict=True):
                member.host.clear()
                with member.lock:
                    rows_of(member).give_up()
                    member.record((), None, state_of(shard.slabs))
                shard.bring_back = None
            self._mail.deliver()

    # -- losses ----------------------------------------------------------------------------------

    def lose(self, shards: Collection[int]) -> None:
        """Ends shards: their memory is gone, and what they had not said with it."""
        with self.rebuilder.lock:  # nobody reads rows of them meanwhile
            for shard in shards:
                self._shards[shard].kill()
            # Before hosts let go: what is being delivered to them would fail, and delivery with it.
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
            if self._mail.failed_since is not None:
                raise ParityLossError(
                    f"shards {sorted(lost)} are lost, and their parity is out of date since "
                    "delivering messages has failed: recover them from the repository"
                )
            self.rebuilder.recover(lost, partial(self._replace, renew))
            self.lost = set()
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
                if self.lost:
                    raise ShardLostError(sorted(self.lost))
                for start in range(0, rows.size, self.spec.chunk_rows):
                    part = rows[start : start + self.spec.chunk_rows]
                    self.rebuilder.recover_rows(shard, slab, part)
            self._degraded_seconds += self._clock.monotonic() - began

    # -- rebuilding ------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Brings everything back now: all rows, then all parity."""
        while self.rebuild_chunk():
            pass

    def rebuild_chunk(self) -> bool:
        """Brings the next rows back, or else the next parity; False when all is whole."""
        with self.rebuilder.lock:
            self._mail.check()
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
                return self.rebuilder.fill(-(-self.spec.chunk_rows // self.spec.k)) > 0
            except BaseException as error:
                # Some rows may have been added: adding them again would take them out.
                self._mail.fail(error)
                raise

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
        self._rebuilding = True
        self._rebuilds.wake()

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
        """Ends the threads; raises what has ended protection."""
        end_all(self._rebuilds.stop, self._mail.close, self._rebuilds.close)

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
            unprotected_since=earliest(self._mail.failed_since, self._rebuilds.failed_since),
        )
