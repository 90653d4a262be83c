"""From a repository into memory: what a version is loaded into, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, Json
from emberkeep.blobs import Call, caller_of
from emberkeep.checkpoint.contents import checked_rows, rows_of_files
from emberkeep.checkpoint.target_view import TargetView, view_of
from emberkeep.checkpoint.targets import DENSE, LoadsItself, Subject
from emberkeep.cluster.base import Cluster
from emberkeep.errors import ChangedError, DamageError, StateError, StorageError
from emberkeep.repository import FileRef, Manifest, Repository, VersionId
from emberkeep.repository.grid.catalog import Catalog, GridPlan, grid_of, plan
from emberkeep.repository.grid.version_rows import scattered_rows
from emberkeep.repository.pieces import KIND, counts_of
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.pool import Pool
from emberkeep.runtime.readahead import ahead_of

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A version that was brought back."""

    manifest: Manifest
    dense: bytes | None
    lost: tuple[VersionId, ...] = ()
    planned: GridPlan | None = None
    """Where its rows were found, if this process has read them from a grid."""


Fits = Callable[[Restored], object]
Whose = Callable[[Manifest], bool]


def load(
    repository: Repository,
    version: VersionId,
    subject: Subject,
    pool: Pool,
    fits: Fits | None = None,
    catalog: Catalog | None = None,
) -> Restored:
    """Replaces every row of the subject by those of a version. What can, loads itself; rows of
    servers that another process coordinates are left to that one. `fits` is asked before any row
    changes; some may have been read by then. A `catalog` of the version's grid that was read before
    spares a look for one."""
    check_schema(repository.tables, subject.schema())
    view = TargetView([p for p in view_of(subject).parts if getattr(p.target, "coordinates", True)])
    return load_into(repository, version, view, pool, fits, catalog)


def load_into(
    repository: Repository, version: VersionId, view: TargetView, pool: Pool, fits: Fits | None,
    catalog: Catalog | None = None,
) -> Restored:  # fmt: skip
    """`load` into whatever is given, fitting or made to."""
    chain = repository.chain(version)
    manifest = chain[-1]
    for earlier in chain:
        earlier.described.text("kind")
    table_state(manifest)
    beside = Call(repository.store, partial(read_beside, repository, manifest))

    def admit() -> Restored:
        restored = beside.result()
        if fits is not None:
            fits(restored)
        for part in view.parts:
            part.check_room(manifest.layout["tables"])
        return restored

    installed = TargetView([part for part in view.parts if part.names])
    if _is_read_ahead(installed, repository, manifest):
        # Rows are on their way while it is found out whether they are wanted.
        gate = _Gate(admit, installed.clear)
        planned = _load_rows(repository, chain, installed, pool, lambda _: None, catalog, gate)
        return replace(beside.result(), planned=planned)
    restored = admit()
    rest = _load_by_holders(view, repository, chain)
    if rest.parts:
        rest.clear()
        planned = _load_rows(repository, chain, rest, pool, lambda _: None)
        return replace(restored, planned=planned)
    return restored


class _Gate:
    """What has to be done once, before the first row changes."""

    def __init__(self, *first: Callable[[], object]) -> None:
        self._first = first

    def __call__(self) -> None:
        first, self._first = self._first, ()
        for call in first:
            call()


def _is_read_ahead(view: TargetView, repository: Repository, manifest: Manifest) -> bool:
    """Whether rows are asked for before it is known that they may be installed: where that takes a
    round trip, and this process installs all of them."""
    return (
        caller_of(repository.store) is not None
        and grid_of(manifest) is not None
        and bool(view.parts)
        and not any(_loads_itself(part.target, repository) for part in view.parts)
    )


def _loads_itself(target: object, repository: Repository) -> bool:
    return isinstance(target, LoadsItself) and target.reaches(repository.store.url)


def read_beside(repository: Repository, manifest: Manifest) -> Restored:
    """What a version holds beside rows."""
    files = manifest.of_kind(DENSE)
    return Restored(manifest=manifest, dense=repository.read(files[0]) if files else None)


def check_holders(subject: Subject, url: str, repository: str | None) -> None:
    """Raises unless all that write and read versions themselves find the repository of that id
    where this process does, or none, as it does; the message names the first that does not."""
    for part in view_of(subject).parts:
        holder = part.target
        if isinstance(holder, LoadsItself) and holder.reaches(url):
            try:
                holder.check_repository(url, repository)
            except (DamageError, StorageError):
                for shard in holder.handles if isinstance(holder, Cluster) else ():
                    _check_shard(shard, url, repository)
                raise


def _check_shard(shard: Any, url: str, repository: str | None) -> None:
    try:
        shard.check_repository(url, repository)
    except (DamageError, StorageError) as error:
        raise type(error)(
            f"shard {shard.index} at {shard.address} cannot open the repository under {url}, so no "
            f"version was written or read there: {error}; use a store that all nodes reach"
        ) from error


