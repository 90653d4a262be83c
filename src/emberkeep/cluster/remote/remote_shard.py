"""One shard on a server, as the client of a cluster sees it: a `ShardHandle` over a connection."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, U8, Bools, Json, Planes
from emberkeep.blobs import is_shared
from emberkeep.cluster.remote.remote_rows import RemoteRows
from emberkeep.cluster.remote.timing import Timing
from emberkeep.cluster.shard import State
from emberkeep.cluster.table_states import NO_EDIT, Edit
from emberkeep.errors import (
    CancelledError,
    ConfigError,
    EmberkeepError,
    ProtocolError,
    SecurityError,
    ServerError,
    ShardLostError,
)
from emberkeep.repository import Manifest, Repository
from emberkeep.repository.grid.shard_extraction import RoundOrder, ShardRound
from emberkeep.rows.priority import Priority
from emberkeep.rows.row_digest import RowDigest
from emberkeep.rows.snapshot import Cut, FrozenRows
from emberkeep.rows.tracker import PRIORITISED
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock, Progress
from emberkeep.runtime.stopping import Stop
from emberkeep.wire.connection import Connection
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import MAX_IDS, check_reply, row_parts
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

Arrays = dict[str, npt.NDArray[Any]]

_POLL_SECONDS = (0.005, 0.1)
_BULK = ("read_all", "touched_ids", "digest", "install", "clear")
# These name their rows: they may take as long as a pull does, and so much more for each row, as one
# may be on a disk that is slow.
_BY_ROW = ("read", "upsert", "delete")
_ROW = timedelta(milliseconds=2)
# Rows that are read at a time, whatever their width: a server holds them all for the answer.
_READ_ROWS = 2**16
# What changes a shard other than by pushes, which have numbers of their own. One that was given up
# may yet be read by the server, long after others have followed it. A save goes its own way beside
# the others, in a thread of its own.
_ORDERED = {
    **dict.fromkeys(("freeze", "write", "close"), "save"),
    "extract": "grid", "tier": "tier",
    **dict.fromkeys(
        ("install", "upsert", "delete", "clear", "load", "load_table_state", "track",
         "forget_changes", "serve", "protect"),
        "rows",
    ),
}  # fmt: skip
# Whether a server is there at all is known sooner than what it has to say.
_GREETING = timedelta(seconds=3)
# A look at figures does not wait longer.
_LOOK = timedelta(seconds=2)


class RemoteShard:
    """Shard `index` on a server. Every answer comes within a deadline; a server that does not
    answer, was replaced, or is shutting down is lost: `ShardLostError`.

    A question whose answer was lost with the connection is asked again if the same server is still
    there; pushes carry numbers, so that it applies them once.
    """

    def __init__(
        self, index: int, address: str, security: Security, timing: Timing, incarnation: int, *,
        transport: Transport = FLIGHT, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self.index = index
        self.epoch = 0
        self.state: State = "lost"
        self.life = ""
        self.address = address
        self.tables: list[Json] = []
        self.tier: Json | None = None
        """Where the server keeps its rows in files; None where it has no tier."""
        self._security, self.timing = security, timing
        self._incarnation = incarnation
        self._transport, self._clock = transport, clock
        self.stop = Stop(clock)
        self._connection: Connection | None = None
        self._awaited: Connection | None = None  # by which a reply is to come
        self._given_up = True
        self._opening = False
        self.saved_pushes: dict[str, int] = {}
        """The last push of each worker that the newest version of this process holds."""
        self.wholly_saved: dict[str, int] = {}  # by the newest whole one; others lack some rows
        self.began_with: dict[str, int] = {}  # that rows held when they came, but for parity
        self.rows_since = 0  # the epoch in which they came, and pushes may have been lost
        self._orders = itertools.count(1)
        self._lock = threading.RLock()
        self.deciding = threading.Lock()
        """Held while it is decided that the server is taken back, or is not."""

    # -- the server ------------------------------------------------------------------------------

    def connect(self, address: str | None = None) -> Json:
        """A new connection; returns what the server says of itself."""
        self.disconnect()
        self.address = address or self.address
        # Not read from `self` again: another thread may count the server as lost meanwhile.
        connection = self._connection = self._dial(self._incarnation)
        try:
            status = connection.open(min(self.timing.deadline, _GREETING))
        except BaseException:
            connection.close()
            self._forget(connection)
            raise
        self.tier = status.get("tier")
        return status

    def _dial(self, incarnation: int = 0) -> Connection:
        return Connection(self.address, self._security, incarnation, transport=self._transport)

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _forget(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None

    def follow(self, status: Json) -> None:
        """Takes the server as it says it is."""
        self.life, self.epoch = status["life"], status["epoch"]
        state = status["state"]
        usable = not (status["draining"] or status.get("lapsed"))
        self.state = state if usable and state in ("serving", "recovering") else "lost"
        self.tables = status.get("tables", [])

    def admit(self, epoch: int, about: Json) -> None:
        """Begins an epoch on the server that is connected: empty, refusing to serve. One with a
        tier then opens its files: `await_open`."""
        header = {**about, "epoch": epoch, "shard": self.index}
        answer, _ = self._open().act("admit", header, deadline=self.timing.deadline)
        self.life, self.epoch, self.state = answer["life"], epoch, "recovering"
        self._given_up, self._opening = False, bool(answer.get("opening"))
        self._coordinator = str(about["coordinator"])

    def await_open(self) -> None:
        """Waits until a server that was admitted has opened the files of its tier, and is at the
        batch that is durable there. Raises why it cannot."""
        if self._opening:
            header = {"epoch": self.epoch, "coordinator": self._coordinator}
            self._await_work(self._open(), header, "open its files")

    @property
    def newly_lost(self) -> bool:
        """Whether it is lost, and nobody has decided yet to renew it."""
        return self.state == "lost" and not self._given_up

    def give_up(self) -> None:
        """Decides that the rows of this epoch are not taken back: they will come from elsewhere."""
        with self.deciding:
            self._given_up = True
            self.state = "lost"

    def returned(self) -> bool | None:
        """Whether a lost server is what it was, with all its rows, and serves; None as long as it
        does not answer, or is yet to hear of its coordinator."""
        with self._lock:
            if self._given_up:
                return False
            try:
                status = self.connect()
            except ServerError:
                return None
            same = status["life"] == self.life and status["epoch"] == self.epoch
            if not same or status["draining"] or status["state"] != "serving":
                self.disconnect()
                return False
            if status["lapsed"]:
                return None
            with self.deciding:
                if not self._given_up:  # by another thread, since it was asked
                    self.state = "serving"
                return not self._given_up

    def ask(self, kind: str, header: Json) -> Json:
        """An action that needs no rows, and its answer."""
        return self._act(kind, header)[0]

    def status(self) -> Json:
        """What the server says of itself; nothing where it is lost."""
        try:
            return self._act("status")[0]
        except ShardLostError:
            return {}

    def own_status(self, about: Json) -> Json:
        """What the server says of itself and what it is asked about; a shard whose place another
        server or epoch has taken is lost."""
        status = self._act("status", about)[0]
        if status["life"] != self.life or status["epoch"] != self.epoch:
            raise self.lose()
        return status

    def alive(self) -> bool:
        """Whether the server still is what it was; a shard that is not is lost."""
        with self._lock:
            try:
                deadline = min(self.timing.deadline, _GREETING)
                status, _ = self._open().act("status", deadline=deadline)
                same = bool(status["life"] == self.life and status["epoch"] == self.epoch)
            except ServerError:
                same = False
            if not same:
                self.lose()
            return same

    def serve(self, after: int = 0) -> None:
        """The server answers from here on. Of ranks that push together, the steps up to `after` are
        over, whether its rows have them or not."""
        self._act("serve", {"after": after, "since": self.rows_since, "pushes": self.began_with})
        self.state = "serving"

    def release(self, coordinator: str, *, stay: bool = False) -> None:
        """Tells the server that the run is over, if it is there to hear it; its rows may `stay` for
        the next one."""
        if self.state == "lost":
            return
        header = {"epoch": self.epoch, "coordinator": coordinator, "stay": stay}
        self.state = "lost"
        with suppress(ServerError, SecurityError):
            self._open().act("release", header, deadline=timedelta(seconds=2))

    def _open(self) -> Connection:
        connection = self._connection
        if connection is None:
            self.connect()
            connection = self._connection
        if connection is None:
            raise ServerError(f"{self.address}: another thread has given the connection up")
        return connection

    def _revive(self) -> None:
        """After a failure: connects again if the server is still the same; else it is lost."""
        given_up = self._given_up
        try:
            status = self.connect()
        except ServerError:
            raise self.lose() from None
        same = status["life"] == self.life and status["epoch"] == self.epoch
        if not same or status["draining"] or status.get("lapsed"):
            raise self.lose()
        with self.deciding:
            if given_up or not self._given_up:  # not by another thread, since it was asked
                self.state = "serving" if status["state"] == "serving" else "recovering"
        if self.state != "serving":
            raise ShardLostError((self.index,))

    # -- pulls and pushes ------------------------------------------------------------------------

    def send(self, blob: U8, deadline: timedelta) -> None:
        connection = self._awaited = self._open()
        connection.send(blob, deadline)

    def receive(self) -> U8:
        """The reply. What the server refuses comes out as its error."""
        connection = self._awaited  # not a new one of another thread: there nothing would come
        if connection is None:
            raise ServerError(f"{self.address}: nothing is awaited any more")
        blob = connection.receive()
        connection.settled()
        self._awaited = None
        check_reply(blob)
        return blob

    def again(self, blob: U8, deadline: timedelta) -> U8:
        """Sends a request once more on a new connection; the server's own errors come out."""
        with self._lock:  # what other threads ask the server comes to an end first
            self._revive()
        try:
            return self.exchange(blob, deadline)
        except ServerError:
            raise self.lose() from None

    def exchange(self, blob: U8, deadline: timedelta) -> U8:
        """Sends a request and takes its reply, or gives up the stream: left there, the reply would
        be taken for that to the next request."""
        try:
            self.send(blob, deadline)
            return self.receive()
        finally:
            self.settle()

    def lose(self) -> ShardLostError:
        """Counts the server as lost."""
        self.disconnect()
        self.state = "lost"
        return ShardLostError((self.index,))

    def settle(self) -> None:
        """A stream with a reply that nobody took is of no use any more."""
        if (awaited := self._awaited) is not None:
            awaited.close()
            self._forget(awaited)
            self._awaited = None

    # -- rows ------------------------------------------------------------------------------------

    def read(self, table: str, ids: I64) -> Planes:
        frames = []
        for start in range(0, max(1, ids.size), _READ_ROWS):
            some = {"ids": ids[start : start + _READ_ROWS]}
            frames += self._all("read", {"table": table}, some)
        return _joined(frames)

    def read_all(self, table: str) -> tuple[I64, Planes]:
        planes = _joined(self._all("read_all", {"table": table}))
        return planes.pop(""), planes

    def touched_ids(self, table: str) -> I64:
        return _joined(self._all("touched_ids", {"table": table}))["ids"]

    def digest(self, table: str) -> RowDigest:
        reply, _ = self._act("digest", {"table": table}, serving=True)
        return RowDigest(int(reply["rows"]), int(reply["low"], 16), int(reply["high"], 16))

    def check_upsert(self, table: str, ids: I64) -> Bools:
        """Not cut into parts: whether there is room is known of all of them together alone."""
        if ids.size > MAX_IDS:
            raise ConfigError(
                f"an upsert of table {table!r} brings {ids.size} rows to shard {self.index}, and "
                f"room is made for at most {MAX_IDS} at once; no row was changed: upsert fewer "
                "rows at a time"
            )
        _, arrays = self._act("check_upsert", {"table": table}, {"": ids}, serving=True)
        return arrays["known"].astype(np.bool_)

    def upsert(
        self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]], edit: Edit = NO_EDIT,
        after: Json | None = None,
    ) -> None:  # fmt: skip
        """`after` says which push of this client is the last before it. Where one frame does not
        hold all rows, those that are there come first: new ones could evict them."""
        about = {"table": table, "edit": edit, **(after or {})}
        if len(list(row_parts({"": ids, **planes}))) > 1:
            order = np.argsort(~self.check_upsert(table, ids), kind="stable")
            ids, planes = ids[order], {name: values[order] for name, values in planes.items()}
        self._write_rows("upsert", about, ids, planes, serving=True)

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        self._write_rows("install", {"table": table}, ids, planes)

    def _write_rows(
        self, kind: str, header: Json, ids: I64, planes: Mapping[str, npt.NDArray[Any]], *,
        serving: bool = False,
    ) -> None:  # fmt: skip
        """Sends rows, as many at a time as a frame holds."""
        self._in_parts(kind, header, {"": ids, **planes}, serving=serving)

    def delete(self, table: str, ids: I64, edit: Edit = NO_EDIT) -> int:
        replies = self._in_parts("delete", {"table": table, "edit": edit}, {"ids": ids})
        return sum(int(reply["deleted"]) for reply in replies)

    def _in_parts(
        self, kind: str, header: Json, arrays: Mapping[str, npt.NDArray[Any]], *,
        serving: bool = False,
    ) -> list[Json]:  # fmt: skip
        """Asks for rows, as many at a time as a frame holds. An edit counts with the last."""
        *parts, last = row_parts(arrays)
        unfinished = {**header, "edit": NO_EDIT}
        asked = [(unfinished, part) for part in parts] + [(header, last)]
        return [self._act(kind, about, part, serving=serving)[0] for about, part in asked]

    def table_state(self) -> Json:
        state: Json = self._act("table_state", serving=True)[0]["tables"]
        return state

    def load_table_state(self, state: Json) -> Json:
        rows: Json = self._act("load_table_state", {"tables": state})[0]["rows"]
        return rows

    def clear(self) -> None:
        self._act("clear")

    def track(self, priority: Priority | None = None) -> None:
        self._act("track", {"priority": None if priority is None else asdict(priority)})

    def freeze(self, since: str | None, buffer: int) -> Cut[FrozenRows]:
        header = {"since": since, "buffer_nbytes": buffer}
        reply, _ = self._act("freeze", header, serving=True)
        rows = RemoteRows(self, int(reply["freeze"]), reply["pushes"], whole=since != PRIORITISED)
        return Cut([rows], reply["tables"])

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        self._act("forget_changes", {"keep_since_baseline": keep_since_baseline})

    def reaches(self, url: str) -> bool:
        """Whether the server can open that store itself."""
        return is_shared(url)

    def tier_files(self) -> list[Json]:
        """How the files of its tier are doing; none if it does not answer soon: a look at figures
        must not find a server lost, or wait for one."""
        with suppress(EmberkeepError), self.dialed() as connection:
            status, _ = connection.act("status", deadline=_LOOK)
            return list(status.get("tier", {}).get("files", ()))
        return []

    def check_repository(self, url: str, repository: str | None) -> None:
        """Raises `ConfigError` unless the server finds the repository of that id there: a path
        may be another directory on its machine."""
        with self.dialed() as connection:
            reply, _ = connection.act(
                "repository", {"epoch": self.epoch, "url": url}, deadline=self.timing.bulk
            )
        if reply["repository"] != repository:
            raise ConfigError(
                f"shard {self.index} at {self.address} finds "
                f"{'no' if reply['repository'] is None else 'another'} repository under {url}, so "
                "no version was written or read there: use a store that all nodes reach"
            )

    def load_version(
        self, repository: Repository, chain: Sequence[Manifest], names: Mapping[str, str]
    ) -> None:
        """Lets the server read its own rows of a version."""
        self.check_repository(repository.store.url, repository.id)
        header = {
            "url": repository.store.url, "version": str(chain[-1].version), "names": dict(names)
        }  # fmt: skip
        self.until_done("load", header)

    def extract(
        self, url: str, order: RoundOrder, *, most_mb_per_second: float | None
    ) -> ShardRound:
        """Has the server prepare a round of extraction in its part of a grid."""
        header = {
            "url": url, "version": str(order.grid), "order_of_round": order.to_json(),
            "most_mb_per_second": most_mb_per_second, "of": "extract",
        }  # fmt: skip
        answer = self.until_done("extract", header, threading.Event())
        return ShardRound.from_json(answer["round"], order.grid)

    # -- details ---------------------------------------------------------------------------------

    def _act(
        self,
        kind: str,
        header: Json | None = None,
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        serving: bool = False,
    ) -> tuple[Json, Arrays]:
        answers = self._answers(kind, header, arrays, serving)
        if len(answers) != 1:
            raise ProtocolError(f"{kind} was answered by {len(answers)} frames")
        return answers[0]

    def _all(
        self, kind: str, header: Json, arrays: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> list[Arrays]:
        return [answer for _, answer in self._answers(kind, header, arrays, True)]

    def _answers(
        self, kind: str, header: Json | None, arrays: Mapping[str, npt.NDArray[Any]] | None,
        serving: bool,
    ) -> list[tuple[Json, Arrays]]:  # fmt: skip
        if self.state == "lost" or (serving and self.state != "serving"):
            raise ShardLostError((self.index,))
        header = {**(header or {}), "epoch": self.epoch}
        with self._lock:
            deadline = self._deadline(kind, arrays)
            for attempt in (1, 2):
                try:
                    ordered = self.ordered(kind, header)  # another for each attempt
                    return list(self._open().stream(kind, ordered, arrays, deadline=deadline))
                except ServerError:
                    if attempt == 2:  # whether it is dead is found out by who survives the loss
                        raise self.lose() from None
                    self._revive()
        raise AssertionError

    def _deadline(self, kind: str, arrays: Mapping[str, npt.NDArray[Any]] | None) -> timedelta:
        if kind in _BY_ROW and arrays:
            rows = max(len(array) for array in arrays.values())
            nbytes = sum(array.nbytes for array in arrays.values())
            return min(self.timing.bulk, self.timing.moving(nbytes) + rows * _ROW)
        return self.timing.bulk if kind in _BULK else self.timing.deadline

    def ordered(self, kind: str, header: Json) -> Json:
        """With the place of this request among those of this client that change the shard."""
        way = _ORDERED.get(kind)
        if way is None:
            return header
        return {**header, "order": [f"{self._incarnation:x} {way}", next(self._orders)]}

    def until_done(self, kind: str, header: Json, cancelled: threading.Event | None = None) -> Json:
        """Starts long work on the server and asks until it has ended, each time on a deadline.

        However long it takes, `DeadlineError` if it makes no progress for as long as `bulk`. Work
        that was `cancelled` has ended when this does; what cannot be is left when the process is
        asked to stop.
        """
        header = {**header, "epoch": self.epoch}
        with self.dialed() as connection:
            connection.act(kind, self.ordered(kind, header), deadline=self.timing.deadline)
            what = f"{kind} version {header['version']}"
            return self._await_work(connection, header, what, cancelled)

    def _await_work(
        self, connection: Connection, header: Json, what: str,
        cancelled: threading.Event | None = None,
    ) -> Json:  # fmt: skip
        deadline, began = self.timing.deadline, self._clock.monotonic()
        progress, given_up = Progress(self.timing.bulk, self._clock), False
        awaited = f"shard {self.index} at {self.address} to {what}"
        while True:
            answer, _ = connection.act("work", header, deadline=deadline)
            if answer["done"] and not given_up:
                return answer
            if answer["done"]:
                raise CancelledError(f"the work of shard {self.index} was given up")
            if cancelled is not None and cancelled.is_set() and not given_up:
                # It ends soon: until then the server takes no other work.
                connection.act("cancel", header, deadline=deadline)
                given_up = True
            progress.require(answer["progress"], lambda: awaited)
            if cancelled is None:
                self.stop.look(awaited)
            # Work that has ended waits for a tenth of its time at most until that is heard.
            waited = (self._clock.monotonic() - began) / 10
            self._clock.sleep(min(max(_POLL_SECONDS[0], waited), _POLL_SECONDS[1]))

    @contextmanager
    def dialed(self) -> Iterator[Connection]:
        """Another connection to the server, for as long as the body lasts; `ShardLostError` where
        it does not answer."""
        connection = self._dial()
        try:
            yield connection
        except ServerError:
            raise ShardLostError((self.index,)) from None
        finally:
            connection.close()


def _joined(frames: Sequence[Arrays]) -> Arrays:
    """The rows that came in these frames, plane by plane."""
    return {name: np.concatenate([frame[name] for frame in frames]) for name in frames[0]}


def places(shards: Sequence[RemoteShard]) -> str:
    """Which shards, and where their servers are."""
    return ", ".join(f"shard {shard.index} at {shard.address}" for shard in shards)


def nobody_there(shards: Sequence[RemoteShard], seconds: float) -> str:
    """What is to be done about servers that have not answered for so long."""
    return (
        f"{places(shards)}: silent for {seconds:.0f} s, and no other server was started there; "
        "start emberkeep serve there, and the run again to resume its newest version"
    )
