"""A new repository that begins with a version of another one."""

from __future__ import annotations

import dataclasses
import secrets

import xxhash

from emberkeep.blobs import BlobStore
from emberkeep.blobs.wrapper import ExclusiveStore
from emberkeep.errors import ConfigError, DamageError
from emberkeep.repository import documents, names
from emberkeep.repository.grid.bundles import Bundle
from emberkeep.repository.grid.catalog import (
    Catalog,
    GridPlan,
    Part,
    files_read,
    plan,
    without_deaths,
)
from emberkeep.repository.grid.piece_table import Gone, PieceTable
from emberkeep.repository.grid.segments import encoded_segment
from emberkeep.repository.history import Lineage, create_or_read
from emberkeep.repository.names import VersionId
from emberkeep.repository.pins import Pin
from emberkeep.repository.repository import Repository, can_create_conditionally
from emberkeep.runtime.fields import Fields

_CLAIM = "fork.json"
# What a layout says of the run that a version belongs to, and of its places.
_RUN_MARKS = frozenset({"run", "mirror", "copied_from"})


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
    was interrupted is no repository, and can be repeated. Of several forks to one root at once, at
    most one returns; the others raise `ConfigError` and change nothing of what it made.
    """
    _check_free(target)
    creating = target
    if exclusive and not can_create_conditionally(target):
        creating = ExclusiveStore(target)
    with Pin(source, version) as pin:
        chain = source.chain(pin.version)
        origin = {"repository": source.id, "version": str(pin.version)}
        # The first claim decides what is forked to this root, and the identity of the copy. Who
        # repeats it, or comes at the same time, puts the same objects: none replaces another's.
        fresh = secrets.token_hex(16)
        content = documents.encode(_CLAIM, "fork", fresh, {"forked_from": origin})
        claim = _create(creating, _CLAIM, "fork", content)
        first = claim.plain("forked_from")
        if first != origin:
            raise ConfigError(
                f"{target.url} was chosen for a fork of version {first['version']} of repository "
                f"{first['repository']}, which is running or was interrupted: repeat that one, or "
                "fork to an empty root"
            )
        identity = claim.text("repository")
        # It has no writers yet.
        there = [info.name for at in (names.VERSIONS, names.WRITERS) for info in target.list(at)]
        others = {*there} - {manifest.name for manifest in chain}
        if others:
            raise _occupied(target, min(others))
        documented: dict[str, tuple[str, bytes]] = {}
        for manifest in chain:
            planned = plan(source, manifest)
            for file in files_read(manifest, planned):
                pin.renew()
                _check_free(target)
                target.put(file.name, source.stream(file))
            if planned is not None:
                catalog = _catalog(planned, target)
                documented[catalog.name] = "catalog", catalog.encode(identity)
        for manifest in chain:
            # A fork is a run of its own, and no mirror of the other is its mirror.
            layout = {k: v for k, v in manifest.layout.items() if k not in _RUN_MARKS}
            copied = dataclasses.replace(manifest, repository=identity, layout=layout)
            documented[manifest.name] = "manifest", copied.encode()
        for name, (kind, content) in documented.items():
            # Not beside the run that goes on from another fork: its gc may have freed the name.
            _check_free(target)
            # A catalog of an earlier attempt may differ: its files were put before it.
            if _create(creating, name, kind, content).text("repository") != identity:
                raise _occupied(target, name)
        ends: dict[int, int] = {}
        for manifest in chain:
            ends[manifest.version.epoch] = manifest.version.number
        forked_from = {**origin, "attempt": secrets.token_hex(8)}
        copy = Repository.found(
            target,
            schema=source.schema,
            exclusive=exclusive,
            clock=source.clock,
            lineage=Lineage(tuple(ends.items())),
            forked_from=forked_from,
            identity=identity,
            last=True,
        )
        if copy.forked_from != forked_from:
            raise _taken(target)
        return copy


def _create(store: BlobStore, name: str, kind: str, content: bytes) -> Fields:
    """The document that stands under a name, which is `content` if there was none.

    What a write that died left torn is replaced: nobody has gone on from it.
    """
    try:
        return documents.decode(name, create_or_read(store, name, content), kind)
    except DamageError:
        store.put(name, content)
        return documents.decode(name, content, kind)


def _check_free(target: BlobStore) -> None:
    if Repository.exists(target):
        raise _taken(target)


def _taken(target: BlobStore) -> ConfigError:
    return ConfigError(f"{target.url} already holds a repository: fork to an empty root")


def _occupied(target: BlobStore, name: str) -> ConfigError:
    return ConfigError(f"{target.url} holds {name} of something else: fork to an empty root")


def _catalog(planned: GridPlan, target: BlobStore) -> Catalog:
    """The catalog of a grid that ends with the version: later deaths have not been.

    Its segments are put under names that follow from what is in them: an attempt that is repeated
    puts the same.
    """
    version, grid = planned.manifest.version, planned.catalog.grid
    shards: dict[int | None, list[Bundle]] = {}
    for bundle in without_deaths(planned.bundles, version.number):
        shards.setdefault(bundle.file.metadata.get("shard"), []).append(bundle)
    parts = []
    for index, (shard, bundles) in enumerate(shards.items()):
        table = PieceTable.of(enumerate(bundles))
        content, _ = encoded_segment("", table, Gone())
        nonce = xxhash.xxh3_64_hexdigest(content)
        name = names.segment_name(grid, version.epoch, nonce, index)
        _, ref = encoded_segment(name, table, Gone())
        target.put(name, content)
        parts.append(Part(shard=shard, living=nonce, next_file=len(bundles), segments=(ref,)))
    return Catalog(
        repository=planned.catalog.repository, grid=grid, generation=1, covered=version.number,
        parts=tuple(parts),
    )  # fmt: skip
