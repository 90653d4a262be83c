"""Files of a version that are damaged in one place and intact in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from emberkeep.blobs import Buffer
from emberkeep.errors import DamageError, NoVersionError
from emberkeep.repository.maintenance.version_copy import Origin, origins
from emberkeep.repository.manifest import FileRef
from emberkeep.repository.names import VersionId
from emberkeep.repository.pins import Pin
from emberkeep.repository.repository import Repository


def repair(
    repository: Repository, version: VersionId, source: Repository,
    *, passing: Callable[[Iterator[Buffer]], Iterator[Buffer]] = iter,
) -> int | None:  # fmt: skip
    """Puts the bytes back that files of a version, or of what it needs, have lost, from copies of
    the same versions elsewhere; how many. None if it is damaged still.

    A file has the content again that its manifest names: versions, their order and their numbers
    stay as they are. Everything is read, and checked before it is put.
    """
    nbytes = 0
    try:
        with Pin(repository, version) as pin:
            there = origins(source)
            for manifest in repository.chain(pin.version):
                for file in manifest.files:
                    pin.renew()
                    if _intact(repository, file):
                        continue
                    twin = _twin(source, there.get(Origin.of(manifest)), file)
                    if twin is None or not _intact(source, twin):
                        return None
                    repository.store.put(file.name, passing(source.stream(twin)))
                    nbytes += file.size
    except (DamageError, NoVersionError):
        return None
    return nbytes


def is_intact(repository: Repository, version: VersionId) -> bool:
    """Whether every byte of a version, and of what it needs, is what was written."""
    try:
        with Pin(repository, version) as pin:
            return all(
                _intact(repository, file)
                for manifest in repository.chain(pin.version)
                for file in manifest.files
            )
    except (DamageError, NoVersionError):
        return False


def _intact(repository: Repository, file: FileRef) -> bool:
    try:
        for _ in repository.stream(file):
            pass
    except DamageError:
        return False
    return True


def _twin(repository: Repository, version: VersionId | None, file: FileRef) -> FileRef | None:
    """The file of another copy of a version that has the same bytes."""
    files = () if version is None else repository.manifest(version).files
    same = (f for f in files if (f.content, f.kind) == (file.content, file.kind))
    return next(same, None)
