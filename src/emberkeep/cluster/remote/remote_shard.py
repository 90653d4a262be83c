"""One shard on a server, as the client of a cluster sees it: a `ShardHandle` over a connection."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, U8, Json, Planes
from emberkeep.blobs import is_shared
from emberkeep.cluster.remote.timing import Timing
from emberkeep.cluster.shard import State
from emberkeep.cluster.table_states import NO_EDIT, Edit
from emberkeep.codecs import Codec
from emberkeep.errors import (
    CancelledError,
    ConfigError,
    EmberkeepError,
    ProtocolError,
    SecurityError,
    ServerError,
    ShardLostError,
)
from emberkeep.repository import Draft, Manifest, Repository
from emberkeep.repository.grid.shard_extraction import RoundOrder, ShardRound
from emberkeep.repository.manifest import FileRef
from emberkeep.rows.priority import Priority
from emberkeep.rows.row_digest import RowDigest
from emberkeep.rows.snapshot import Chunk, Cut, FrozenRows
from emberkeep.rows.tracker import PRIORITISED
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock, Progress
from emberkeep.runtime.fields import Fields
from emberkeep.runtime.stopping import Stop
from emberkeep.wire.connection import Connection
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import FRAME_NBYTES, check_reply
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

Arrays = dict[str, npt.NDArray[Any]]

_POLL_SECONDS = (0.005, 0.1)
_BULK = ("read_all", "touched_ids", "digest", "install", "clear")
# These name their rows: they may take as long as a pull does, and so much more for each row, as one
# may be on a disk that is slow.
_BY_ROW = ("read", "upsert", "delete")
_ROW = timedelta(milliseconds=2)
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
        self._security, self._timing = security, timing
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
        self._connection = self._dial(self._incarnation)
        try:
            status = self._connection.open(min(self._timing.deadline, _GREETING))
        except BaseException:
            self.disconnect()
            raise
        self.tier = status.get("tier")
        return status

    def _dial(self, incarnation: int = 0) -> Connection:
        return Connection(self.address, self._security, incarnation, transport=self._transport)

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

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
        answer, _ = self._open().act("admit", header, deadline=self._timing.deadline)
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
                deadline = min(self._timing.deadline, _GREETING)
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
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        return self._connection

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
        self._awaited = self._open()
        self._awaited.send(blob, deadline)

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
            self.send(blob, deadline)
            return self.receive()
        except ServerError:
            raise self.lose() from None

    def lose(self) -> ShardLostError:
        """Counts the server as lost."""
        self.disconnect()
        self.state = "lost"
        return ShardLostError((self.index,))

    def settle(self) -> None:
        """A stream with a reply that nobody took is of no use any more."""
        if (awaited := self._awaited) is not None:
            awaited.close()
            self._connection = None if awaited is self._connection else self._connection
            self._awaited = None

    # -- rows ------------------------------------------------------------------------------------

    def read(self, table: str, ids: I64) -> Planes:
        return self._act("read", {"table": table}, {"ids": ids}, serving=True)[1]

    def read_all(self, table: str) -> tuple[I64, Planes]:
        frames = self._all("read_all", {"table": table})
        planes = {name: np.concatenate([frame[name] for frame in frames]) for name in frames[0]}
        return planes.pop(""), planes

    def touched_ids(self, table: str) -> I64:
        frames = self._all("touched_ids", {"table": table})
        return np.concatenate([frame["ids"] for frame in frames])

    def digest(self, table: str) -> RowDigest:
        reply, _ = self._act("digest", {"table": table}, serving=True)
        return RowDigest(int(reply["rows"]), int(reply["low"], 16), int(reply["high"], 16))

    def check_upsert(self, table: str, ids: I64) -> None:
        self._act("check_upsert", {"table": table}, {"": ids}, serving=True)

    def upsert(
        self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]], edit: Edit = NO_EDIT,
        after: Json | None = None,
    ) -> None:  # fmt: skip
        """`after` says which push of this client is the last before it."""
        about = {"table": table, "edit": edit, **(after or {})}
        self._write_rows("upsert", about, ids, planes, serving=True)

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        self._write_rows("install", {"table": table}, ids, planes)

    def _write_rows(
        self, kind: str, header: Json, ids: I64, planes: Mapping[str, npt.NDArray[Any]], *,
        serving: bool = False,
    ) -> None:  # fmt: skip
        """Sends rows, as many at a time as a frame holds."""
        row_nbytes = 8 + sum(v.itemsize * v.shape[1] for v in planes.values() if v.ndim == 2)
        step = max(1, FRAME_NBYTES // row_nbytes)
        for start in range(0, max(1, ids.size), step):
            part = slice(start, start + step)
            rows = {"": ids[part], **{name: values[part] for name, values in planes.items()}}
            last = start + step >= ids.size
            self._act(kind, header if last else {**header, "edit": NO_EDIT}, rows, serving=serving)

    def delete(self, table: str, ids: I64, edit: Edit = NO_EDIT) -> int:
        reply, _ = self._act("delete", {"table": table, "edit": edit}, {"ids": ids})
        return int(reply["deleted"])

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
        return Cut([RemoteRows(self, reply["pushes"], since != PRIORITISED)], reply["tables"])

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
                "repository", {"epoch": self.epoch, "url": url}, deadline=self._timing.bulk
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
        self._until_done("load", header)

    def extract(
        self, url: str, order: RoundOrder, *, most_mb_per_second: float | None
    ) -> ShardRound:
        """Has the server prepare a round of extraction in its part of a grid."""
        header = {
            "url": url, "version": str(order.grid), "order_of_round": order.to_json(),
            "most_mb_per_second": most_mb_per_second, "of": "extract",
        }  # fmt: skip
        answer = self._until_done("extract", header, threading.Event())
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

    def _all(self, kind: str, header: Json) -> list[Arrays]:
        return [arrays for _, arrays in self._answers(kind, header, None, True)]

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
                    ordered = self._ordered(kind, header)  # another for each attempt
                    return list(self._open().stream(kind, ordered, arrays, deadline=deadline))
                except ServerError:
                    if attempt == 2:  # whether it is dead is found out by who survives the loss
                        raise self.lose() from None
                    self._revive()
        raise AssertionError

    def _deadline(self, kind: str, arrays: Mapping[str, npt.NDArray[Any]] | None) -> timedelta:
        if kind in _BY_ROW and arrays:
            rows = max(len(array) for array in arrays.values())
            return min(self._timing.bulk, self._timing.deadline + rows * _ROW)
        return self._timing.bulk if kind in _BULK else self._timing.deadline

    def _ordered(self, kind: str, header: Json) -> Json:
        """With the place of this request among those of this client that change the shard."""
        way = _ORDERED.get(kind)
        if way is None:
            return header
        return {**header, "order": [f"{self._incarnation:x} {way}", next(self._orders)]}

    def _until_done(
        self, kind: str, header: Json, cancelled: threading.Event | None = None
    ) -> Json:
        """Starts long work on the server and asks until it has ended, each time on a deadline.

        However long it takes, `DeadlineError` if it makes no progress for as long as `bulk`. Work
        that was `cancelled` has ended when this does; what cannot be is left when the process is
        asked to stop.
        """
        header = {**header, "epoch": self.epoch}
        with self.dialed() as connection:
            connection.act(kind, self._ordered(kind, header), deadline=self._timing.deadline)
            what = f"{kind} version {header['version']}"
            return self._await_work(connection, header, what, cancelled)

    def _await_work(
        self, connection: Connection, header: Json, what: str,
        cancelled: threading.Event | None = None,
    ) -> Json:  # fmt: skip
        deadline, began = self._timing.deadline, self._clock.monotonic()
        progress, given_up = Progress(self._timing.bulk, self._clock), False
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


class RemoteRows:
    """The frozen rows of a server: it writes them to the store itself, or sends them."""

    def __init__(self, shard: RemoteShard, pushes: dict[str, int], whole: bool) -> None:
        self._shard, self._epoch = shard, shard.epoch
        self._pushes, self._whole = pushes, whole
        self._names: dict[str, str] = {}
        self.held_seconds = self.core_seconds = 0.0
        self.pressed = False  # only the server knows, and its own budget heeds it

    def rename(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def reaches(self, url: str) -> bool:
        """Whether a server can write there itself."""
        return is_shared(url)

    def write(
        self, draft: Draft, codecs: Mapping[str, Codec], *, threads: int, nice: int,
        piece_nbytes: int, cancelled: threading.Event, most_mb_per_second: float | None = None,
        background_share: float | None = None,
        grid: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Returns when the server has written its rows, and their files are part of the draft."""
        header = {
            "url": draft.url, "version": str(draft.version), "nonce": draft.nonce,
            "part": draft.next_part(), "block_nbytes": draft.block_nbytes, "names": self._names,
            "threads": threads, "nice": nice, "piece_nbytes": piece_nbytes,
            "most_mb_per_second": most_mb_per_second, "background_share": background_share,
            "codecs": {plane: codec.to_dict() for plane, codec in codecs.items()},
            "grid": grid,
        }  # fmt: skip
        answer = self._shard._until_done("write", header, cancelled)
        files = (Fields("the answer of a server", file) for file in answer["files"])
        draft.adopt([FileRef.of(file) for file in files])
        self.core_seconds = float(answer.get("core_seconds", 0.0))

    def chunks(self, rows: int, cancelled: threading.Event | None = None) -> Iterator[Chunk]:
        header = {"epoch": self._epoch, "rows": rows}
        shard = self._shard
        if shard.epoch != self._epoch:
            raise ShardLostError((shard.index,))
        with shard.dialed() as connection:
            for about, arrays in connection.stream("chunks", header, deadline=shard._timing.bulk):
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError("the snapshot was cancelled for a newer one")
                ids = arrays.pop("")
                table = str(self._names.get(about["table"], about["table"]))
                yield Chunk(table, ids, None if about["tombstones"] else arrays)

    def took_place(self) -> None:
        self._shard.saved_pushes = self._pushes
        if self._whole:
            self._shard.wholly_saved = self._pushes

    def close(self, advanced: Collection[str]) -> None:
        shard = self._shard
        if advanced:  # the version is there, whatever has become of the server
            self.took_place()
        if shard.epoch != self._epoch or shard.state == "lost":
            return
        header = {"epoch": self._epoch, "advanced": list(advanced)}
        # A server that does not answer is gone, and its cursors with it, or the next freeze puts
        # the rows back: a row that is saved once too often is no harm.
        with suppress(ShardLostError), shard.dialed() as connection:
            ordered = shard._ordered("close", header)
            reply, _ = connection.act("close", ordered, deadline=shard._timing.deadline)
            self.held_seconds = float(reply.get("held_seconds", 0.0))


def places(shards: Sequence[RemoteShard]) -> str:
    """Which shards, and where their servers are."""
    return ", ".join(f"shard {shard.index} at {shard.address}" for shard in shards)


def nobody_there(shards: Sequence[RemoteShard], seconds: float) -> str:
    """What is to be done about servers that have not answered for so long."""
    return (
        f"{places(shards)}: silent for {seconds:.0f} s, and no other server was started there; "
        "start emberkeep serve there, and the run again to resume its newest version"
    )
