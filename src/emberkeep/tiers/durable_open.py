"""Opening a tier's file: as it is new, or back at its last durable batch.

Several files make up one tier: each shard has one per slab. A checkpoint is *prepared* in every
file before it is *committed* in any, and `decisions` say whether it was. So every file comes back
at the same batch: what it has committed last, or what it has prepared if that was decided.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from emberkeep._types import Json
from emberkeep.blobs.system_disk import Disk
from emberkeep.errors import ConfigError, DamageError, StateError, TierError
from emberkeep.kernels import batch_rows
from emberkeep.kernels import log_records as kernels
from emberkeep.rows.slab import Slab
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.fields import Fields
from emberkeep.runtime.pool import ForkLock, Pool
from emberkeep.tables import Optimizer, Table, Tier
from emberkeep.tiers import directory, segment_index, upkeep
from emberkeep.tiers.decisions import Decisions, took_place
from emberkeep.tiers.durable_scan import scan
from emberkeep.tiers.log import MOST_ROWS, RowLog
from emberkeep.tiers.record_layout import Layout
from emberkeep.tiers.superblock import (
    START,
    Point,
    Superblock,
    check_schema,
    create,
    read_head,
)
from emberkeep.tiers.tiered_slab import TieredSlab

# What files are made of; tests put others in their place.
SEGMENT_NBYTES = 4 * 2**20
DISK = Disk

_ORIGIN = "seed and init"
_ROW_FILE = re.compile(r"rows-([0-9]{1,9})-[0-9]+\.tier\Z")

_Slab = tuple[int, Optimizer | None]
"""What tables of one tier must share to share a slab."""


def open_slab(
    tables: Sequence[Table], group: Sequence[int], optimizer: Optimizer, *, shard: int, shards: int,
    seed: int, pool: Pool, lock: ForkLock, clock: Clock = SYSTEM_CLOCK,
    kind: type[TieredSlab] = TieredSlab, alone: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> Slab:  # fmt: skip
    """The slab of a group of tables on one shard: in memory, or behind a cache.

    A tiered slab comes back at the last durable batch of its file; a file that never had one is
    started over. `kind` is the cache that goes before the file. `alone` says that the tier is this
    shard's own, its directory and its memory, as on a server. `advance` is called while a long file
    is read.
    """
    own_tables = [tables[t] for t in group]
    tier, default = own_tables[0].tier, optimizer
    optimizer = own_tables[0].trained_by(default)
    if tier is None:
        return Slab(
            own_tables, optimizer, shard=shard, shards=shards, seed=seed, pool=pool, lock=lock
        )
    # Tables of one tier that differ in dim or optimizer have slabs of their own, and share its
    # memory by size.
    nbytes: dict[_Slab, int] = dict.fromkeys(_slabs(tables, tier), 0)
    for table in tables:
        if table.tier == tier:
            width = table.dim + sum(table.trained_by(default).planes(table.dim).values())
            nbytes[table.dim, table.optimizer] += table.slots * width
    dim, own_slab = own_tables[0].dim, (own_tables[0].dim, own_tables[0].optimizer)
    own_rows = sum(table.slots_on(shard, shards) for table in own_tables)
    if own_rows > MOST_ROWS:
        raise ConfigError(
            f"the tables of dim {dim} have {own_rows} rows on shard {shard}, and one file of a "
            f"tier holds {MOST_ROWS} at most: use more shards; nothing was created"
        )
    files = tier_files(tables, shards, shard if alone else None)[tier.path]
    path = os.path.join(tier.path, _file(shard, list(nbytes).index(own_slab)))
    respelled = {
        earlier: table.origin(seed) for table in tables for earlier in table.earlier_origins(seed)
    }
    wanted = _Model(
        [table.name for table in tables],
        [table.name for table in tables if table.tier == tier],
        _schemas(tables, tier, default, shard, shards, seed),
        respelled,
    )
    slab = kind(
        own_tables, optimizer, shard=shard, shards=shards, seed=seed, pool=pool, lock=lock,
        memory=tier.memory,
        share=Fraction(nbytes[own_slab], sum(nbytes.values()) * (1 if alone else shards)),
        open_log=lambda layout: _open_log(
            path, files, wanted, layout, tier.exclusive, clock, alone=alone
        ),
        upkeep=upkeep.run,
    )  # fmt: skip
    try:
        with _opening(path):
            slab.batch = _recover(slab, files, advance)
            Decisions(tier.path, slab.log.disk).forget_recorded(files)
    except BaseException:
        slab.close()
        raise
    return slab


@contextmanager
def _opening(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierError(
            f"{path} cannot be opened: {error.strerror}; nothing was created or changed. Check the "
            "disk and what is mounted, or name a path on a disk that can be written"
        ) from error


def tier_files(
    tables: Sequence[Table], shards: int, only: int | None = None
) -> dict[str, list[str]]:
    """The files of every tier of these tables, by its directory; those of one shard if it has a
    directory of its own."""
    tiers = dict.fromkeys(table.tier for table in tables if table.tier is not None)
    places = range(shards) if only is None else (only,)
    return {
        tier.path: [_file(s, n) for s in places for n in range(len(_slabs(tables, tier)))]
        for tier in tiers
    }


def _slabs(tables: Sequence[Table], tier: Tier) -> list[_Slab]:
    return list(dict.fromkeys((t.dim, t.optimizer) for t in tables if t.tier == tier))


def _file(shard: int, slab: int) -> str:
    return f"rows-{shard}-{slab}.tier"


@dataclass(frozen=True, slots=True)
class _Model:
    """What the files of a shard must agree on with the model that opens them."""

    names: Sequence[str]
    """Of all its tables, in files or in memory."""
    in_tier: Sequence[str]
    """Of those in these files."""
    schemas: Mapping[str, Json]
    """By file."""
    respelled: Mapping[str, str]
    """What earlier releases wrote of where rows come from, and what that is now."""


def _schemas(
    tables: Sequence[Table], tier: Tier, optimizer: Optimizer, shard: int, shards: int, seed: int
) -> dict[str, Json]:
    found = {}
    for number, slab in enumerate(_slabs(tables, tier)):
        own = [t for t in tables if t.tier == tier and (t.dim, t.optimizer) == slab]
        trained_by = own[0].trained_by(optimizer)
        found[_file(shard, number)] = _schema(own, trained_by, shard, shards, seed)
    return found


def _schema(
    tables: Sequence[Table], optimizer: Optimizer, shard: int, shards: int, seed: int
) -> Json:
    """What a file must agree on with the model that opens it."""
    dim = tables[0].dim
    origins = {
        f"table {table.name!r}": {
            "rows": table.rows,
            "capacity": table.capacity,
            "on_full": table.on_full,
            _ORIGIN: table.origin(seed),
        }
        for table in tables
    }
    return {
        "shard": shard,
        "number of shards": shards,
        "planes": {"weight": dim, **optimizer.planes(dim)},
        **origins,
    }


def _respelled(schema: Json, respelled: Mapping[str, str]) -> Json:
    found: Json = {}
    for key, value in schema.items():
        if isinstance(value, dict) and value.get(_ORIGIN) in respelled:
            value = {**value, _ORIGIN: respelled[value[_ORIGIN]]}
        found[key] = value
    return found


def _check_place(top: str, shard: int) -> None:
    """Refuses a directory of one shard that has a batch of another: disks are mounted in each
    other's places, say, and neither is lost."""
    for name in sorted(os.listdir(top)):
        found = _ROW_FILE.match(name)
        if found is None or int(found[1]) == shard:
            continue
        path = os.path.join(top, name)
        try:
            head = read_head(path)[0]
        except DamageError:
            continue
        if head.committed is not None or head.prepared is not None:
            raise StateError(
                f"{path} belongs to shard {found[1]}, and {top} is the place of shard {shard}; "
                "nothing was changed. Mount every disk where it was, or bring the file back to its "
                "place; remove it if nobody needs it"
            )


