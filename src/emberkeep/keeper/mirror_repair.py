"""Which version of two places counts, and what one lacks made whole from both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from emberkeep.errors import DamageError, NoVersionError
from emberkeep.repository import Manifest, Repository, VersionId, Writer
from emberkeep.repository.maintenance.repair import first_damage, is_intact, repair
from emberkeep.repository.maintenance.run_records import readable_tags
from emberkeep.repository.maintenance.version_copy import (
    Origin,
    copy_version,
    mirror_epoch,
    origins,
)


def is_ahead(
    mirror: Repository, newest: tuple[Origin, VersionId],
    repository: Repository, known: tuple[Origin, VersionId],
) -> bool:  # fmt: skip
    """Whether the newest version of the mirror counts, and not that of the repository.

    What a process saved elsewhere after another had taken the mirror over, and made versions there,
    is no part of the run, however late it was saved.
    """
    copies = _copies(mirror)
    by_time = _is_newer(newest[0], known[0], copies)
    if newest[0].repository == known[0].repository or known[0] in copies:
        return by_time
    left = repository.manifest(known[1])
    epoch = mirror_epoch(left, mirror)
    if epoch is None or epoch == newest[1].epoch:
        return by_time
    ahead = newest[1].epoch > epoch
    if ahead and not by_time:
        warnings.warn(
            f"version {known[1].number} (step {left.step}) of {repository.store.url} was saved "
            "when another process had already taken the run over: the run goes on from step "
            f"{mirror.manifest(newest[1]).step}, which that one copied to {mirror.store.url}; to "
            "keep the other, `emberkeep fork` it before retention removes it",
            stacklevel=4,
        )
    return ahead


def _copies(mirror: Repository) -> dict[Origin, VersionId]:
    return {origin: version for origin, version in _whole(mirror) if origin is not None}


def _is_newer(one: Origin, other: Origin, copies: Mapping[Origin, VersionId]) -> bool:
    """Of two that were copied to one mirror, which has one writer at a time, the one that came
    later: clocks of machines differ."""
    if one.repository != other.repository and one in copies and other in copies:
        return copies[one] > copies[other]
    return one.newer_than(other)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A whole version that a run may go on from: where it is in the repository, and in the mirror.
    Without an origin it cannot be read, and nobody knows what it was."""

    here: VersionId | None
    there: VersionId | None
    origin: Origin | None


def candidates(repository: Repository, mirror: Repository | None) -> Iterator[Candidate]:
    """The whole versions of both places, newest first, beginning with the repository's newest: what
    the mirror has that is newer was brought before, or does not count. What is aside in the
    repository has the place that its copy in the mirror has."""
    copies = {} if mirror is None else _copies(mirror)
    seen: set[Origin] = set()
    alone = sorted(copies.items(), key=lambda copy: copy[1])
    here = list(reversed(_whole(repository)))
    known = {origin for origin, _ in here}
    alone = [copy for copy in alone if copy[0] not in known]
    first = next((origin for origin, _ in here if origin is not None), None)
    if first is not None:
        alone = [copy for copy in alone if not _is_newer(copy[0], first, copies)]
    for origin, version in here:
        while origin is not None and alone and _is_newer(alone[-1][0], origin, copies):
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
    """The whole versions that are not aside, oldest first, and those whose manifests cannot be
    read."""
    found: list[tuple[Origin | None, VersionId]] = []
    for version in repository.versions():
        try:
            manifest = repository.manifest(version)
        except DamageError:
            found.append((None, version))
        except NoVersionError:
            continue
        else:
            if manifest.whole and not manifest.aside:
                found.append((Origin.of(manifest), version))
    return found


@dataclass(frozen=True, slots=True)
class Repaired:
    """A version whose files are intact, and how many bytes had to be put for that."""

    version: VersionId
    nbytes: int


def repaired(candidate: Candidate, mirror: Repository, writer: Writer) -> Repaired | None:
    """A version whose files are intact again, each from where it is; None if one is intact in
    neither place. Where the repository cannot even say what the version was made of, or has let it
    go, it is copied, and the newest from then on."""
    here, there = candidate.here, candidate.there
    if here is not None and candidate.origin is not None:
        nbytes = repair(writer.repository, here, mirror)
        if nbytes is not None:
            return Repaired(here, nbytes)
    # Before the first of a chain is copied: it would be the newest if another could not be.
    if there is None or not is_intact(mirror, there):
        return None
    copied = copy_version(mirror, there, writer, again=here is not None)
    nbytes = copied.nbytes
    if here is None:  # what it needs may be there, and damaged
        nbytes += repair(writer.repository, copied.version, mirror) or 0
    return Repaired(copied.version, nbytes)


def bring_named(name: str, mirror: Repository, writer: Writer) -> Manifest | None:
    """Copies the version of a name from the mirror; None if the mirror has none of that name. It
    stands aside: what the repository has that is newer stays its newest."""
    found = readable_tags(mirror).get(name)
    try:
        if found is None:
            return None
        check_chain(mirror, found, writer.repository)
        return copy_version(mirror, found, writer, aside=True)
    except NoVersionError:  # the name was left behind
        return None


def check_chain(
    source: Repository, version: VersionId, target: Repository, *, again: bool = False
) -> None:
    """`DamageError` if a version cannot be copied whole, before the first of several is: that would
    be the newest of the target. One alone is checked when it is copied."""
    there = {} if again else origins(target)
    missing = [m for m in source.chain(version) if Origin.of(m) not in there]
    damage = first_damage(source, version) if len(missing) > 1 else None
    if damage is not None:
        raise damage
