"""Versions that are damaged in one place, or missing, and made whole from both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from emberkeep.errors import DamageError, NoVersionError
from emberkeep.repository import Repository, VersionId, Writer
from emberkeep.repository.maintenance.repair import is_intact, repair
from emberkeep.repository.maintenance.version_copy import Origin, copy_version


@dataclass(frozen=True, slots=True)
class Candidate:
    """A whole version that a run may go on from: where it is in the repository, and in the mirror.
    Without an origin it cannot be read, and nobody knows what it was."""

    here: VersionId | None
    there: VersionId | None
    origin: Origin | None


def candidates(repository: Repository, mirror: Repository) -> Iterator[Candidate]:
    """The whole versions of both places, newest first, beginning with the repository's newest: what
    the mirror has that is newer was brought before, or does not count."""
    copies = {found[0]: found[1] for found in _whole(mirror) if found[0] is not None}
    seen: set[Origin] = set()
    alone = sorted(copies.items(), key=lambda copy: copy[1])
    here = list(reversed(_whole(repository)))
    known = {origin for origin, _ in here}
    alone = [copy for copy in alone if copy[0] not in known]
    first = next((origin for origin, _ in here if origin is not None), None)
    if first is not None:
        alone = [copy for copy in alone if not copy[0].newer_than(first)]
    for origin, version in here:
        while origin is not None and alone and alone[-1][0].newer_than(origin):
            between, there = alone.pop()
            yield Candidate(None, there, between)
        again = origin in seen
        if origin is not None:
            seen.add(origin)
        yield Candidate(
            version,
            None if origin is None or again else copies.get(origin),
            None if again else origin,
        )
    for origin, there in reversed(alone):
        yield Candidate(None, there, origin)


def _whole(repository: Repository) -> list[tuple[Origin | None, VersionId]]:
    """The whole versions, oldest first, and those whose manifests cannot be read."""
    found: list[tuple[Origin | None, VersionId]] = []
    for version in repository.versions():
        try:
            manifest = repository.manifest(version)
        except DamageError:
            found.append((None, version))
        except NoVersionError:
            continue
        else:
            if manifest.whole:
                found.append((Origin.of(manifest), version))
    return found


def repaired(candidate: Candidate, mirror: Repository, writer: Writer) -> VersionId | None:
    """A version whose files are intact again, each from where it is; None if one is intact in
    neither place. Where the repository cannot even say what the version was made of, or has let it
    go, it is copied, and the newest from then on."""
    here, there = candidate.here, candidate.there
    readable = here is not None and candidate.origin is not None
    if here is not None and readable and repair(writer.repository, here, mirror) is not None:
        return here
    # Before the first of a chain is copied: it would be the newest if another could not be.
    if there is None or not is_intact(mirror, there):
        return None
    copied = copy_version(mirror, there, writer, again=here is not None).version
    if here is None:  # what it needs may be there, and damaged
        repair(writer.repository, copied, mirror)
    return copied
