"""What belongs to a run beside its versions, and goes with it to another place: how often it was
restored, and what its versions are called."""

from __future__ import annotations

import warnings
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass

from emberkeep.errors import DamageError, NoVersionError
from emberkeep.repository import names
from emberkeep.repository.maintenance.version_copy import Origin, mirror_epoch, origins
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


@dataclass(frozen=True, slots=True)
class Name:
    """A name of a version, and of a copied name where it was given: the repository, and the epoch
    of the place that it was copied to."""

    version: VersionId
    given_in: str | None = None
    epoch: int = 0


def readable_tags(repository: Repository) -> dict[str, VersionId]:
    """The named versions, but for those whose tag is damaged."""
    return {name: found.version for name, found in _names(repository).items()}


def _names(repository: Repository) -> dict[str, Name]:
    found = {}
    for info in repository.store.list(names.TAGS):
        with suppress(DamageError):
            body = repository.document(info.name, "tag")
            if body is not None:
                tag, version = tag_in(body)
                found[tag] = Name(version)
                if "given_in" in body:
                    given = body.object("given_in")
                    epoch = given.number("epoch", least=1)
                    found[tag] = Name(version, given.text("repository"), epoch)
    return found


def origin_of(repository: Repository, version: VersionId) -> Origin | None:
    """The origin of a version; None if it cannot be read."""
    try:
        return Origin.of(repository.manifest(version))
    except (DamageError, NoVersionError):
        return None


def copy_tags(
    source: Repository, target: Repository, *, epoch: int, move: bool,
    only: Container[str] | None = None,
) -> None:  # fmt: skip
    """Gives copies in `target` the names that their versions have in `source`, or `only` some of
    these. A name that stands for another version there moves, or stays where it is. No name is
    removed. Each says where it was given, and in which `epoch` of the target it was copied."""
    wanted = _names(source)
    if not wanted:
        return
    there, theirs = origins(target), readable_tags(target)
    for name, given in wanted.items():
        if only is not None and name not in only:
            continue
        origin = origin_of(source, given.version)
        copy = None if origin is None else there.get(origin)
        if copy is None or theirs.get(name) == copy or (name in theirs and not move):
            continue
        with suppress(NoVersionError):  # gc is removing it
            target.tag(name, copy, move=True)
            path = names.tag_name(name)
            body = {
                "tag": name, "version": str(copy),
                "given_in": {"repository": source.id, "epoch": epoch},
            }  # fmt: skip
            target.store.put(path, target.encode(path, "tag", body))


def take_tags(mirror: Repository, target: Repository) -> None:
    """Names of `target` that another place has moved in the mirror since move here, too, or go
    where their version is not here: the run went on elsewhere.

    A name stays that was given here later than in the mirror: the mirror has it from here, or its
    version was saved by a process that had the mirror after the one that moved the name. A version
    that loses its name, and is not in the mirror, is warned of: retention may remove it.
    """
    wanted = _names(mirror)
    here, there = origins(target), origins(mirror)
    for name, version in readable_tags(target).items():
        moved = wanted.get(name)
        origin = None if moved is None else origin_of(mirror, moved.version)
        if moved is None or origin is None or origin == origin_of(target, version):
            continue
        if moved.given_in == target.id or _saved_after(target, version, moved, mirror):
            continue
        if origin in here:
            target.tag(name, here[origin], move=True)
        else:
            target.untag(name)
        if origin_of(target, version) not in (None, *there):
            warnings.warn(
                f"{name!r} names another version of {mirror.store.url} by now: version "
                f"{version.number} of {target.store.url}, which had the name, is not there, and "
                "retention may remove it; to keep it, `emberkeep tag` it with another name",
                stacklevel=2,
            )


def _saved_after(target: Repository, version: VersionId, moved: Name, mirror: Repository) -> bool:
    """Whether a version was saved by a process that had the mirror after a name was moved there."""
    try:
        epoch = mirror_epoch(target.manifest(version), mirror)
    except (DamageError, NoVersionError):
        return False
    return epoch is not None and epoch > moved.epoch > 0
