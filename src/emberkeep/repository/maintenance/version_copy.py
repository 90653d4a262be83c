"""Versions of one repository as versions of another: the same files under the same digests.

Each place is a repository of its own, with its own writer, history, numbers and gc. What is the
same version is known by its *origin*: the repository and version that were copied first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from emberkeep._types import Json
from emberkeep.blobs import Buffer
from emberkeep.errors import CancelledError, ConfigError, DamageError, NoVersionError
from emberkeep.repository.digests import BLOCK_NBYTES
from emberkeep.repository.grid.catalog import grid_of
from emberkeep.repository.manifest import FileRef, Manifest, utc
from emberkeep.repository.names import VersionId
from emberkeep.repository.pins import Pin
from emberkeep.repository.repository import Repository
from emberkeep.repository.writer import Writer
from emberkeep.runtime.readahead import ahead_of

# A pin lasts an hour, and a slow store may need longer for one file.
_RENEW_AFTER = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a version was written first, and when."""

    repository: str
    version: VersionId
    created: datetime

    @classmethod
    def of(cls, manifest: Manifest) -> Origin:
        if "copied_from" not in manifest.described:
            return cls(manifest.repository, manifest.version, manifest.created)
        source = manifest.described.object("copied_from")
        return cls(
            source.text("repository"),
            source.parsed("version", VersionId.parse),
            source.parsed("created", utc),
        )

    def to_json(self) -> Json:
        return {
            "repository": self.repository,
            "version": str(self.version),
            "created": self.created.isoformat(),
        }

    def newer_than(self, other: Origin) -> bool:
        """Of one repository the later version is newer; of two, what was saved later."""
        if self.repository == other.repository:
            return self.version > other.version
        return self.created > other.created


def run_of(manifest: Manifest) -> str:
    """The run that a version belongs to: the repository that the run's first version was written
    to, wherever it has moved since."""
    if "run" in manifest.described:
        return manifest.described.text("run")
    return Origin.of(manifest).repository


def mirror_epoch(manifest: Manifest, mirror: Repository) -> int | None:
    """The epoch of `mirror` that the process had which wrote a version; None if it wrote without
    this mirror."""
    if "mirror" not in manifest.described:
        return None
    mark = manifest.described.object("mirror")
    return mark.number("epoch", least=1) if mark.text("repository") == mirror.id else None


def _readable(repository: Repository) -> Iterator[Manifest]:
    for version in repository.versions():
        try:
            yield repository.manifest(version)
        except (DamageError, NoVersionError):
            continue  # it is none that can be built on


def origins(repository: Repository) -> dict[Origin, VersionId]:
    """The versions that stand in a repository, by their origin; of several copies the newest."""
    return {Origin.of(manifest): manifest.version for manifest in _readable(repository)}


def newest_origin(repository: Repository) -> tuple[Origin, VersionId] | None:
    """The newest whole version whose manifest can be read, but for those that are aside; None where
    there is none."""
    manifest = newest_readable(repository, repository.versions())
    return None if manifest is None else (Origin.of(manifest), manifest.version)


def newest_readable(repository: Repository, versions: Sequence[VersionId]) -> Manifest | None:
    """The manifest of the newest of versions, oldest first, that is whole, can be read and is not
    aside."""
    for version in reversed(versions):
        try:
            manifest = repository.manifest(version)
            if manifest.whole and not manifest.aside:
                return manifest
        except (DamageError, NoVersionError):
            continue
    return None


def newest_counted(
    repository: Repository, versions: Sequence[VersionId] | None = None
) -> VersionId | None:
    """The newest whole version that is not aside, of all or of some that are known. One that
    cannot be read counts: nobody knows what it was."""
    for version in reversed(repository.versions() if versions is None else versions):
        try:
            manifest = repository.manifest(version)
            if manifest.aside or not manifest.whole:
                continue
        except DamageError:
            pass
        except NoVersionError:
            continue
        return version
    return None


def same_run(one: Repository, other: Repository) -> bool:
    """Whether versions of two repositories may be those of one run: some belong to the same run or
    come from the same place, or one of the two has none yet."""
    runs = []
    for repository in (one, other):
        found = {r for m in _readable(repository) for r in (run_of(m), Origin.of(m).repository)}
        if not found:
            return True
        runs.append(found | {repository.id})
    return not runs[0].isdisjoint(runs[1])


