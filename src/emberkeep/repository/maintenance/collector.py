"""gc: removes versions that retention lets go, and files that no version needs.

It runs beside a save, beside readers, and may be killed at any point. What keeps that safe:

- Only the current epoch deletes. It asks whether it still is, right before each deletion, and
  never touches a file of a later epoch.
- Files above what was its own newest version before it looked belong to the save in progress, or
  to a version that a listing made meanwhile may lack although it has a later one. They are left
  alone.
- What is to go is first written down in a mark, and what becomes of that in a decision (`marks`).
  Readers look for marks after they pinned, gc looks for pins after it marked: one of the two sees
  the other. What was decided is no longer part of the history and never comes back, so a gc that
  died or sleeps half-way leaves no version that is listed but broken, and the next one finishes
  its work.
- Manifests go before their data: at no moment does a manifest stand without its files.
- In a grid, rows stand where the newest catalog says. Pieces that no version reads any more leave
  it; files that it does not name go, unless extraction is writing them or a pin holds a version of
  the grid. A version that no catalog covers yet keeps the one before it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from emberkeep.blobs import BlobInfo
from emberkeep.blobs.wrapper import spending_reserve
from emberkeep.errors import ConfigError, DamageError, NoVersionError
from emberkeep.repository import names
from emberkeep.repository.grid.catalog import (
    Catalog,
    Change,
    Part,
    can_be_unneeded,
    commit,
    grid_of,
    needed_versions,
    newest_catalog,
    unneeded,
)
from emberkeep.repository.grid.piece_table import PieceTable
from emberkeep.repository.history import History
from emberkeep.repository.maintenance.version_copy import Origin, newest_counted
from emberkeep.repository.manifest import Manifest, needed_by
from emberkeep.repository.marks import note_removed, put_mark
from emberkeep.repository.names import VersionId
from emberkeep.repository.pieces import KIND
from emberkeep.repository.pins import read_pins
from emberkeep.repository.retention import DEFAULT_RETENTION, RetentionPolicy, VersionFacts
from emberkeep.repository.writer import Writer

_LEFTOVERS_AFTER = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a gc did, and for each version that it kept the reasons."""

    kept: tuple[VersionId, ...]
    reasons: Mapping[VersionId, tuple[str, ...]]
    removed: tuple[VersionId, ...]
    files: int
    nbytes: int


