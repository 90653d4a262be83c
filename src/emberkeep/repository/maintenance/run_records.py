"""What belongs to a run beside its versions, and goes with it to another place: how often it was
restored, and what its versions are called."""

from __future__ import annotations

from contextlib import suppress

from emberkeep.errors import DamageError, NoVersionError
from emberkeep.repository import names
from emberkeep.repository.maintenance.version_copy import Origin, origins
from emberkeep.repository.names import VersionId
from emberkeep.repository.repository import Repository, restore_in, tag_in


def copy_restores(source: Repository, target: Repository) -> None:
    """Records in `target` every restore that `source` has recorded, under the same name: each is
    counted once, however often it is copied and by whatever way. A damaged record stays behind."""
    there = {info.name for info in target.store.list(names.RESTORES)}
    for info in source.store.list(names.RESTORES):
        if info.name in there:
            continue
        with suppress(DamageError):
            body = source.document(info.name, "restore")
            if body is None:
                continue
            version, at = restore_in(body)
            made_in = body.text("copied_from") if "copied_from" in body else source.id
            record = {"version": str(version), "at": at.isoformat(), "copied_from": made_in}
            target.store.put(info.name, target.encode(info.name, "restore", record))


def readable_tags(repository: Repository) -> dict[str, VersionId]:
    """The named versions, but for those whose tag is damaged."""
    found = {}
    for info in repository.store.list(names.TAGS):
        with suppress(DamageError):
            body = repository.document(info.name, "tag")
            if body is not None:
                tag, version = tag_in(body)
                found[tag] = version
    return found


def origin_of(repository: Repository, version: VersionId) -> Origin | None:
    """The origin of a version; None if it cannot be read."""
    try:
        return Origin.of(repository.manifest(version))
    except (DamageError, NoVersionError):
        return None


def copy_tags(source: Repository, target: Repository, *, move: bool) -> None:
    """Gives copies in `target` the names that their versions have in `source`. A name that stands
    for another version there moves, or stays where it is. No name is removed."""
    wanted = readable_tags(source)
    if not wanted:
        return
    there, theirs = origins(target), readable_tags(target)
    for name, version in wanted.items():
        origin = origin_of(source, version)
        copy = None if origin is None else there.get(origin)
        if copy is None or theirs.get(name) == copy or (name in theirs and not move):
            continue
        with suppress(NoVersionError):  # gc is removing it
            target.tag(name, copy, move=True)


def take_tags(source: Repository, target: Repository) -> None:
    """Names of `target` that stand for another version in `source` by now move there, or go where
    that version is not in `target`: the run went on elsewhere."""
    there = origins(target)
    wanted = readable_tags(source)
    for name, version in readable_tags(target).items():
        origin = origin_of(source, wanted[name]) if name in wanted else None
        if origin is None or origin == origin_of(target, version):
            continue
        if origin in there:
            target.tag(name, there[origin], move=True)
        else:
            target.untag(name)