def _check_model(top: str, wanted: _Model) -> None:
    """Refuses the files of another model, by all that can be read of them, before one is found
    missing or damaged: a file that their model never had is not lost.

    Those that never had a batch say nothing here. One that has knows all tables of its shard, also
    those of other files; before there were decisions that is not certain.
    """
    for name, schema in wanted.schemas.items():
        path = os.path.join(top, name)
        try:
            head = read_head(path)[0] if directory.is_there(path) else None
        except DamageError:
            continue
        point = None if head is None else head.committed or head.prepared
        if head is None or point is None:
            continue
        check_schema(path, _respelled(head.schema, wanted.respelled), schema)
        if not point.nonce:
            continue
        added = [table for table in wanted.in_tier if table not in point.tables]
        removed = [table for table in point.tables if table not in wanted.names]
        if added or removed:
            raise StateError(
                f"{path} belongs to another model: its {len(point.tables)} tables are "
                f"{_difference(removed, added)}, this model's {len(wanted.names)} are "
                f"{_difference(added, removed)}; nothing was changed. Name another path, or build "
                "the model as it was"
            )


def _difference(own: Sequence[str], others: Sequence[str]) -> str:
    """Which tables are of one model alone, and which of the other."""
    parts = [("with", own), ("without", others)]
    return " and ".join(
        f"{how} {', '.join(map(repr, sorted(names)))}" for how, names in parts if names
    )