class Collector:
    """Repeated gc for one writer; remembers the manifests it has read, which never change.

    Threads may share it: one collects at a time, because a save and extraction may both want to,
    and what is committed between two looks of one of them must not be taken for garbage.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        policy: RetentionPolicy = DEFAULT_RETENTION,
        grace: timedelta = timedelta(minutes=10),
    ) -> None:
        """Nothing younger than `grace` is removed: the margin for readers without a pin, and for
        requests that a network delivers late."""
        if grace < timedelta(0):
            raise ConfigError(f"grace must not be negative, not {grace}")
        self._writer = writer
        self._repository = writer.repository
        self._store = writer.repository.store
        self._policy = policy
        self._grace = grace
        self._read: dict[VersionId, Manifest] = {}
        self._covered: dict[VersionId, int] = {}
        self._settled = 0
        self._turn = threading.Lock()

    def collect(self) -> Collected:
        """Runs once. `FencedError` if a later writer has taken over, `DamageError` if a version
        that must be kept has a damaged manifest; then nothing more is deleted. Where the store
        keeps a reserve it needs no byte free."""
        self._writer.check()
        try:
            with self._turn, spending_reserve(self._store):
                return self._collect()
        except (DamageError, NoVersionError):
            self._writer.check()  # a successor's gc may have removed what this one looked for
            raise

    def _collect(self) -> Collected:
        self._writer.start_collecting()
        oldest = self._repository.clock.now() - self._grace
        self._covered = {}
        # Before versions are listed. Of those that are committed meanwhile a listing may miss one
        # and have a later one: nothing that it lacks may be taken for removed.
        newest = self._writer.newest
        self._settled = newest.number if newest else 0
        history = self._repository.history(dated=True)
        standing = frozenset((*history.versions, *history.condemned))
        if newest is not None and newest not in {*standing, *history.listing.void}:
            # It is never removed: what else cannot be seen would be taken for removed, too.
            raise DamageError(
                f"{newest.manifest_name} is missing, the newest version: nothing was removed; copy "
                "it back from a backup, or mount what holds it",
                name=newest.manifest_name,
            )
        superfluous = [name for mark in history.marks for name in mark.documents]
        doomed = standing & self._decided(history)

        reasons = self._keep(history, doomed, oldest)
        unwanted = standing - doomed - reasons.keys()
        condemned = self._writer.condemn(unwanted)
        try:
            removed = doomed
            if condemned:
                key = f"{self._writer.epoch:06d}-{secrets.token_hex(8)}"
                superfluous += [
                    names.mark_name(key, decision=decision) for decision in (False, True)
                ]
                put_mark(self._store, self._repository.id, key, condemned, decision=False)
                # Once more, for pins and tags put since. A later one sees the mark.
                since = self._keep(history, doomed, oldest)
                reasons = {**since, **reasons}
                condemned -= since.keys()
                put_mark(self._store, self._repository.id, key, condemned, decision=True)
                removed |= condemned
            superfluous += note_removed(self._store, removed, history.listing.removed)
            self._writer.check_unsealed()
            self._delete(version.manifest_name for version in sorted(removed, reverse=True))
            kept = tuple(version for version in sorted(standing) if version not in removed)
            garbage = [
                *self._garbage(kept, oldest),
                *self._garbage_of_grids(kept, oldest),
            ]
            self._delete(info.name for info in garbage)
            self._delete(superfluous)
        finally:
            self._writer.condemn(frozenset())
        self._tidy(oldest)
        for version in removed:
            self._read.pop(version, None)
        return Collected(
            kept=kept,
            reasons={v: reasons.get(v, ("a save in progress",)) for v in kept},
            removed=tuple(sorted(removed)),
            files=len(garbage),
            nbytes=sum(info.size for info in garbage),
        )

    def _decided(self, history: History) -> frozenset[VersionId]:
        """What an earlier gc, of this epoch or one before, may have deleted in part, or may still
        be about to delete."""
        epoch, honoured = self._writer.epoch, history.claim.honoured
        valid = (m.versions for m in history.marks if m.decided and m.valid(epoch, honoured))
        return frozenset[VersionId]().union(*valid)

    def _keep(
        self, history: History, doomed: frozenset[VersionId], oldest: datetime
    ) -> dict[VersionId, tuple[str, ...]]:
        """What must stay, and why: policy, newest, young, pinned, in use by a save, and all they
        need."""
        tags = self._repository.tags()
        standing = sorted({*history.versions, *history.condemned} - doomed)
        now = oldest + self._grace
        facts = [
            VersionFacts(
                version=version,
                tags=tuple(tag for tag in tags if tags[tag] == version),
                age=now - self._made(version, history),
            )
            for version in standing
        ]
        untagged = self._policy.keep([replace(fact, tags=()) for fact in facts])
        roots: dict[VersionId, list[str]] = {version: [] for version in standing}

        def root(version: VersionId | None, reason: str) -> None:
            if version in roots:
                roots[version].append(reason)

        named = {fact.version: ", ".join(fact.tags) for fact in facts}
        for version in self._policy.keep(facts):
            root(version, "retention" if version in untagged else f"tag {named[version]}")
        counted = newest_counted(self._repository, history.versions)
        for newest in {*history.versions[-1:], counted}:
            root(newest, "newest")
        for version in self._writer.protected() - {*history.versions[-1:]}:
            resumed = version == self._writer.resumed
            root(version, "resumed from" if resumed else "a save in progress")
        for version, expires in read_pins(self._repository).values():
            if expires > oldest:
                root(version, f"pinned until {_time(expires)}")
        for version in history.versions:
            modified = history.listing.modified(version)
            if modified > oldest:
                root(version, f"grace until {_time(modified + self._grace)}")
        kept = needed_by([version for version in standing if roots[version]], self._needs)
        reasons = {version: list(roots.get(version, ())) for version in sorted(kept)}
        for version in sorted(kept):
            for needed in self._needs(version):
                reasons[needed].append(f"needed by {version.number}")
        return {version: tuple(found) for version, found in reasons.items()}

    def _made(self, version: VersionId, history: History) -> datetime:
        """When a version was made: a copy is as old as what it is a copy of."""
        modified = history.listing.modified(version)
        with suppress(DamageError, NoVersionError):  # one that must be kept is met again
            manifest = self._manifest(version)
            if "copied_from" in manifest.described:
                return min(modified, Origin.of(manifest).created)
        return modified

    def _needs(self, version: VersionId) -> tuple[VersionId, ...]:
        return needed_versions(self._manifest(version), self._covered_by)

    def _covered_by(self, grid: VersionId) -> int:
        """How far the catalog of a grid reached when it was first looked at."""
        if grid not in self._covered:
            self._covered[grid] = newest_catalog(self._repository, grid).covered
        return self._covered[grid]

    def _manifest(self, version: VersionId) -> Manifest:
        if version not in self._read:
            self._read[version] = self._repository.manifest(version)
        return self._read[version]

    def _garbage(self, kept: tuple[VersionId, ...], oldest: datetime) -> list[BlobInfo]:
        """Data files that no kept version needs, old enough, and of no save in progress."""
        listed = list(self._store.list(names.DATA))
        catalogs = self._catalogs(kept, {})
        held = self._held_grids(catalogs)
        needed: set[str] = set()
        for catalog in catalogs.values():
            needed |= catalog.files()
        for version in kept:
            manifest = self._manifest(version)
            grid = grid_of(manifest)
            moved = grid is not None and version.number <= catalogs[grid].covered
            needed.update(file.name for file in manifest.files if not moved or file.kind != KIND)
        garbage = []
        for info in listed:
            parsed = names.parse_data(info.name)
            if parsed is None or info.name in needed or info.modified > oldest:
                continue
            version, _ = parsed
            if any(version >= grid for grid in held):
                continue
            if not self._is_new(version):
                garbage.append(info)
        return garbage

    def _is_new(self, version: VersionId) -> bool:
        """Whether it may have been committed since versions were listed, or may come to be."""
        return (version.epoch, version.number) > (self._writer.epoch, self._settled)

    def _garbage_of_grids(self, kept: tuple[VersionId, ...], oldest: datetime) -> list[BlobInfo]:
        """Files of grids that no catalog needs, and catalogs that are not the newest.

        The order matters: a file that was listed, is not being written any more and is not in the
        catalog that is read then, will never be in one. A reader that pins after pins were read
        plans with that catalog or a later one.
        """
        places = (names.GRID, names.MOVED)
        everything = [info for place in places for info in self._store.list(place)]
        lost = self._without_catalog(kept, everything)
        listed = [info for info in everything if info.modified <= oldest]
        writing = self._writer.held_files()
        files: dict[VersionId, list[tuple[int, BlobInfo]]] = {}
        for info in listed:
            bundle = names.parse_bundle(info.name) or names.parse_segment(info.name)
            if bundle is None or self._is_new(bundle[0]) or bundle[0] in lost:
                continue
            if bundle[1] <= self._writer.epoch:
                files.setdefault(bundle[0], []).append((bundle[1], info))
        catalogs = self._catalogs(kept, files)
        held = self._held_grids(catalogs)
        garbage = []
        for grid, found in files.items():
            named = catalogs[grid].files() if grid in catalogs else frozenset()
            garbage += [
                info
                for _, info in found
                if info.name not in named and not info.name.startswith(writing) and grid not in held
            ]
        for info in listed:
            generation = names.parse_generation(info.name)
            if generation is not None and not self._is_new(generation[0]):
                catalog = catalogs.get(generation[0])
                if catalog is None or generation[1] < catalog.generation:
                    garbage.append(info)
        return garbage

    def _without_catalog(
        self, kept: tuple[VersionId, ...], listed: Iterable[BlobInfo]
    ) -> frozenset[VersionId]:
        """Grids that have no catalog, although rows were moved out of their versions' own files:
        it was deleted, and the files that it named are all that is left of these rows."""
        parsed = (names.parse_generation(info.name) for info in listed)
        described = {generation[0] for generation in parsed if generation is not None}
        grids = {version: grid_of(self._manifest(version)) for version in kept}
        young = {version for version, grid in grids.items() if grid and grid not in described}
        if not young:
            return frozenset()
        present = {info.name for info in self._store.list(names.DATA)}
        return frozenset(
            grid
            for version, grid in grids.items()
            if version in young
            and grid is not None
            and any(f.name not in present for f in self._manifest(version).of_kind(KIND))
        )

    def _catalogs(
        self, kept: tuple[VersionId, ...], files: Mapping[VersionId, list[tuple[int, BlobInfo]]]
    ) -> dict[VersionId, Catalog]:
        """The newest catalog of every grid of a kept version, without what none of them reads.

        Before a file of an earlier epoch can go, the catalog must be ours: that writer may be
        about to name it in one.
        """
        numbers: dict[VersionId, list[int]] = {}
        for version in kept:
            grid = grid_of(self._manifest(version))
            if grid is not None:
                numbers.setdefault(grid, []).append(version.number)

        def change(catalog: Catalog, nonce: str) -> Change | None:
            parts: list[Part] = []
            reading = [*numbers[catalog.grid], *range(self._settled + 1, catalog.covered + 1)]
            if can_be_unneeded(catalog.grid, reading):
                parts = self._without_unneeded(catalog, reading, nonce)
            named = catalog.files()
            foreign = catalog.epoch < self._writer.epoch and any(
                epoch < self._writer.epoch and info.name not in named
                for epoch, info in files.get(catalog.grid, ())
            )
            return Change(parts=parts, covered=catalog.covered) if parts or foreign else None

        found = {}
        for grid in numbers:
            nonce = secrets.token_hex(8)
            prefix = names.round_prefix(grid, self._writer.epoch, nonce)
            self._writer.hold_files([prefix])
            found[grid] = commit(self._writer, grid, partial(change, nonce=nonce))
            self._writer.let_go_files([prefix])
        return found

    def _without_unneeded(self, catalog: Catalog, kept: Sequence[int], nonce: str) -> list[Part]:
        """The parts that change when the pieces go that no kept version reads."""
        found: list[Part] = []
        for part in catalog.parts:
            table = part.everything(self._repository)
            gone = table.taken(unneeded(table, kept))
            if len(gone):
                name = names.segment_name(catalog.grid, self._writer.epoch, nonce, len(found))
                # Nothing that lives has gone.
                found.append(
                    part.appended(
                        self._repository, name, PieceTable(), gone.keys(), part.living or nonce
                    )
                )
        return found

    def _held_grids(self, catalogs: Iterable[VersionId]) -> frozenset[VersionId]:
        """Grids with a pinned version: readers may have planned with an older catalog."""
        now = self._repository.clock.now()
        pinned = {v for v, expires in read_pins(self._repository).values() if expires > now}
        return frozenset(
            grid
            for grid in catalogs
            if any(v in self._read and grid_of(self._read[v]) == grid for v in pinned)
        )

    def _delete(self, doomed: Iterable[str]) -> None:
        found = list(doomed)
        if found:
            self._writer.check()
            self._store.delete(found)

    def _tidy(self, oldest: datetime) -> None:
        """Removes what needs no protocol: expired pins, probes, unfinished puts."""
        pins = read_pins(self._repository)
        self._store.delete(name for name, (_, expires) in pins.items() if expires <= oldest)
        probes = [info.name for info in self._store.list(names.PROBES) if info.modified <= oldest]
        self._store.delete(probes)
        self._store.sweep(older_than=max(self._grace, _LEFTOVERS_AFTER))


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
