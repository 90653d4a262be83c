"""A server loads its rows of a version: all of them, or those that have changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from emberkeep._types import I64, Json
from emberkeep.checkpoint.restore import load_shard, rewind_shard, saved_by
from emberkeep.checkpoint.target_view import TargetView, ViewPart
from emberkeep.checkpoint.widths import is_lossy
from emberkeep.cluster.table_states import of_shard
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.repository.grid.catalog import grid_of
from emberkeep.runtime.pool import Pool
from emberkeep.server.epoch import Epoch


def load_rows(
    epoch: Epoch, repository: Repository, version: VersionId, names: Mapping[str, str],
    pool: Pool, advance: Callable[[], object],
) -> Json:  # fmt: skip
    """Replaces all rows by this shard's part of a version. `names` are those that its tables have
    there; `advance` is called as rows come.

    Rows of the epoch before that were set aside stay where they have not changed since: the same
    bits as if all of them were loaded. Only for a version that is one instant and exact: rows of
    any other are not what they were when it was cut. Those of a grid stand in files of many
    versions, so all of them are loaded.
    """
    manifest = repository.manifest(version)
    exact = manifest.whole and not is_lossy(repository.chain(version), repository.tables)
    complete = {*names} == {table.name for table in epoch.shard.tables}
    in_grid = grid_of(manifest) is not None
    kept = exact and complete and not in_grid and epoch.take_aside(repository.id, version)

    def own_rows(table: str, ids: I64) -> I64:
        advance()
        return epoch.owned_ids.of(table, ids)

    def whose(earlier: Manifest) -> bool:
        return saved_by(earlier, names.values(), epoch.shards)

    with epoch.replacing():
        shard = epoch.shard
        target = TargetView([
            ViewPart(
                shard, {name: own for own, name in names.items()}, own_rows=own_rows,
                own_state=partial(of_shard, shard=shard.index, count=epoch.shards))
        ])  # fmt: skip
        if kept:
            changed = {names.get(own, own): ids for own, ids in shard.changed_ids().items()}
            rewind_shard(repository, version, target, shard.index, whose, pool, changed)
            shard.forget_rewound()
        else:
            target.clear()
            load_shard(repository, version, target, shard.index, whose, pool)
    if manifest.whole:
        epoch.versions.loaded(repository.id, version)
    return {"rewound": kept}
