"""The tier of a server: where its rows live, what an operator sees of it, and the batches that its
run makes durable there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from emberkeep._types import Json
from emberkeep.cluster.shard import Shard
from emberkeep.errors import CancelledError, ConfigError, DamageError, EpochError, TierInUseError
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.pool import Pool
from emberkeep.server.epoch import Epoch
from emberkeep.server.server_events import ServerEvents
from emberkeep.tables import Optimizer, Table, Tier
from emberkeep.tiers.decisions import took_place
from emberkeep.tiers.directory import claim, make_directory
from emberkeep.tiers.durable_open import DISK
from emberkeep.tiers.tier_use import TierUse
from emberkeep.tiers.tiered_slab import Saving, TieredSlab

_POLL_SECONDS = 0.1
_Outcome = tuple[TieredSlab, str, bool]  # a file, the nonce of a batch, whether it took place
DAMAGED = "damaged"
"""Where files of a shard are moved that cannot be read, beside those that take their place."""


@dataclass(frozen=True, slots=True)
class ServerTier:
    """All tables of a server live in files below one path, each shard's in a directory of its own:
    whatever place a server is given, it finds what that shard has left there, and nothing else.
    The memory is this server's."""

    tier: Tier

    def directory(self, shard: int) -> str:
        return os.path.join(self.tier.path, f"shard-{shard}")

    def holding(self, tables: Sequence[Table], shard: int) -> list[Table]:
        """The tables, as this server keeps them."""
        given = [table.name for table in tables if table.tier is not None]
        if given:
            raise ConfigError(
                f"table {given[0]!r} has a tier of its own, and on servers the tier is the "
                "servers': leave out tier= of the tables"
            )
        own = Tier(self.directory(shard), memory=self.tier.memory, exclusive=self.tier.exclusive)
        return [replace(table, tier=own) for table in tables]

    def holds(self, shard: int, name: str | None) -> bool:
        """Whether what a damage is of is a file with rows of a shard; by its path, or by its name
        there. Objects of a store have names without a directory, too."""
        here = os.path.realpath(self.directory(shard))
        top, file = os.path.split(os.path.join(here, name or ""))
        row_file = re.fullmatch(rf"rows-{shard}-[0-9]+\.tier", file)
        return row_file is not None and os.path.realpath(top) == here

    def move_damaged(self, shard: int) -> str:
        """Moves the files of a shard to a directory beside them, in the place of what was moved
        there before; nothing of them is changed."""
        here, disk = self.directory(shard), DISK()
        beside = os.path.join(here, DAMAGED)
        names = [name for name in os.listdir(here) if name.endswith((".tier", ".index"))]
        claims = [
            claim(os.path.join(here, n), exclusive=self.tier.exclusive, disk=disk) for n in names
        ]
        try:
            make_directory(beside, disk)
            for name in os.listdir(beside):
                os.unlink(os.path.join(beside, name))
            for name in names:
                os.rename(os.path.join(here, name), os.path.join(beside, name))
            for path in (beside, here):
                disk.sync_directory(path)
        finally:
            for held in claims:
                held.release()
        return beside

    def status(self, epoch: Epoch | None) -> Json:
        """Where it is, and how its files are doing."""
        files = [] if epoch is None else epoch.shard.tier_status()
        use = TierUse.of(files)
        return {
            "path": self.tier.path,
            "memory_nbytes": self.tier.memory,
            "files": [asdict(file) for file in files],
            "use": None if use is None else asdict(use),
        }


def open_shard(
    tier: ServerTier | None, header: Json, tables: Sequence[Table], optimizer: Optimizer, *,
    pool: Pool, clock: Clock, advance: Callable[[], object], tell: ServerEvents,
) -> Shard:  # fmt: skip
    """The shard that a coordinator asks for: empty, or at the durable batch of its files.

    Files that are damaged are moved to where they harm nobody, which an event says, and it is
    empty: a version of the run's repository has its rows. They are not removed.

    Files that are in use are waited for, as long as a lease: the server that had them, of a trainer
    that was killed say, may take a moment to end.
    """
    index, number = int(header["shard"]), int(header["epoch"])
    if tier is not None:
        tables = tier.holding(tables, index)
    until = clock.monotonic() + float(header["lease_seconds"])
    moved = False
    while True:
        try:
            return Shard(
                tables, optimizer, index=index, count=int(header["shards"]),
                seed=int(header["seed"]), pool=pool, epoch=number, state="recovering",
                clock=clock, alone=tier is not None, advance=advance,
            )  # fmt: skip
        except TierInUseError:
            if clock.monotonic() > until:
                raise
        except DamageError as error:
            # Of a decision nothing is known but that it is damaged: its files may be whole.
            if tier is None or moved or not tier.holds(index, error.name):
                raise
            moved = True
            where = tier.move_damaged(index)
            tell("tier_damaged", {"shard": index, "moved_to": where, "error": str(error)})
            continue
        advance()
        clock.sleep(_POLL_SECONDS)


# -- batches of a run ----------------------------------------------------------------------------


def ask(epoch: Epoch, header: Json) -> Json:
    """What the coordinator wants of the files of one shard, for all of them at once."""
    return _ASKED[str(header["ask"])](epoch, header)


def settle(shard: Shard) -> None:
    """Gives up the batch under way, and has files record what was decided about one that they have
    prepared; if nobody has decided, it is given up."""
    slabs = shard.tier_slabs()
    _give_up(slabs)
    _record_all(_outcomes(slabs))


def _give_up(slabs: Sequence[TieredSlab]) -> None:
    """The batch under way; what was prepared waits for what is decided about it."""
    for slab in slabs:
        slab.abandon()