def _read_heads(top: str, files: Sequence[str]) -> dict[str, Superblock]:
    """The heads of those files of a tier that are there."""
    paths = {name: os.path.join(top, name) for name in files}
    return {name: read_head(path)[0] for name, path in paths.items() if directory.is_there(path)}


def durable_points(top: str, files: Sequence[str], disk: Disk) -> dict[str, Point]:
    """The batch that the files of a tier come back to, as each of them has it; none if there is no
    such batch yet.

    A batch that was prepared and not decided is given up here, durably, before any file goes back.
    """
    heads = _read_heads(top, files)
    missing = [name for name in files if name not in heads]
    states = directory.states(top) if missing else []
    if states:
        raise DamageError(
            f"{os.path.join(top, missing[0])} is missing, although {os.path.join(top, 'state')} "
            f"has {states[-1]}, so there were rows; nothing was changed. Mount the disk or bring "
            f"the file back; to start over, remove {os.path.join(top, 'state')}",
            name=missing[0],
        )
    points = _decided(top, heads, files, disk)
    if not points:
        return {}
    last = max(points.values(), key=lambda point: point.batch)
    for name in files:
        point = points.get(name)
        if point is None or (point.batch, point.nonce) != (last.batch, last.nonce):
            raise DamageError(
                f"{os.path.join(top, name)} is missing or does not hold batch "
                f"{last.batch}, which the other files of this tier have committed; nothing was "
                "changed. Bring it back, or restore a version of a repository into a new tier",
                name=name,
            )
    return points


def _decided(
    top: str, heads: dict[str, Superblock], files: Sequence[str], disk: Disk
) -> dict[str, Point]:
    """For each file the batch that it has committed, or has prepared and was committed."""
    recorded = {h.committed.nonce for h in heads.values() if h.committed is not None}
    batches = [h.committed.batch for h in heads.values() if h.committed is not None]
    lives = {name: heads[name].life if name in heads else 0 for name in files}
    outcomes: dict[str, bool] = {}
    points = {}
    for name, head in heads.items():
        prepared = head.prepared
        point = head.committed
        if prepared is not None and not prepared.nonce:
            # From before there were decisions: what one file has committed is committed.
            if prepared.batch == max(batches, default=None):
                point = prepared
        elif prepared is not None:
            if prepared.nonce not in outcomes:
                outcomes[prepared.nonce] = prepared.nonce in recorded or took_place(
                    prepared, top, lives, disk
                )
            if outcomes[prepared.nonce]:
                point = prepared
        if point is not None:
            points[name] = point
    return points


def _open_log(
    path: str, files: Sequence[str], wanted: _Model, layout: Layout, exclusive: bool, clock: Clock,
    *, alone: bool,
) -> RowLog:  # fmt: skip
    """The file at `path`, made if need be. One that never had a durable batch is made again; where
    the tier is a server's, which outlives models, it may be that of another model."""
    disk = DISK()
    with _opening(path):
        claim = directory.claim(path, exclusive=exclusive, disk=disk)
        try:
            top, name = os.path.split(path)
            schema = wanted.schemas[name]
            if alone:
                _check_place(top, schema["shard"])
            _check_model(top, wanted)
            if directory.is_there(path):
                directory.check_unlocked(path)
                head, sequence = read_head(path)
                if not alone:
                    check_schema(path, _respelled(head.schema, wanted.respelled), schema)
            if durable_points(top, files, disk):
                _check_length(path, head, layout)
            else:
                area_nbytes = _segment_nbytes(SEGMENT_NBYTES, layout)
                head, sequence = create(path, schema, SEGMENT_NBYTES, area_nbytes, disk)
                segment_index.remove(path, disk)
            return RowLog(path, head, sequence, layout, disk, claim, clock)
        except BaseException:
            claim.release()
            raise