def _load_by_holders(
    view: TargetView, repository: Repository, chain: Sequence[Manifest]
) -> TargetView:
    """Lets those load the version that can; what is left to be loaded by this process."""
    rest = []
    for part in view.parts:
        target = part.target
        if isinstance(target, LoadsItself) and _loads_itself(target, repository):
            target.load_version(repository, chain, {own: name for name, own in part.names.items()})
            part.load_table_state(chain[-1].layout["tables"])  # says what had no room
        elif part.names:
            rest.append(part)
    return TargetView(rest)


def _load_rows(
    repository: Repository, chain: Sequence[Manifest], target: TargetView, pool: Pool,
    shard_of: Callable[[Manifest], int | None], catalog: Catalog | None = None,
    gate: _Gate | None = None,
) -> GridPlan | None:  # fmt: skip
    """The rows of the last version of a chain; of versions of which `shard_of` names a shard, its
    files alone. Where those of a grid were found."""
    planned = None
    if grid_of(chain[-1]) is not None:
        planned = _load_grid(
            repository, chain[-1], target, pool, shard_of(chain[-1]), catalog, gate or _Gate()
        )
    else:
        files = [file for earlier in chain for file in files_of(earlier, shard_of(earlier))]
        with closing(rows_of_files(repository, files, pool)) as rows:
            _install(
                target, chain,
                lambda earlier: _chunks(islice(rows, len(files_of(earlier, shard_of(earlier))))),
                lambda earlier: _removals(repository, earlier, pool, shard_of(earlier)),
            )  # fmt: skip
    target.load_table_state(table_state(chain[-1]))
    return planned


