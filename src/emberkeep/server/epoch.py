"""One epoch of a served shard: its rows, who coordinates it, and what was pushed in it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from emberkeep._types import F32, I64, U8, U64, Array, Json, RowIds
from emberkeep.blobs import BlobStore, open_store
from emberkeep.cluster.shard import Shard
from emberkeep.cluster.table_states import Edit
from emberkeep.errors import EmberkeepError, EpochError, ProtocolError, SecurityError, ServerError
from emberkeep.kernels import batch_rows
from emberkeep.repository import VersionId
from emberkeep.rows.snapshot import Cut, FrozenRows
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.memory import lazy_zeros
from emberkeep.runtime.pool import Pool
from emberkeep.server.kept_rows import CursorVersions, KeptRows
from emberkeep.server.lost_shard import GoneShard, or_lost
from emberkeep.server.owned_ids import OwnedIds, check_unique
from emberkeep.server.parity_service import ParityService
from emberkeep.server.pushes import Ledger, Meeting, RowGradients, join
from emberkeep.wire.protocol import (
    APPLY,
    CHECK,
    PREFETCH,
    PULL,
    Changed,
    Request,
    Shape,
    done_reply,
    rows_reply,
)

# In the ledger of a parity stream: the steps that ranks have pushed together.
_RANKS = "ranks"


def _worker(request: Request) -> str:
    return _RANKS if request.world > 1 else f"{request.incarnation:x}"


@dataclass(frozen=True, slots=True)
class Prefetched:
    """A pull that was answered before the push that it follows: whose rows may change yet."""

    wanted: Sequence[RowIds]
    found_G: Sequence[I64]
    writes: int
    """How many writes other than pushes there had been: one since may have changed the rows."""


@dataclass(eq=False)
class Session:
    """What the server knows of one stream, for as long as it is open."""

    prefetched: Prefetched | None = None


@dataclass(slots=True)
class Checked:
    """A push that was checked and waits to be applied, or to be withdrawn."""

    number: int
    part: RowGradients
    session: weakref.ref[Session]
    since: float
    ranks: set[int] = field(default_factory=set)
    """Those that have applied it, of a push that is several ranks'."""