def _recover(slab: TieredSlab, files: Sequence[str], advance: Callable[[], object]) -> int | None:
    """Takes a slab that was just made to the durable batch of its file, if there is one."""
    log = slab.log
    top, name = os.path.split(log.path)
    points = durable_points(top, files, log.disk)
    if not points:
        return None
    point = points[name]
    # Blocks up to here were synced before the head was written: the cleaner's copies among them
    # count, although they may be younger than the point, because their originals may be gone.
    synced = max(
        log.head.synced,
        *(p.sequence for p in (log.head.prepared, log.head.committed) if p is not None),
    )
    lives = (*log.head.lives, (point.stamp, synced))
    scanned = scan(slab, point, lives, advance)
    if scanned.indexed and _trained(slab) != point.rows:
        # Be it the index that is wrong: nobody has lost a row until the file itself says so.
        log.index.distrust()
        slab.positions[:] = 0
        slab.touched[:] = 0
        scanned = scan(slab, point, lives, advance)
    found = _trained(slab)
    if found != point.rows:
        raise DamageError(
            f"{log.path} holds {found} rows of batch {point.batch}, which had {point.rows}: blocks "
            "of it are lost; nothing was changed. Restore a version of a repository into a new "
            "tier",
            name=log.path,
        )
    kernels.count_live(slab.positions, log.slots, log.live)
    for segment in range(log.states.size):
        log.adopt(segment)
    holding = set(np.flatnonzero(log.live).tolist())
    log.index.opened(scanned.indexed & holding, scanned.read & holding, log.clock.monotonic())
    log.sequence = scanned.sequence + 1
    slab.stamp, slab.trained, slab.floor = point.stamp, found, point.floor
    _rebuild(slab, point)
    kept = lives[scanned.first_life - log.head.first_life :]
    changes = {
        "prepared": None, "committed": point, "first_life": scanned.first_life, "lives": kept,
        "synced": synced,
    }  # fmt: skip
    log.reserve_head(**changes, **log.free_now())
    log.write_head(**changes, **log.free_now())
    log.horizon = point.stamp
    return point.batch


def _trained(slab: TieredSlab) -> int:
    return int(batch_rows.count_bits(slab.touched, 0, slab.touched.size))


def _check_length(path: str, head: Superblock, layout: Layout) -> None:
    """Before anything is as long as the head says that the file is."""
    size = os.path.getsize(path)
    expected = START + head.segments * _segment_nbytes(head.segment_nbytes, layout)
    if size < expected:
        raise DamageError(
            f"{path} has {size} bytes and should have {expected}: it was cut short; nothing was "
            "changed. Bring the whole file back, or restore a version of a repository into a new "
            "tier",
            name=path,
        )


def _segment_nbytes(nbytes: int, layout: Layout) -> int:
    return layout.segment_blocks(nbytes) * layout.block_nbytes


def _rebuild(slab: TieredSlab, point: Point) -> None:
    """What is not in records, or follows from them: slots, ticks, steps; every row is dirty."""
    for t, slots in slab.slots.items():
        base = int(slab.bases_T[t])
        held = np.empty(slab.slots_T[t], np.bool_)
        batch_rows.test_bits(slab.touched, np.arange(base, base + slab.slots_T[t]), held)
        slots.occupy(np.flatnonzero(held))
    tables = Fields(slab.log.path, point.tables, "tables.")
    for t, table in enumerate(slab.tables):
        state = tables.object(table.name)
        slab.steps_T[t] = state.number("steps")
        slab.edits_T[t] = state.number("edits") if "edits" in state else 0
        if t in slab.slots:
            slab.slots[t].next_tick = state.number("tick")
    np.bitwise_or(slab.dirty, slab.touched, out=slab.dirty)