def _load_grid(
    repository: Repository, manifest: Manifest, target: TargetView, pool: Pool, shard: int | None,
    catalog: Catalog | None, gate: _Gate,
) -> GridPlan:  # fmt: skip
    """Each row once, in whatever order its pieces stand; again if they were moved meanwhile."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            planned = plan(repository, manifest, catalog, shard=shard)
            assert planned is not None
            for rows, busy in scattered_rows(repository, planned, pool):
                gate()
                assert rows.planes is not None
                target.install_scattered(
                    rows.tables, rows.offsets, rows.ids, rows.planes, busy=busy
                )
        except ChangedError:
            if left:
                catalog = None
                continue
            raise
        except DamageError:
            gate()  # a version that is refused is not called damaged
            raise
        gate()
        target.forget_changes(keep_since_baseline=False)
        return planned
    raise AssertionError("the last attempt returns or raises")


def load_shard(
    repository: Repository, version: VersionId, target: TargetView, shard: int, whose: Whose,
    pool: Pool,
) -> Manifest:  # fmt: skip
    """Brings the newest saved value of every row of one shard into an empty replacement of it.

    Where files hold the rows of one shard each, only those of this one are read: `whose` says
    whether a version was saved by the shards that there are now. The target passes over rows that
    are not its own. Trackers are left as the ids of the versions say: what a prioritised version
    brought has changed since the last whole one.
    """
    chain = repository.chain(version)
    rest = _load_by_holders(target, repository, chain)
    if rest.parts:
        _load_rows(repository, chain, rest, pool, lambda earlier: shard if whose(earlier) else None)
    return chain[-1]


def rewind_shard(
    repository: Repository, version: VersionId, target: TargetView, shard: int, whose: Whose,
    pool: Pool, changed: Mapping[str, I64],
) -> None:  # fmt: skip
    """`load_shard` into rows that were those of the version, but for the `changed` ones: ids
    ascending, by table. The newest files are read first, and none once all rows are found.

    Trackers do not follow: what changed is marked, and is to be forgotten by the caller.
    """
    chain = repository.chain(version)
    left = {name: ids for name, ids in changed.items() if ids.size}
    for name, ids in left.items():
        target.delete(name, ids)  # also those that came since; it makes room in dynamic tables
    for manifest in reversed(chain):
        met = {name: np.zeros(ids.size, np.bool_) for name, ids in left.items()}
        for file in manifest.of_kind(KIND):
            another = whose(manifest) and file.metadata.get("shard", shard) != shard
            held = {*counts_of(file, "rows"), *counts_of(file, "tombstones")}
            if another or not held.intersection(left):
                continue
            for chunk in ahead_of(checked_rows(repository, file, pool)):
                if chunk.table not in left:
                    continue
                at = _changed_in(chunk.ids, left[chunk.table], met[chunk.table])
                if chunk.planes is not None and at.size:
                    planes = {name: values[at] for name, values in chunk.planes.items()}
                    target.install(chunk.table, chunk.ids[at], planes)
        # Not before: an id that left and came back is listed as both.
        left = {name: ids[~met[name]] for name, ids in left.items()}
        left = {name: ids for name, ids in left.items() if ids.size}
        if not left:
            break
    target.load_table_state(table_state(chain[-1]))


def _changed_in(ids: I64, changed: I64, met: npt.NDArray[np.bool_]) -> I64:
    """Where in the ids of a chunk the changed ones stand, which are marked as met. Both ascend."""
    if not ids.size:
        return ids
    first, last = np.searchsorted(changed, ids[0]), np.searchsorted(changed, ids[-1], "right")
    part = slice(first, last)
    at = np.searchsorted(ids, changed[part])
    found = ids[at] == changed[part]
    met[part] |= found
    positions: I64 = at[found]
    return positions


def _install(
    target: TargetView,
    chain: Sequence[Manifest],
    rows: Callable[[Manifest], Iterator[Chunk]],
    removals: Callable[[Manifest], Iterator[Chunk]],
) -> None:
    """Loads versions one over the other, oldest first."""
    last_whole = max((at for at, earlier in enumerate(chain) if earlier.whole), default=-1)
    for at, earlier in enumerate(chain):
        for chunk in removals(earlier):
            target.delete(chunk.table, chunk.ids)
        with closing(ahead_of(rows(earlier))) as chunks:
            for chunk in chunks:
                if chunk.planes is None:
                    target.delete(chunk.table, chunk.ids)
                else:
                    target.install(chunk.table, chunk.ids, chunk.planes)
        if earlier.described.text("kind") == "full":
            target.forget_changes(keep_since_baseline=False)
        if at == last_whole:
            target.forget_changes(keep_since_baseline=True)


def shortened(differences: Sequence[str], most: int = 6) -> str:
    """Differences for one line: the first ones, and how many more there are."""
    more = len(differences) - most
    return "; ".join([*differences[:most], *([f"and {more} more"] if more > 0 else [])])


def rows_of(
    repository: Repository, manifest: Manifest, pool: Pool, shard: int | None = None
) -> Iterator[Chunk]:
    """The rows that one version wrote itself, or one shard of it, file by file."""
    with closing(rows_of_files(repository, files_of(manifest, shard), pool)) as rows:
        yield from _chunks(rows)


def _chunks(files: Iterable[tuple[FileRef, Iterator[Chunk]]]) -> Iterator[Chunk]:
    for _, chunks in files:
        yield from chunks


def files_of(manifest: Manifest, shard: int | None) -> list[FileRef]:
    """The files of rows that a version wrote itself, or those of one shard."""
    return [
        file
        for file in manifest.of_kind(KIND)
        if shard is None or file.metadata.get("shard", shard) == shard
    ]


def table_state(manifest: Manifest) -> Json:
    """What a version knows of its tables beside their rows: steps and ticks."""
    tables = manifest.described.object("tables")
    for name in tables:
        table = tables.object(name)
        for field in ("steps", "tick"):
            if field in table:
                table.number(field)
        if "ticks" in table and min(table.list_of("ticks", int), default=0) < 0:
            raise table.wrong("ticks", "numbers from 0 up")
    return manifest.described.plain("tables")


def saved_by(manifest: Manifest, tables: Iterable[str], shards: int) -> bool:
    """Whether a version's files hold the rows of these tables shard by shard, so many shards: each
    cluster of a model has a number of its own."""
    saved = table_state(manifest)
    return all(len(saved.get(name, {}).get("ticks", ())) == shards for name in tables)


def saved_by_same_shards(manifest: Manifest, subject: Subject) -> bool:
    """Whether every cluster of the subject has as many shards as when the version was saved."""
    return all(
        saved_by(manifest, part.names, part.target.shard_count)
        for part in view_of(subject).parts
        if isinstance(part.target, Cluster)
    )


def _removals(
    repository: Repository, manifest: Manifest, pool: Pool, shard: int | None
) -> Iterator[Chunk]:
    """What left dynamic tables, of all shards of a version: where fewer shards load it, it makes
    room for rows of a shard that has grown, whose files may come before."""
    files = manifest.of_kind(KIND)
    if shard is not None or len({file.metadata.get("shard") for file in files}) < 2:
        return
    tables = repository.tables
    dynamic = {name for name, table in tables.items() if table.get("rows") is None}
    for file in files:
        if dynamic.intersection(file.metadata.get("tombstones", ())):
            for chunk in checked_rows(repository, file, pool):
                if chunk.planes is None and chunk.table in dynamic:
                    yield chunk


def check_schema(saved: Json, present: Json) -> None:
    """Refuses to mix runs: names every table and plane of the repository that differs."""
    wrong = []
    for name in sorted({*saved, *present["tables"]}):
        was, now = saved.get(name), present["tables"].get(name)
        if was is None:
            wrong.append(f"table {name!r} is not in the repository")
        elif now is None:
            wrong.append(f"table {name!r} of the repository is not in the model")
        else:
            wrong.extend(
                f"table {name!r}: {key} was {was.get(key)}, is {now.get(key)}"
                for key in sorted({*was, *now})
                if was.get(key) != now.get(key)
            )
    if wrong:
        raise StateError(
            "the model does not fit the repository: "
            + shortened(wrong)
            + "; build the model as it was saved, or start in another repository from what fits of "
            "this one: keeper.resume(source=..., partial=True)"
        )