class Epoch:
    """A shard from the moment that a coordinator gave it an epoch until it gets the next one.

    Pushes are applied one at a time, each once: `Ledger` knows what was applied, and a push that
    was answered is applied. Requests are refused when the coordinator was not heard of for the
    lease: another server may be in this one's place by then.
    """

    def __init__(
        self, number: int, shard: Shard, *, shards: int, coordinator: str, lease_seconds: float,
        meeting_seconds: float, pool: Pool, tables: list[Json], clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self.number = number
        self.rows_since = number
        """The epoch in which the rows came: pushes that were answered before may be lost."""
        self.tables = tables
        self.shard = shard
        shard.lost_with_writes = True  # clients send again what was not answered
        self.shards = shards
        self.tiered = any(table.tier is not None for table in shard.tables)
        self.coordinator = coordinator
        self.lease_seconds = lease_seconds
        self.clock = clock
        self.heard = clock.monotonic()
        self.shape = Shape(
            tuple(len(group) for group in shard.groups),
            tuple(shard.tables[group[0]].dim for group in shard.groups),
        )
        self.meeting_seconds = meeting_seconds
        self.pool = pool
        self.owned_ids = OwnedIds(shard, shards)
        self._ledger = Ledger()
        self._meeting: Meeting[RowGradients] | None = None
        self._held: dict[int, Checked] = {}
        self._applied_together = 0
        self._push_lock = threading.Lock()
        self._scratch: list[U64] = []
        self._writes = 0
        self._counting = threading.Lock()
        self.parity_service: ParityService | None = None
        self._repository: str | None = None
        self.left = False
        """Whether its coordinator has ended, and wants the rows to stay for the next."""
        self.kept = False
        """Whether its rows are those that the epoch before has served."""
        self.whole = False
        """Whether its rows are those of a run: trained, or loaded to the end."""
        self.versions = CursorVersions()
        self._aside: KeptRows | None = None
        self.origin: Json = {}
        """What the coordinator has said of the model."""
        self.repository = ""
        """The id of the repository that the run is kept in; empty while it is not known."""

    def protect(self, parity_service: ParityService, since: int, pushes: Mapping[str, int]) -> None:
        """Keeps parity from here on; goes on after the pushes that its stream knows of. Rows that
        it brings back held older `pushes` when they came, in epoch `since`."""
        self.drop_aside()
        self.parity_service = parity_service
        if parity_service.from_parity:
            self.rows_since = since
            self._start_after(pushes)
        for worker, number in parity_service.ledger.items():
            if worker == _RANKS:
                self._applied_together = number
            else:
                self._ledger.note(int(worker, 16), number)

    def hand_over(self) -> Shard:
        """Ends this epoch and gives its shard away: requests under way meet a lost one. Refused
        while its rows are being replaced."""
        with self._push_lock:
            if not self.whole:
                raise ServerError(f"the rows of shard {self.shard.index} are nobody's")
            shard, self.shard = self.shard, cast(Shard, GoneShard(self.shard.index))
            return shard

    @property
    def adoptable(self) -> bool:
        """Whether it has rows that the next trainer could go on with: those of a run. One that has
        kept them may not serve yet, since others were held up; one whose trainer ended before rows
        were loaded, or half-way, has none."""
        state = self.shard.state if self.whole else "lost"
        served = state == "serving" or (self.kept and state == "recovering")
        return served and self.parity_service is None

    def set_aside(self, kept: KeptRows | None) -> None:
        """Nobody sees these rows, unless a version is loaded that they were those of: `take_aside`.
        The first that are written in this epoch let them go."""
        self._aside = kept

    def take_aside(self, repository: str, version: VersionId) -> bool:
        """Goes on with the rows that were set aside, if they were those of a version that is about
        to be loaded; they are not, yet."""
        kept = self._aside
        if kept is None or not kept.versions.has(repository, version):
            return False
        if any(slab.ranking is not None for slab in (*self.shard.slabs, *kept.shard.slabs)):
            return False  # which rows matter most was counted for another run, or not at all
        with self._push_lock:
            self._aside, fresh = None, self.shard
            with kept.shard.lock:
                kept.shard.epoch, kept.shard.state = fresh.epoch, fresh.state
            self.shard = kept.shard
        fresh.kill()
        return True

    def drop_aside(self) -> None:
        kept, self._aside = self._aside, None
        if kept is not None:
            kept.shard.kill()

    def take_pushes(self, before: Epoch) -> None:
        """What rows hold that come from another epoch is not applied again."""
        self._ledger = before._ledger

    def take_back(self, shard: Shard) -> None:
        """Nobody else could have it: this epoch goes on."""
        with self._push_lock:
            self.shard = shard

    def serve(self, after: int, since: int, pushes: Mapping[str, int]) -> None:
        """Answers from here on. Steps of several ranks up to `after` are over: a rank that had no
        answer to one, when the shard before was lost, hears that it is done. So does a worker
        whose `pushes` are in the version that the rows came from."""
        with self._push_lock:
            self._applied_together = max(self._applied_together, after)
            if self.parity_service is None or not self.parity_service.from_parity:
                self.rows_since = since
                self._start_after(pushes)
        self.shard.serve()

    def _start_after(self, pushes: Mapping[str, int]) -> None:
        """Rows came with these pushes, which no loss can undo: versions have them."""
        self._ledger.start_after(pushes)
        if self.parity_service is not None:
            self.parity_service.start_after(pushes)

    def freeze(self, since: str | None, buffer: int) -> tuple[Cut[FrozenRows], dict[str, int]]:
        """Freezes the rows, and tells which pushes they hold: the last of each worker."""
        self.drop_aside()
        self.versions.frozen()
        with self.between_pushes() as pushes:
            return self.shard.freeze(since, buffer), pushes

    @contextmanager
    def between_pushes(self) -> Iterator[dict[str, int]]:
        """No push is applied meanwhile; which ones rows hold, the last of each worker."""
        with self._push_lock:
            yield {f"{worker:x}": number for worker, number in self._ledger.numbers().items()}

    def pushes(self) -> dict[str, int]:
        """The last push of each worker that rows hold."""
        with self.between_pushes() as pushes:
            return pushes

    def store(self, url: str) -> BlobStore:
        """The store of this epoch's versions: the first that is asked for, and no other. A client
        must not have files written and read wherever this process can."""
        with self._push_lock:
            self._repository = self._repository or str(url)
        if url != self._repository:
            raise SecurityError(
                f"shard {self.shard.index} has its versions at {self._repository}, so {url} was "
                "not touched: close the cluster, and open another for another repository"
            )
        return open_store(self._repository, clock=self.clock)

    @property
    def index(self) -> int:
        return self.shard.index

    # -- who is heard ----------------------------------------------------------------------------

    def hear(self, coordinator: str, since: float) -> None:
        """The coordinator knew this server's clock to be at `since`: its lease runs from then.

        Not from now: a renewal may have waited in a socket while this process was stopped, and
        its sender may have given the shard to another server meanwhile.
        """
        if coordinator != self.coordinator:
            raise EpochError(
                f"shard {self.shard.index} is coordinated by another process: this one was replaced"
            )
        self.heard = max(self.heard, min(since, self.clock.monotonic()))

    @property
    def silent_seconds(self) -> float:
        """For how long its coordinator is not known to be alive."""
        return self.clock.monotonic() - self.heard

    @property
    def lapsed(self) -> bool:
        return self.left or self.silent_seconds > self.lease_seconds

    def check(self, epoch: int) -> None:
        """Refuses what is meant for another epoch, and everything once the lease has lapsed."""
        if epoch != self.number:
            raise EpochError(
                f"shard {self.shard.index} has epoch {self.number}, the message is for {epoch}"
            )
        if self.lapsed:
            raise EpochError(
                f"shard {self.shard.index} has not heard of its coordinator for "
                f"{self.silent_seconds:.1f} s: it may have been replaced, and is silent"
            )

    def check_serving(self, epoch: int) -> None:
        self.check(epoch)
        if self.shard.state != "serving":
            raise ServerError(f"shard {self.shard.index} is {self.shard.state}: ask again later")

    # -- pulls and pushes ------------------------------------------------------------------------

    def pull(self, request: Request, session: Session) -> U8:
        self.check_serving(request.epoch)
        self.owned_ids.check_wanted(request.wanted)
        blob, out = rows_reply(
            self.number, [ids.ids.size for ids in request.wanted], self.shape.dims_G
        )
        if request.kind != PULL and self.tiered:
            self.shard.fetch(request.wanted, ahead=request.kind == PREFETCH)
        if request.kind == PREFETCH:
            writes = self._writes  # before rows are read: one that comes beside counts as later
            found_G = self.shard.pull_placed(request.wanted, out)
            session.prefetched = Prefetched(request.wanted, found_G, writes)
        else:
            self.shard.pull(request.wanted, out)
        self.check_serving(request.epoch)
        return blob

    def push(self, request: Request, session: Session) -> U8:
        """Applies a push once, whatever number of times it is sent."""
        self.check_serving(request.epoch)
        prefetched, session.prefetched = session.prefetched, None
        if prefetched is not None and prefetched.writes != self._writes:
            prefetched = None  # the client pulls them again
        if request.kind != APPLY:
            self.owned_ids.check_wanted(request.wanted)
            check_unique(request.wanted, self.pool)
        with self._push_lock:
            applied = self._ledger.applied(request.incarnation, request.number)
        if applied:
            return self._done(request, ())
        pushed = self._perform(request, session)
        changed: list[Changed] = []
        if request.kind == CHECK:
            session.prefetched = prefetched
        elif pushed is not None and prefetched is not None:
            changed = self._changed_by(prefetched, pushed[0])
        # A process that was stopped in here must not tell of rows that are somebody else's by now.
        self.check_serving(request.epoch)
        try:
            return self._done(request, changed)
        except MemoryError:
            return self._done(request, ())

    def _done(self, request: Request, changed: Sequence[Changed]) -> U8:
        """The answer to a push, once its parity is settled."""
        if self.parity_service is None or request.kind == CHECK:
            return done_reply(self.number, request.number, changed)
        settled = self.parity_service.settle(_worker(request), request.number)
        self.check_serving(request.epoch)
        return done_reply(
            self.number, request.number, changed,
            settled=self.parity_service.settled_push(_worker(request)), waiting=not settled,
        )  # fmt: skip

    def _perform(self, request: Request, session: Session) -> RowGradients | None:
        """What was checked or applied; None if that had been done before."""
        part = (request.wanted, request.grads)
        if request.world == 1 or request.kind == APPLY:
            with self._push_lock:
                # Under the lock that it is applied under: the same push may have come twice.
                if self._ledger.applied(request.incarnation, request.number):
                    return None
                if self._came_back(request):
                    self._ledger.note(request.incarnation, request.number)
                    return None
                return self._one(request, part, session)
        done = self._meeting_of(request.world).bring(
            request.rank, request.number, part,
            lambda parts: self._joined(request, parts, session), self.meeting_seconds,
        )  # fmt: skip
        if request.kind != CHECK:
            with self._push_lock:
                if request.number > self._applied_together:
                    # Another rank, which has had no answer to the step, has met this one with a
                    # check alone: rows that this rank pulls next must hold the step.
                    return self._one(replace(request, kind=APPLY), part, session)
                self._ledger.note(request.incarnation, request.number)
        return done

    def _came_back(self, request: Request) -> bool:
        """Whether a step of all ranks, checked by a server that was lost, is over: parity has
        brought it back and rows hold it, or the recovery has counted it as lost."""
        held = self._held.get(0)
        checked = held is not None and held.number == request.number
        return request.world > 1 and not checked and request.number <= self._applied_together

    def _meeting_of(self, world: int) -> Meeting[RowGradients]:
        with self._push_lock:
            if self._meeting is None:
                self._meeting = Meeting(world, self._applied_together, self.clock)
            if self._meeting.world != world:
                raise ProtocolError(
                    f"{world} ranks push where {self._meeting.world} have met: they are of two runs"
                )
            return self._meeting

    def _joined(
        self, request: Request, parts: Sequence[RowGradients], session: Session
    ) -> RowGradients:
        with self._push_lock:
            return self._one(request, join(parts, self.pool), session)

    def _one(self, request: Request, part: RowGradients, session: Session) -> RowGradients:
        """Checks, applies, or both; called with the lock held."""
        together = request.world > 1
        key = 0 if together else request.incarnation
        held = None
        if request.kind == CHECK:
            before = self._held.get(key)
            if before is None or before.number != request.number:
                self._forget_checked(key, session)
            # Else it comes again, maybe late: where it fails, what was answered before still holds.
            self.shard.check(*part)
            self._held[key] = Checked(
                request.number, part, weakref.ref(session), self.clock.monotonic()
            )
            return part
        if request.kind == APPLY:
            held = self._held.get(key)
            if held is None or held.number != request.number:
                raise ProtocolError(f"push {request.number} was not checked before it is applied")
            part = held.part
        if not together or request.number > self._applied_together:
            # Others may have pushed since the check.
            push, checked = (_worker(request), request.number), self.shard.check(*part)
            self.drop_aside()
            with or_lost(self.shard):
                number = self.shard.apply(checked, request.lr, push)
            with or_lost(self.shard, changed=True):
                if self.parity_service is not None:
                    self.parity_service.note(*push, number)
                self._applied_together = request.number if together else 0
                self._ledger.note(request.incarnation, request.number)
            self.whole = True
        else:
            self._ledger.note(request.incarnation, request.number)
        if held is not None:
            held.ranks.add(request.rank)
            if len(held.ranks) == request.world:
                del self._held[key]
        return part

    def _forget_checked(self, key: int, session: Session) -> None:
        """Lets go of what a worker had checked before its next push, under this name or another,
        and of what nobody can apply any more: its stream is gone for longer than the lease."""
        now = self.clock.monotonic()
        for other, held in list(self._held.items()):
            holder = held.session()
            gone = holder is None and now - held.since > self.lease_seconds
            if other == key or holder is session or gone:
                del self._held[other]

    def withdraw(self, incarnation: int, number: int, world: int = 1) -> bool:
        """Lets go of a push that was checked here and refused elsewhere; whether it was held."""
        key = 0 if world > 1 else incarnation
        with self._push_lock:
            held = self._held.get(key)
            if held is None or held.number != number:
                return False
            del self._held[key]
            return True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Rows are changed in the body, other than by a push: who has pulled some ahead pulls them
        again. Counted before and after: rows that are read in between may be old or new."""
        self.drop_aside()
        self._count_write()
        try:
            with or_lost(self.shard):
                yield
        finally:
            self._count_write()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """`writing` of all rows: before the body has ended, they are nobody's."""
        self.spoil()
        with self.writing():
            yield
        self.whole = True

    def spoil(self) -> None:
        """Rows are about to be replaced: until all of them are, nobody can go on with them."""
        with self._push_lock:
            self.whole = False
            self.versions.forget()

    def _count_write(self) -> None:
        with self._counting:
            self._writes += 1

    @contextmanager
    def writing_alone(self) -> Iterator[None]:
        """`writing`, and no push is between its check and its application meanwhile: places that it
        found stay those of its rows, and of a tier in memory. Every host of the parity of a shard
        that serves holds what was written when this ends."""
        if self.shard.make_room is not None:
            self.shard.make_room()  # not with the lock: pushes need not wait for parity hosts
        with self._push_lock, self.writing():
            yield
        self._flush()

    def upsert(
        self, table: str, ids: I64, planes: Mapping[str, Array], edit: Edit, after: tuple[int, ...]
    ) -> None:
        """Writes rows from outside. `after` is (incarnation, number, world) of its client's last
        push: a request that comes behind a later push was given up, and is refused."""
        incarnation, number, world = after
        if np.unique(ids).size != ids.size:
            raise ProtocolError("an upsert names every row once")
        if self.shard.make_room is not None:
            self.shard.make_room()  # not with the lock: pushes need not wait for parity hosts
        with self._push_lock:
            if self.applied(incarnation, world) > number:
                raise EpochError("a later push of this client was applied before: this is late")
            with self.writing():
                self.shard.upsert(table, ids, planes, edit)
        self._flush()

    def _flush(self) -> None:
        """Not left to the client: one that does not coordinate knows nothing of parity. But who
        recovers the shard does, and sees to it when the shard serves."""
        if self.parity_service is not None and self.shard.state == "serving":
            self.parity_service.flush()

    def applied(self, incarnation: int, world: int = 1) -> int:
        """The last number that was applied for a worker, or for all ranks of a job."""
        return self._applied_together if world > 1 else self._ledger.last(incarnation)

    # -- details ---------------------------------------------------------------------------------

    def _changed_by(self, prefetched: Prefetched, pushed: Sequence[RowIds]) -> list[Changed]:
        """The prefetched rows that a push has changed: updated, evicted, or given a place. None
        where that cannot be said: the client pulls them again."""
        try:
            # The second lock: deletions and loads do not wait for pushes.
            with self._push_lock, self.shard.lock:
                changed = self._changed_now(prefetched, pushed)
        except EmberkeepError:
            raise
        except Exception:  # no memory, say: the push is applied, and its client must not doubt it
            return []
        return changed if prefetched.writes == self._writes else []

    def _changed_now(self, prefetched: Prefetched, pushed: Sequence[RowIds]) -> list[Changed]:
        if not self._scratch:
            self._scratch = [lazy_zeros(slab.touched.shape, np.uint64) for slab in self.shard.slabs]
        changed = []
        for g, slab in enumerate(self.shard.slabs):
            wanted = prefetched.wanted[g]
            written, _ = slab.resolve(pushed[g])
            now, _ = slab.resolve(wanted)
            hit = now != prefetched.found_G[g]
            known = np.flatnonzero(now >= 0)
            marked = np.empty(known.size, np.bool_)
            batch_rows.set_bits(self._scratch[g], written)
            batch_rows.test_bits(self._scratch[g], now[known], marked)
            batch_rows.clear_bits(self._scratch[g], written)
            hit[known[marked]] = True
            positions = np.flatnonzero(hit)
            offsets = np.searchsorted(positions, wanted.offsets).astype(np.int64)
            rows_UD: F32 = np.empty((positions.size, slab.dim), np.float32)
            slab.pull(RowIds(wanted.ids[positions], offsets), rows_UD)
            changed.append(Changed(positions, rows_UD))
        return changed
