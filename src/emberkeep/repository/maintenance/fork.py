"""A new repository that begins with a version of another one."""

from __future__ import annotations

import dataclasses
import secrets

from emberkeep.blobs import BlobStore
from emberkeep.errors import ConfigError
from emberkeep.repository import names
from emberkeep.repository.grid.catalog import Catalog, GridPlan, files_read, plan, without_deaths
from emberkeep.repository.history import Lineage
from emberkeep.repository.names import VersionId
from emberkeep.repository.pins import Pin
from emberkeep.repository.repository import Repository


def fork(
    source: Repository,
    version: VersionId | int,
    target: BlobStore,
    *,
    exclusive: bool = False,
) -> Repository:
    """Copies a version, with all that it needs, to another root, where a new history starts.

    Files are copied, streamed and checked on the way, so neither repository depends on the other.
    Version numbers stay. The target becomes a repository with the last object written: a fork that
    was interrupted is no repository, and can be repeated.
    """
    if Repository.exists(target):
        raise ConfigError(f"{target.url} already holds a repository: fork to an empty root")
    with Pin(source, version) as pin:
        chain = source.chain(pin.version)
        # What a fork that was interrupted left behind is put again; it has no writers yet.
        there = [info.name for at in (names.VERSIONS, names.WRITERS) for info in target.list(at)]
        others = {*there} - {manifest.name for manifest in chain}
        if others:
            raise ConfigError(
                f"{target.url} holds {min(others)} of something else: fork to an empty root"
            )
        identity = secrets.token_hex(16)
        for manifest in chain:
            planned = plan(source, manifest)
            for file in files_read(manifest, planned):
                pin.renew()
                target.put(file.name, source.stream(file))
            if planned is not None:
                target.put(*_catalog(planned, identity))
        for manifest in chain:
            target.put(manifest.name, dataclasses.replace(manifest, repository=identity).encode())
        ends: dict[int, int] = {}
        for manifest in chain:
            ends[manifest.version.epoch] = manifest.version.number
        return Repository.found(
            target,
            schema=source.schema,
            exclusive=exclusive,
            clock=source.clock,
            lineage=Lineage(tuple(ends.items())),
            forked_from={"repository": source.id, "version": str(pin.version)},
            identity=identity,
            last=True,
        )


def _catalog(planned: GridPlan, identity: str) -> tuple[str, bytes]:
    """The catalog of a grid that ends with the version: later deaths have not been."""
    number = planned.manifest.version.number
    catalog = Catalog(
        grid=planned.catalog.grid,
        generation=1,
        covered=number,
        bundles=without_deaths(planned.bundles, number),
    )
    return catalog.name, catalog.encode(identity)
