"""Whom a server takes for its coordinator, and rows that outlive their trainer: the next one takes
over a server with what it holds."""

from __future__ import annotations

from contextlib import suppress

from emberkeep._types import Json
from emberkeep.cluster.shard import Shard
from emberkeep.errors import ConfigError, EpochError, FencedError, ProtocolError, ServerError
from emberkeep.rows.priority import Priority
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.pool import Pool
from emberkeep.server import tier_service
from emberkeep.server.epoch import Epoch
from emberkeep.server.kept_rows import KeptRows


class Opening:
    """An admission whose files are being opened: there is no epoch yet, and there is a lease."""

    def __init__(self, header: Json, clock: Clock) -> None:
        self.number, self.coordinator = int(header["epoch"]), str(header["coordinator"])
        self.index, self.shards = int(header["shard"]), int(header["shards"])
        self.tables: list[Json] = header["tables"]
        self.lease_seconds = float(header["lease_seconds"])
        self.left = False
        """Whether its coordinator has ended: nobody waits for the files any more."""
        self._clock = clock
        self._heard = clock.monotonic()

    def meant(self, header: Json) -> bool:
        """Whether a message of a coordinator is for this epoch; refused if it is another's."""
        if int(header["epoch"]) != self.number:
            return False
        if str(header.get("coordinator", "")) != self.coordinator:
            raise EpochError(f"epoch {self.number} of this server is another process's")
        return True

    def hear(self) -> None:
        self._heard = self._clock.monotonic()

    @property
    def silent_seconds(self) -> float:
        return self._clock.monotonic() - self._heard

    @property
    def lapsed(self) -> bool:
        return self.left or self.silent_seconds > self.lease_seconds

    def status(self) -> Json:
        """As that of an epoch which has no rows yet."""
        return {
            "epoch": self.number, "state": "recovering", "lapsed": self.lapsed,
            "shard": self.index, "shards": self.shards, "coordinator": self.coordinator,
            "tables": self.tables, "applied": 0, "rows_since": self.number, "dirty_rows": 0,
            "rows": 0, "row_nbytes": 0, "origin": {}, "adoptable": False,
            "lease_age_seconds": self.silent_seconds, "lease_seconds": self.lease_seconds,
        }  # fmt: skip


_SAME = ("tables", "optimizer", "seed", "shards", "shard")


def check_place(place: tuple[int, int] | None, index: int, count: int, number: int) -> None:
    """Refuses a place among the shards that there cannot be, or that is not the server's."""
    if not 0 <= index < count <= 2**16 or number < 1:
        raise ProtocolError(f"there is no shard {index} of {count} in epoch {number}")
    if place not in (None, (index, count)):
        raise ConfigError(
            f"this server is for shard {place[0]} of {place[1]}, not {index} of {count}: name the "
            "addresses of all shards in their order"
        )


def check_turn(
    before: Epoch | Opening | None, known_term: int, last_epoch: int, header: Json
) -> None:
    """Refuses a coordinator while another one holds the lease: a run that begins must not take the
    servers of another from under it. One of an earlier term than the server has known was
    replaced, and is refused for good; one of a later term is not held up by it. No two admissions
    have the same number, also when what was admitted has gone."""
    number, coordinator = int(header["epoch"]), str(header["coordinator"])
    term, begins = int(header["term"]), bool(header.get("begins"))
    if term < known_term:
        raise FencedError(
            "another process coordinates these servers now: this one was replaced, and its rows "
            "may be behind; start it again to resume the newest version"
        )
    if number <= last_epoch:
        raise EpochError(f"epoch {number} is over: this server had {last_epoch}")
    if before is None:
        return
    held = before.coordinator != coordinator and not before.lapsed
    if held and (begins or term == known_term):
        left = before.lease_seconds - before.silent_seconds
        raise ServerError(
            f"shard {before.index} serves another run, whose coordinator is alive: stop that "
            f"run, or try again in {left:.0f} s if it is dead"
        )


def priority_of(header: Json) -> Priority | None:
    """How a coordinator wants rows to be ranked, if at all."""
    priority = header.get("priority")
    return None if priority is None else Priority(**priority)


def origin_of(header: Json) -> Json:
    """What decides which rows there are, and how they are trained."""
    return {key: header[key] for key in _SAME}


def check_rows(before: Epoch | None, header: Json) -> Epoch:
    """The epoch whose rows can be adopted; refused where they are not those that are meant."""
    if before is None or not before.adoptable or before.origin != origin_of(header):
        raise ServerError("this server has no rows of that model that could be adopted")
    return before


def new_epoch(shard: Shard, header: Json, pool: Pool, clock: Clock) -> Epoch:
    """An epoch of a shard that was made for it."""
    epoch = Epoch(
        shard.epoch, shard, shards=int(header["shards"]), coordinator=str(header["coordinator"]),
        lease_seconds=float(header["lease_seconds"]),
        meeting_seconds=float(header["meeting_seconds"]), pool=pool, tables=header["tables"],
        clock=clock,
    )  # fmt: skip
    epoch.origin = origin_of(header)
    return epoch


def keep(before: Epoch | None, header: Json) -> KeptRows | None:
    """The rows of the epoch before, taken from it, for a version of theirs that may be loaded in
    the next; None where there are none of that model. Rows of tiers have files, which say of
    themselves what they come back to."""
    if before is None or not before.adoptable or before.tiered:
        return None
    if before.origin != origin_of(header) or header.get("priority") is not None:
        return None
    with suppress(ServerError):
        return KeptRows(before.hand_over(), before.versions)
    return None


def adopt(before: Epoch, header: Json) -> Epoch:
    """The rows in another epoch, which does not serve yet: nothing of the old one changes them any
    more, and its pushes that were checked and not applied are dropped. What files have prepared is
    settled first, as when they are opened; if that fails, the old epoch keeps its rows."""
    shard, number = before.hand_over(), int(header["epoch"])
    try:
        tier_service.settle(shard)
    except BaseException:
        before.take_back(shard)
        raise
    with shard.lock:
        shard.epoch, shard.state = number, "recovering"
    after = Epoch(
        number, shard, shards=before.shards, coordinator=str(header["coordinator"]),
        lease_seconds=float(header["lease_seconds"]),
        meeting_seconds=float(header["meeting_seconds"]), pool=before.pool, tables=before.tables,
        clock=before.clock,
    )  # fmt: skip
    after.origin, after.repository, after.kept = before.origin, before.repository, True
    after.whole, after.versions = before.whole, before.versions
    after.take_pushes(before)
    return after