def _outcomes(slabs: Sequence[TieredSlab]) -> list[_Outcome]:
    """Asks the store, which may take long: files may have recorded other batches by then."""
    found: list[_Outcome] = []
    for slab in slabs:
        prepared = slab.log.prepared
        if prepared is not None:
            top, name = os.path.split(slab.log.path)
            lives = {name: slab.log.head.life}
            committed = took_place(prepared, top, lives, slab.log.disk)
            found.append((slab, prepared.nonce, committed))
    return found


def _record_all(outcomes: Sequence[_Outcome]) -> None:
    for slab, nonce, committed in outcomes:
        _record_one(slab, nonce, committed=committed)


def _record_one(slab: TieredSlab, nonce: str, *, committed: bool) -> bool:
    """Whether it was the batch that the file has prepared; else nothing is changed."""
    return slab.commit(nonce) if committed else slab.log.unprepare(nonce)


def _points(epoch: Epoch, header: Json) -> Json:
    """The batch that the files come back to; whether rows are as they were then."""
    slabs = epoch.shard.tier_slabs()
    points = [slab.log.head.committed for slab in slabs]
    # Opening has seen to it that they are the same, and commits are made of all of them.
    first = points[0] if points else None
    known = first is not None and len({(p and p.batch, p and p.nonce) for p in points}) == 1
    return {
        "point": {"batch": first.batch, "nonce": first.nonce, "run": first.run}
        if known and first is not None
        else None,
        "steps": {} if first is None else {n: t["steps"] for n, t in first.tables.items()},
        "unchanged": all(slab.unchanged for slab in slabs),
    }


def _prepare(epoch: Epoch, header: Json) -> Json:
    """Declares the rows to be those of a batch, as they are now. The same again changes nothing,
    and has the same answer. The epoch keeps its rows as long as no push is applied: what became of
    them while the store was asked is seen then."""
    batch, nonce, home, run = (header[name] for name in ("batch", "nonce", "home", "run"))
    epoch.store(str(home))  # that of its versions, and no other
    with epoch.between_pushes():
        slabs = epoch.shard.tiers()
        if (pushes := _under_way(slabs, nonce)) is not None:
            return {"pushes": pushes}
        _give_up(slabs)
    # Its coordinator may have been cut off when one was decided.
    outcomes = _outcomes(slabs)
    with epoch.between_pushes() as now:
        slabs = epoch.shard.tiers()
        _record_all(outcomes)
        if (pushes := _under_way(slabs, nonce)) is not None:
            return {"pushes": pushes}
        _give_up(slabs)
        try:
            for slab in slabs:
                tables = epoch.shard.table_state()
                slab.checkpoint(int(batch), tables, str(nonce), str(home), str(run), now)
        except BaseException:  # under way in all of them, or in none
            _give_up(slabs)
            raise
    return {"pushes": now}


def _under_way(slabs: Sequence[TieredSlab], nonce: str) -> Mapping[str, int] | None:
    """The pushes that rows of this batch hold, if every file is saving it. Refused once a file has
    recorded it: its rows would be those of a later step."""
    if any((point := s.log.head.committed) is not None and point.nonce == nonce for s in slabs):
        raise EpochError("this batch was committed before: the request is late")
    savings = [saving for slab in slabs if (saving := slab.saving) is not None]
    if len(savings) < len(slabs) or any(saving.nonce != nonce for saving in savings):
        return None
    return savings[0].pushes if savings else None


def _prepared(epoch: Epoch, header: Json) -> Json:
    """Whether every file could come back to the batch; raises why one cannot, also once it was
    given up for that."""
    slabs = epoch.shard.tier_slabs()
    under_way, waiting = 0, list[Saving]()
    faults = list[BaseException]()
    for slab in slabs:
        # In this order: what is given up in between is found there.
        saving, given_up = slab.saving, slab.given_up
        found = _of_batch(saving, header) or _of_batch(given_up, header)
        under_way += found is not None and found is saving
        if found is None:
            continue
        if not found.prepared.done():
            waiting.append(found)
        elif (error := found.prepared.exception()) is not None:
            faults.append(error)
    # Files that had no fault may have given it up for that of another.
    for error in sorted(faults, key=lambda error: isinstance(error, CancelledError)):
        raise error
    if under_way < len(slabs):
        raise CancelledError(f"batch {header['batch']} was given up")
    return {"prepared": not waiting, "progress": sum(saving.word for saving in waiting)}


def _of_batch(saving: Saving | None, header: Json) -> Saving | None:
    return saving if saving is not None and saving.nonce == header["nonce"] else None


def _record(epoch: Epoch, header: Json) -> Json:
    """Has every file record what was decided about a batch. It is not recorded, too, while a file
    waits for the outcome of another: documents must stay."""
    recorded = True
    for slab in epoch.shard.tier_slabs():
        if _record_one(slab, str(header["nonce"]), committed=bool(header["committed"])):
            continue
        if slab.log.prepared is not None:
            recorded = False
        elif header["committed"]:
            committed = slab.log.head.committed
            recorded = recorded and committed is not None and committed.nonce == header["nonce"]
    return {"recorded": recorded}


def _abandon(epoch: Epoch, header: Json) -> Json:
    """Gives up the batch under way, unless another epoch has the rows."""
    with epoch.between_pushes():
        _give_up(epoch.shard.tier_slabs())
    return {}


_ASKED: dict[str, Callable[[Epoch, Json], Json]] = {
    "points": _points,
    "prepare": _prepare,
    "prepared": _prepared,
    "record": _record,
    "abandon": _abandon,
}
