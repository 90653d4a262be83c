"""What a shard server does, whatever carries the messages.

A server begins empty and knows nothing of tables. A coordinator *admits* it: gives it an epoch,
its place among the shards and the tables. It then takes rows, from the coordinator or from a
repository, and *serves* when asked to. Everything else names the epoch, and is refused when
it is not the present one.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from emberkeep._types import U8, Json
from emberkeep.cluster.shard import Shard
from emberkeep.cluster.table_states import edit_of
from emberkeep.errors import (
    DamageError,
    EmberkeepError,
    EpochError,
    ProtocolError,
    ServerError,
)
from emberkeep.rows.snapshot import FrozenRows
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.pool import Pool
from emberkeep.server import admission, tier_service, version_work
from emberkeep.server.epoch import Epoch, Session
from emberkeep.server.kept_rows import CursorVersions
from emberkeep.server.long_work import LongWork, Requests
from emberkeep.server.parity_service import parity_service_from
from emberkeep.server.request_order import RequestOrder
from emberkeep.server.server_events import OnEvent, ServerEvents
from emberkeep.server.server_metrics import Metrics
from emberkeep.server.server_page import ServerPage
from emberkeep.server.store_looks import StoreLooks
from emberkeep.tables import Optimizer, Table, Tier, optimizer_from
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import (
    APPLY,
    CHECK,
    FETCH,
    PREFETCH,
    PROTOCOL,
    PULL,
    PUSH,
    check_protocol,
    describe_error,
    is_frame,
    pack_frame,
    refusal,
    row_parts,
    table_from,
    unpack_frame,
    unpack_request,
)
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

Arrays = Mapping[str, npt.NDArray[Any]]
Answer = tuple[Json, Arrays]

_NONE: dict[str, npt.NDArray[Any]] = {}
_Error = TypeVar("_Error", bound=BaseException)
_NICE = 10  # of rounds, as of saves: pulls and pushes come first


class ShardService:
    """One shard of a cluster, as messages see it. Safe to call from many threads.

    With `place`, (index, count), it takes no other place among the shards. With a `tier` all rows
    live in files of its own. `transport` is what it reaches the other servers by.
    """

    def __init__(
        self, *, threads: int | None = None, place: tuple[int, int] | None = None,
        tier: Tier | None = None, on_event: OnEvent | None = None,
        transport: Transport = FLIGHT, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._place = place
        self._tier = None if tier is None else tier_service.ServerTier(tier)
        self._transport = transport
        self._clock = clock
        self.life = secrets.token_hex(8)
        self.security = Security()
        """What this server brings when it talks to others."""
        self.metrics = Metrics(clock)
        self._pool = Pool(threads)
        self.events = self._tell = ServerEvents(on_event, clock)
        self.page = ServerPage(
            self.metrics, self.events, epoch=lambda: self._epoch,
            opening=lambda: self._opening, draining=lambda: self._requests.draining,
        )  # fmt: skip
        self._lock = threading.RLock()
        self._epoch: Epoch | None = None
        self._opening: admission.Opening | None = None
        self._term = self._last_epoch = 0
        self._order = RequestOrder()
        self._snapshots: Sequence[FrozenRows] = ()
        self._snapshot_epoch, self._snapshot_versions = 0, CursorVersions()
        self._freezes = self._handed_out = 0
        self._cancelled = threading.Event()
        self._writing = ("", self._cancelled)
        self._requests, self._looks = Requests(clock), StoreLooks(clock)
        self.long_work = LongWork(self.events, self._requests.working, clock)
        # Beside the other work: a save must not wait for a round.
        self.rounds = LongWork(self.events, self._requests.working, clock, nice=_NICE)
        self._grid = version_work.GridWork(self.rounds.advance, clock)
        self._actions: dict[str, Callable[[Json, Arrays], Iterator[Answer]]] = {
            "status": self._status,
            "admit": self._admit,
            "renew": self._renew,
            "release": self._release,
            "serve": self._serve,
            "table_state": self._table_state,
            "load_table_state": self._load_table_state,
            "read": self._read,
            "read_all": self._read_all,
            "touched_ids": self._touched_ids,
            "digest": self._digest,
            "install": self._install,
            "check_upsert": self._check_upsert,
            "upsert": self._upsert,
            "delete": self._delete,
            "clear": self._clear,
            "track": self._track,
            "forget_changes": self._forget_changes,
            "freeze": self._freeze,
            "chunks": self._chunks,
            "repository": self._repository,
            "write": self._write,
            "extract": self._extract,
            "work": self._work,
            "cancel": self._cancel,
            "close": self._close,
            "load": self._load,
            "protect": self._protect,
            "tier": self._ask_tier,
            "member": self._member,
            "withdraw": self._withdraw,
        }

    # -- pulls and pushes ------------------------------------------------------------------------

    def answer(self, blob: U8, session: Session) -> U8:
        """The reply to one request; a refusal is a reply, too."""
        epoch = self._epoch
        if is_frame(blob):
            return self._hear(blob, epoch)
        try:
            with self._requests.working():
                if epoch is None:
                    raise EpochError("this server was given no epoch: it has no rows to serve")
                request = unpack_request(blob, epoch.shape)
                rows = sum(ids.ids.size for ids in request.wanted)
                if request.kind in (PULL, PREFETCH, FETCH):
                    with self.metrics.pulling(rows):
                        return epoch.pull(request, session)
                assert request.kind in (PUSH, CHECK, APPLY)
                with self.metrics.pushing(rows):
                    return epoch.push(request, session)
        except EmberkeepError as error:
            self.metrics.refused += 1
            return refusal(self._met(error), 0 if epoch is None else epoch.number)
        except Exception as error:
            self._met(error)
            raise

    def _met(self, error: _Error) -> _Error | EpochError:
        """What is answered. Rows that cannot be read from a file of the tier are lost with their
        shard: the next admission opens its files again, and knows what to do about them. So are
        rows that a write has changed half-way."""
        epoch, tier = self._epoch, self._tier
        if epoch is not None and epoch.shard.torn:
            self.let_go(epoch)
            self._tell("failed", {"error": str(error)})
            return error
        if epoch is None or tier is None or not isinstance(error, DamageError):
            return error
        if not tier.holds(epoch.index, error.name):
            return error
        self._tell("tier_damaged", {"epoch": epoch.number, "error": str(error)})
        self.let_go(epoch)
        return EpochError(f"shard {epoch.index} has lost rows: {error}")

    def _hear(self, blob: U8, epoch: Epoch | None) -> U8:
        """What another shard tells the host of its parity."""
        try:
            with self._requests.working():
                if epoch is None or epoch.parity_service is None:
                    raise EpochError("this server holds no parity: it was given none, or replaced")
                epoch.check(epoch.number)
                return epoch.parity_service.receive(blob, epoch.number)
        except Exception as error:  # the sender expects a frame, and sends it again
            if not isinstance(error, EmberkeepError):
                self.failed(error)
            return np.frombuffer(pack_frame(describe_error(error)), np.uint8)

    def failed(self, error: BaseException) -> None:
        """Tells of an error that nobody foresaw."""
        self._tell("failed", {"error": repr(error)})

    # -- actions ---------------------------------------------------------------------------------

    def answer_action(self, kind: str, content: Any) -> Iterator[bytes]:
        """The frames that answer an action, packed; an error is one of them."""
        try:
            header, arrays = unpack_frame(content)
            for answer in self.act(kind, header, arrays):
                yield pack_frame(*answer)
        except EmberkeepError as error:
            yield pack_frame(describe_error(self._met(error)))
        except Exception as error:  # a bug must end one action, not the server
            self.failed(self._met(error))
            yield pack_frame(describe_error(error))

    def act(self, kind: str, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """The frames that answer an action. Malformed arguments are `ProtocolError`."""
        action = self._actions.get(kind)
        if action is None:
            raise ProtocolError(f"there is no action {kind!r}"[:100])
        always = kind in ("status", "work", "close", "cancel")
        with self._requests.working(always=always), self._order.of(header):
            try:
                yield from action(header, arrays)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise ProtocolError(f"{kind}: the message is not complete: {error!r}") from error

    def _status(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        status: Json = {"protocol": PROTOCOL, "life": self.life, "term": self._term}
        status["draining"], status["last_epoch"] = self._requests.draining, self._last_epoch
        if self._tier is not None:
            status["tier"] = self._tier.status(self._epoch)
        yield {**status, **self.page.status(header)}, _NONE

    def _admit(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """Begins an epoch with an empty shard, or with the rows of the one before; with a tier,
        `work` says when its files are open. Another coordinator may have to wait, or is refused.
        """
        check_protocol("the coordinator", header)
        number, coordinator = int(header["epoch"]), str(header["coordinator"])
        index, count = int(header["shard"]), int(header["shards"])
        trainer = str(header.get("trainer", ""))
        tables = [table_from(table) for table in header["tables"]]
        optimizer = optimizer_from(header["optimizer"])
        with self._lock:
            before = self._epoch
            with self.events.refusing(coordinator, trainer):
                admission.check_place(self._place, index, count, number)
                admission.check_turn(self._opening or before, self._term, self._last_epoch, header)
            adopts = bool(header.get("adopt"))
            if adopts:
                self._adopt(admission.check_rows(before, header), header)
                before = None
            elif self._tier is None:
                kept = admission.keep(before, header)
                if kept is not None:
                    self._unfreeze()
                self._epoch = self._open(header, tables, optimizer)
                self._epoch.set_aside(kept)
            else:
                # First: files have one owner at a time. To read them takes longer than an answer.
                self._epoch, self._opening = None, admission.Opening(header, self._clock)
                make = partial(self._open, header, tables, optimizer)
                work = partial(self._open_files, self._opening, before, make)
                where = {"epoch": number, "path": self._tier.directory(index)}
                self.long_work.begin("opened", number, where, work, coordinator=coordinator)
            self._term, self._last_epoch = int(header["term"]), number
            self._order.begin(number)
        if before is not None and self._tier is None:
            self._drop(before)
        self.metrics.admitted(number, trainer)
        about = {"epoch": number, "shard": index, "shards": count}
        self._tell("admitted", {**about, "run": coordinator, "trainer": trainer})
        yield {"life": self.life, "opening": self._tier is not None and not adopts}, _NONE

    def _open_files(
        self, opening: admission.Opening, before: Epoch | None, make: Callable[[], Epoch]
    ) -> Json:
        """Begins the epoch of an admission, unless there was another one since, or a release."""
        opened, present = None, False
        try:
            if before is not None:
                self._drop(before)
            if self._opening is opening and not opening.left:
                opened = make()
        finally:
            with self._lock:
                if self._opening is opening:
                    present, self._opening = opened is not None and not opening.left, None
                    self._epoch = opened if present else None
        if present:
            return {"life": self.life}
        if opened is not None:
            self._drop(opened)
        raise EpochError(f"epoch {opening.number} was over before its files were open")

    def _open(self, header: Json, tables: Sequence[Table], optimizer: Optimizer) -> Epoch:
        """A new epoch: empty, or at the durable batch of its tier."""
        shard = tier_service.open_shard(
            self._tier, header, tables, optimizer, pool=self._pool, clock=self._clock,
            advance=self.long_work.advance, tell=self.events,
        )  # fmt: skip
        if header.get("tracked"):
            shard.track(admission.priority_of(header))
        return admission.new_epoch(shard, header, self._pool, self._clock)

    def _adopt(self, before: Epoch, header: Json) -> None:
        """Goes on with the rows of the epoch before: what was frozen in it is let go."""
        self._epoch = admission.adopt(before, header)
        self._unfreeze()

    def _unfreeze(self) -> None:
        """Lets go of what is frozen: what had changed before has changed still."""
        self._cancelled.set()
        for snapshot in self._snapshots:
            snapshot.close(())
        self._snapshots = ()

    def _drop(self, epoch: Epoch) -> None:
        """Lets go of an epoch's memory; copies of its rows that are under way are cancelled."""
        self._cancelled.set()
        self._grid.forget()
        service = epoch.parity_service
        ends = [epoch.drop_aside, epoch.shard.kill]
        end_all(*([] if service is None else [service.close]), *ends)

    def _renew(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        epoch = self._of(header)
        epoch.hear(str(header["coordinator"]), float(header.get("clock", 0.0)))
        self.metrics.follow(header.get("run", {}))
        epoch.repository = str(header.get("run", {}).get("repository", epoch.repository))
        left_out: dict[int, int] = {}
        if epoch.parity_service is not None:
            known = {int(host): int(number) for host, number in header.get("left_out", ())}
            left_out = epoch.parity_service.known_left_out(known)
        clock = self._clock.monotonic()
        yield {"state": epoch.shard.state, "clock": clock, "left_out": [*left_out.items()]}, _NONE

    def _release(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """The run is over, and the next coordinator need not wait. The rows are let go, unless they
        are to stay for that one."""
        with self._lock:
            if meant := self._opening is not None and self._opening.meant(header):
                self._opening.left = True
        if meant:
            yield {}, _NONE
            return
        epoch, stay = self._of(header), bool(header.get("stay"))
        epoch.hear(str(header["coordinator"]), 0.0)
        epoch.left = stay
        if not stay:
            self.let_go(epoch)
        self._tell("released", {"epoch": epoch.number, "rows": "stay" if stay else "gone"})
        yield {}, _NONE

    def let_go(self, epoch: Epoch) -> None:
        """Drops the rows of an epoch, if it is still the present one."""
        with self._lock:
            if self._epoch is not epoch:
                return
            self._epoch = None
        self._drop(epoch)

    def _serve(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        epoch = self._checked(header)
        since = int(header.get("since", epoch.number))
        epoch.serve(int(header.get("after", 0)), since, header.get("pushes", {}))
        self._tell("serving", {"epoch": epoch.number, "shard": epoch.shard.index})
        yield {}, _NONE

    def _ask_tier(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        yield tier_service.ask(self._checked(header), header), _NONE

    def _protect(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """Begins to keep parity of the others' rows, and to tell them of this shard's."""
        epoch = self._checked(header)
        if epoch.parity_service is not None:
            raise ServerError(f"shard {epoch.shard.index} has parity already")
        epoch.protect(
            parity_service_from(
                header, epoch.shard, epoch.shards, security=self.security,
                transport=self._transport, clock=self._clock, tell=self._tell,
            ),
            int(header["since"]), header["pushes"],
        )  # fmt: skip
        yield {}, _NONE

    def _member(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        epoch = self._checked(header)
        if epoch.parity_service is None:
            raise EpochError(f"shard {epoch.shard.index} has no parity in epoch {epoch.number}")
        yield epoch.parity_service.ask(header, arrays)

    def _withdraw(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        push = (int(header[name]) for name in ("incarnation", "number", "world"))
        yield {"withdrawn": self._checked(header).withdraw(*push)}, _NONE

    # -- rows ------------------------------------------------------------------------------------

    def _table_state(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        yield {"tables": self._checked(header).shard.table_state()}, _NONE

    def _load_table_state(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        with (epoch := self._checked(header)).writing_alone():
            rows = epoch.shard.load_table_state(header["tables"])
        yield {"rows": rows}, _NONE

    def _read(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        planes = self._owned(header, arrays["ids"]).read(header["table"], arrays["ids"])
        yield from (({}, part) for part in row_parts(planes))

    def _read_all(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        ids, planes = self._checked(header).shard.read_all(header["table"])
        yield from (({}, part) for part in row_parts({"": ids, **planes}))

    def _touched_ids(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        ids = self._checked(header).shard.touched_ids(header["table"])
        yield from (({}, part) for part in row_parts({"ids": ids}))

    def _digest(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        found = self._checked(header).shard.digest(header["table"])
        yield {"rows": found.rows, "low": f"{found.low:x}", "high": f"{found.high:x}"}, _NONE

    def _install(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        planes = {name: values for name, values in arrays.items() if name != ""}
        self._owned(header, arrays[""])
        (epoch := self._checked(header)).spoil()  # until a push says that all are there
        with epoch.writing_alone():
            epoch.shard.install(header["table"], arrays[""], planes)
        yield {}, _NONE

    def _check_upsert(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        known = self._owned(header, arrays[""]).check_upsert(header["table"], arrays[""])
        yield {}, {"known": known.view(np.uint8)}

    def _upsert(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        self._owned(header, arrays[""])
        after = tuple(int(header[name]) for name in ("incarnation", "number", "world"))
        planes = {name: values for name, values in arrays.items() if name != ""}
        self._checked(header).upsert(header["table"], arrays[""], planes, edit_of(header), after)
        yield {}, _NONE

    def _delete(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        self._owned(header, arrays["ids"])
        with (epoch := self._checked(header)).writing_alone():
            deleted = epoch.shard.delete(header["table"], arrays["ids"], edit_of(header))
        yield {"deleted": deleted}, _NONE

    def _clear(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        (epoch := self._checked(header)).spoil()
        with epoch.writing_alone():
            epoch.shard.clear()
        yield {}, _NONE

    def _track(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        self._checked(header).shard.track(admission.priority_of(header))
        yield {}, _NONE

    def _forget_changes(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        keep, epoch = bool(header["keep_since_baseline"]), self._checked(header)
        epoch.versions.forget()
        epoch.shard.forget_changes(keep_since_baseline=keep)
        yield {}, _NONE

    # -- versions --------------------------------------------------------------------------------

    def _freeze(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        epoch = self._checked(header)
        with self._lock:
            # Still open: who froze these rows knows nothing of them any more.
            if self._snapshot_epoch == epoch.number:
                for snapshot in self._snapshots:
                    snapshot.close(())
            cut, pushes = epoch.freeze(header["since"], int(header["buffer_nbytes"]))
            self._snapshots = cut
            self._snapshot_epoch, self._snapshot_versions = epoch.number, epoch.versions
            self._cancelled = threading.Event()
            self._freezes += 1
        yield {"tables": cut.tables, "pushes": pushes, "freeze": self._freezes}, _NONE

    def _chunks(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """The frozen rows themselves, for a coordinator whose store is its own: of the freeze that
        it means, and once. A request that comes late or twice would take some of them away."""
        with self._lock:
            snapshots, freeze = self._frozen(header), int(header["freeze"])
            if freeze != self._freezes or freeze == self._handed_out:
                raise EpochError("these rows were handed out, or frozen again since: this is late")
            self._handed_out = freeze
        for snapshot in snapshots:
            for chunk in snapshot.chunks(int(header["rows"]), self._cancelled):
                planes = {} if chunk.planes is None else chunk.planes
                about = {"table": chunk.table, "tombstones": chunk.planes is None}
                yield about, {"": chunk.ids, **planes}

    def _repository(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """The id of the repository that this server finds under a URL; None if there is none.

        Not every path is the same directory on every machine.
        """
        epoch = self._checked(header)
        found = self._looks.repository_at(epoch.store(header["url"]))
        epoch.versions.repository = found
        yield {"repository": found}, _NONE

    def _write(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """Begins to write the frozen rows as files of a version, straight to the store."""
        epoch, cancelled = self._checked(header), self._cancelled
        work = version_work.to_write(
            epoch, self._frozen(header), header, cancelled=cancelled,
            advance=self.long_work.advance, bandwidth=self._grid.bandwidth, clock=self._clock,
        )  # fmt: skip
        self.long_work.begin("wrote", epoch.number, {"version": header["version"]}, work)
        self._writing = (str(header["nonce"]), cancelled)
        yield {}, _NONE

    def _load(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """Begins to replace all rows by this shard's part of a version."""
        work = version_work.to_load(
            epoch := self._checked(header), header, pool=self._pool,
            advance=self.long_work.advance, clock=self._clock,
        )  # fmt: skip
        self.long_work.begin("loaded", epoch.number, {"version": header["version"]}, work)
        yield {}, _NONE

    def _extract(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """Begins a round of extraction in this shard's part of a grid, beside other work."""
        epoch = self._checked(header)
        work, about = self._grid.to_extract(epoch, header), {"version": header["version"]}
        self.rounds.begin("extracted", epoch.number, about, work)
        yield {}, _NONE

    def _work(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        if (opening := self._opening) is not None and opening.meant(header):
            opening.hear()
        asked = self.rounds if header.get("of") == "extract" else self.long_work
        yield asked.answer(int(header["epoch"]), header.get("coordinator")), _NONE

    def _cancel(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        """Gives a version up that is being written: the one which is named, never a later one."""
        nonce, cancelled = self._writing
        if header["nonce"] == nonce:
            cancelled.set()
        yield {}, _NONE

    def _close(self, header: Json, arrays: Arrays) -> Iterator[Answer]:
        snapshots = self._frozen(header)
        with self._lock:
            self._snapshots = ()
        # Before cursors move, and of the rows that were frozen, whosever they are by now.
        if snapshots:
            self._snapshot_versions.closed(header["advanced"])
        for snapshot in snapshots:
            snapshot.close(header["advanced"])
        yield {"held_seconds": sum(snapshot.held_seconds for snapshot in snapshots)}, _NONE

    def _frozen(self, header: Json) -> Sequence[FrozenRows]:
        if int(header["epoch"]) != self._snapshot_epoch:
            raise EpochError(f"nothing is frozen in epoch {header['epoch']}")
        return self._snapshots

    def drain(self, patience_seconds: float) -> bool:
        """Refuses what comes, waits for what is under way; whether it ended in time."""
        self._tell("draining", {})
        return self._requests.drain(patience_seconds)

    # -- details ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch | None:
        """The present one; None before a run has taken this server, and after it let it go."""
        return self._epoch

    def _of(self, header: Json) -> Epoch:
        """The present epoch, if the message is meant for it."""
        epoch, meant = self._epoch, int(header["epoch"])
        if epoch is None:
            raise EpochError(f"this server was given no epoch; the message is for {meant}")
        if epoch.number != meant:
            raise EpochError(f"this server has epoch {epoch.number}, the message is for {meant}")
        return epoch

    def _checked(self, header: Json) -> Epoch:
        epoch = self._of(header)
        epoch.check(int(header["epoch"]))
        return epoch

    def _owned(self, header: Json, ids: npt.NDArray[Any]) -> Shard:
        epoch = self._checked(header)
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ProtocolError("ids are one column of int64")
        epoch.owned_ids.check(header["table"], ids)
        return epoch.shard