def new_nbytes(source: Repository, version: VersionId, target: Repository) -> int:
    """How much a copy of a version would write."""
    there = origins(target)
    return sum(m.nbytes for m in source.chain(version) if Origin.of(m) not in there)


def copies_in(source: Repository, version: VersionId, target: Repository) -> tuple[VersionId, ...]:
    """What another repository has of a version and of all that it needs."""
    there = origins(target)
    chain = (Origin.of(manifest) for manifest in source.chain(version))
    return tuple(sorted(there[origin] for origin in chain if origin in there))


def copy_version(
    source: Repository,
    version: VersionId,
    writer: Writer,
    *,
    again: bool = False,
    aside: bool = False,
    passing: Callable[[Iterator[Buffer]], Iterator[Buffer]] = iter,
    cancelled: threading.Event | None = None,
) -> Manifest:
    """Copies a version, with what it needs of others, to where `writer` writes; its manifest there.

    What is there already is not copied, unless `again` says that it may be damaged. What is copied
    is the newest version there, unless it is to stand `aside`. Bytes are
    checked against the digests of the source when they are read, and have the same ones where they
    go. A copy that was interrupted has left nothing but files that gc removes.
    """
    with Held(source, version) as held:
        chain = source.chain(version)
        check_copyable(chain[-1])
        there = {} if again else origins(writer.repository)
        mark: Json = {"aside": True} if aside else {}
        copies: dict[VersionId, VersionId] = {}
        copied: Manifest | None = None
        for manifest in chain:
            origin = Origin.of(manifest)
            if origin in there:
                copies[manifest.version] = there[origin]
                continue
            needs = [copies[needed] for needed in manifest.needs]
            baseline = None if manifest.baseline is None else copies.get(manifest.baseline)
            blocks = max((file.block_nbytes for file in manifest.files), default=BLOCK_NBYTES)
            with writer.begin(needs=needs, block_nbytes=blocks) as draft:
                for file in manifest.files:
                    stream = _unless(cancelled, held.passing(source.stream(file)), version)
                    put = draft.add(
                        passing(ahead_of(stream, clock=source.clock)),
                        kind=file.kind, suffix=file.name.rpartition(".")[2],
                        metadata=file.metadata,
                    )  # fmt: skip
                    _check_same(file, put, writer.repository)
                copied = draft.commit(
                    step=manifest.step,
                    baseline=baseline,
                    layout={**manifest.layout, "copied_from": origin.to_json() | mark},
                    reader=manifest.reader,
                    user=manifest.user,
                    counters=manifest.counters,
                )
            copies[manifest.version] = copied.version
        newest = copies[chain[-1].version]
        if copied is None or copied.version != newest:
            copied = writer.repository.manifest(newest)
        return copied


def check_copyable(manifest: Manifest) -> None:
    if grid_of(manifest) is not None:
        raise ConfigError(
            f"version {manifest.version} belongs to a grid, whose rows move between the files of "
            "its versions, so it cannot be copied by itself: use another layout, or `emberkeep "
            "fork`, which copies what one version reads"
        )


class Held:
    """A version that is pinned until the block ends, however long its files are read: the pin is
    renewed while bytes pass. `NoVersionError` if it cannot be held, or no longer."""

    def __init__(self, repository: Repository, version: VersionId) -> None:
        self.repository = repository
        self._clock = repository.clock
        self._pin = Pin(repository, version)
        self._renewed = self._clock.monotonic()

    def passing(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        for block in blocks:
            self.renew()
            yield block

    def renew(self) -> None:
        """If it is time: of many files none may take long."""
        now = self._clock.monotonic()
        if now - self._renewed > _RENEW_AFTER.total_seconds():
            self._pin.renew()
            self._renewed = now

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._pin.release()


def _unless(
    cancelled: threading.Event | None, blocks: Iterator[Buffer], version: VersionId
) -> Iterator[Buffer]:
    """The blocks of a file, while the copy is wanted."""
    for block in blocks:
        if cancelled is not None and cancelled.is_set():
            raise CancelledError(f"the copy of version {version} was given up")
        yield block


def _check_same(file: FileRef, put: FileRef, target: Repository) -> None:
    """What was checked when it was read can only differ if memory failed in between."""
    if put.content != file.content:
        raise DamageError(
            f"{put.name} in {target.store.url} has another digest than {file.name}, of which it is "
            "a copy: the version was not copied; try again",
            name=put.name,
        )
