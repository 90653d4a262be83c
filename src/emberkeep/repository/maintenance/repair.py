"""Files of a version that are damaged in one place and intact in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from emberkeep.blobs import Buffer
from emberkeep.errors import DamageError, NoVersionError
from emberkeep.repository.maintenance.version_copy import Held, Origin, origins
from emberkeep.repository.manifest import FileRef, Manifest
from emberkeep.repository.names import VersionId
from emberkeep.repository.repository import Repository


def repair(
    repository: Repository, version: VersionId, source: Repository,
    *, passing: Callable[[Iterator[Buffer]], Iterator[Buffer]] = iter,
) -> int | None:  # fmt: skip
    """Puts the bytes back that files of a version, or of what it needs, have lost, from copies of
    the same versions elsewhere; how many. None if it is damaged still.

    A file has the content again that its manifest names: versions, their order and their numbers
    stay as they are. Everything is read, and checked before it is put. Both are pinned meanwhile;
    `NoVersionError` if gc is removing the version.
    """
    there = origins(source)
    nbytes = 0
    try:
        with Held(repository, version) as held:
            for manifest in repository.chain(version):
                damaged = [f for f in manifest.files if _damage(repository, f, held) is not None]
                copy = there.get(Origin.of(manifest))
                for file in damaged:
                    if copy is None or not _put_back(held, file, source, copy, passing):
                        return None
                    nbytes += file.size
    except DamageError:
        return None
    return nbytes


def _put_back(
    damaged: Held, file: FileRef, source: Repository, copy: VersionId,
    passing: Callable[[Iterator[Buffer]], Iterator[Buffer]],
) -> bool:  # fmt: skip
    """Puts a file back from a copy of its version, if that has it intact."""
    try:
        held = Held(source, copy)
    except NoVersionError:  # it was let go since it was listed
        return False
    with held:
        twin = _twin(source.manifest(copy), file)
        if twin is None or _damage(source, twin, held, damaged) is not None:
            return False
        blocks = damaged.passing(held.passing(source.stream(twin)))
        damaged.repository.store.put(file.name, passing(blocks))
    return True


def first_damage(repository: Repository, version: VersionId) -> DamageError | None:
    """What is wrong with the first file of a version, or of what it needs, that is not what was
    written; None if all are. `NoVersionError` if gc is removing the version."""
    try:
        with Held(repository, version) as held:
            for manifest in repository.chain(version):
                for file in manifest.files:
                    damage = _damage(repository, file, held)
                    if damage is not None:
                        return damage
    except DamageError as damage:
        return damage
    return None


def is_intact(repository: Repository, version: VersionId) -> bool:
    """Whether every byte of a version, and of what it needs, is what was written."""
    return first_damage(repository, version) is None


def _damage(repository: Repository, file: FileRef, *held: Held) -> DamageError | None:
    """What is wrong with a file, which is read to the end, or to where it is damaged."""
    blocks = repository.stream(file)
    for version in held:
        version.renew()
        blocks = version.passing(blocks)
    try:
        for _ in blocks:
            pass
    except DamageError as damage:
        return damage
    return None


def _twin(copy: Manifest, file: FileRef) -> FileRef | None:
    """The file of another copy of a version that has the same bytes."""
    same = (f for f in copy.files if (f.content, f.kind) == (file.content, file.kind))
    return next(same, None)
