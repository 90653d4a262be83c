"""Proof that what is stored is what was committed, or the names of what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise

from emberkeep.errors import DamageError, MissingObjectError, NoVersionError
from emberkeep.repository import names
from emberkeep.repository.digests import Digester
from emberkeep.repository.grid.catalog import (
    Catalog,
    before_in_grid,
    files_read,
    grid_of,
    newest_catalog,
    parts_in,
    plan,
    segments_read,
)
from emberkeep.repository.history import Claim, History, Lineage
from emberkeep.repository.manifest import FileRef, Manifest
from emberkeep.repository.marks import condemned_in
from emberkeep.repository.names import VersionId
from emberkeep.repository.pins import pin_in
from emberkeep.repository.repository import Repository, restore_in, tag_in
from emberkeep.runtime.crew import Crew
from emberkeep.runtime.fields import Fields

_THREADS = 4

# What may stand in each directory beside the manifests of the history, and how it is read.
_READERS: dict[str, dict[str, Callable[[Fields], object]]] = {
    names.WRITERS: {"writer": Claim.of},
    names.VERSIONS: {"seal": Lineage.of, "void": iter, "manifest": Manifest.of},
    names.TAGS: {"tag": tag_in},
    names.PINS: {"pin": pin_in},
    names.CONDEMNED: {"condemned": condemned_in, "decision": condemned_in},
    names.RESTORES: {"restore": restore_in},
    names.GRID: {"catalog": parts_in},
}
# So many names of what is missing are given; a lineage may claim any number of versions.
_MOST_MISSING = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One object that is not what it should be, and the versions that cannot be trusted for it."""

    name: str
    problem: str
    versions: tuple[VersionId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a verification.

    `unreferenced` are data files that no checked version lists: a save in progress, one that died,
    or what remains of a manifest that somebody deleted.
    """

    versions: tuple[VersionId, ...]
    files: int
    nbytes: int
    damages: tuple[Damage, ...]
    unreferenced: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.damages

    @property
    def undamaged(self) -> tuple[VersionId, ...]:
        """The checked versions that no damage touches."""
        touched = {version for damage in self.damages for version in damage.versions}
        return tuple(version for version in self.versions if version not in touched)


def verify(
    repository: Repository, versions: Iterable[VersionId] | None = None, *, deep: bool = True
) -> Report:
    """Checks versions, all by default, with everything that they need.

    Deep reads every byte; otherwise files are checked for presence and size, from one listing.
    """
    chosen = repository.versions() if versions is None else tuple(versions)
    with Crew(_THREADS, "emberkeep-verify", clock=repository.clock) as pool:
        check = _Check(repository, pool, deep=deep)
        check.small_objects()
        for version in chosen:
            check.version(version)
        gone = frozenset[VersionId]()
        if versions is None:  # what retention has removed meanwhile is not missed
            gone = frozenset(chosen) - frozenset(repository.versions())
        return check.report(tuple(version for version in chosen if version not in gone), gone)


def newest_undamaged(repository: Repository) -> tuple[VersionId | None, Report]:
    """The newest whole version that passes a deep check, and what was wrong with the newer ones.

    For a user who asked to fall back: the report names what is lost.
    """
    looked_at: list[VersionId] = []
    versions = repository.versions()  # first: files of a version that is committed later are late
    with Crew(_THREADS, "emberkeep-verify", clock=repository.clock) as pool:
        check = _Check(repository, pool, deep=True)
        for version in reversed(versions):
            if _is_prioritised(repository, version):
                continue
            looked_at.append(version)
            if check.version(version):
                return version, check.report(tuple(reversed(looked_at)))
        return None, check.report(tuple(reversed(looked_at)))


def _is_prioritised(repository: Repository, version: VersionId) -> bool:
    """Whether it holds some rows alone, as far as it can be read."""
    try:
        return not repository.manifest(version).whole
    except (DamageError, NoVersionError):
        return False


class _Check:
    """Looks at each object once, however many versions need it."""

    def __init__(self, repository: Repository, pool: Crew, *, deep: bool) -> None:
        self._repository = repository
        self._pool = pool
        self._deep = deep
        self._sizes = {info.name: info.size for info in repository.store.list(names.DATA)}
        self._sizes.update(
            (info.name, info.size)
            for place in (names.GRID, names.MOVED)
            for info in repository.store.list(place)
            if names.parse_bundle(info.name) or names.parse_segment(info.name)
        )
        self._catalogs: dict[VersionId, Catalog] = {}
        # The versions of each grid, and what each goes on from.
        self._grids: dict[VersionId, dict[VersionId, VersionId | None]] = {}
        self._manifests: dict[VersionId, Manifest | None] = {}
        self._files: dict[str, FileRef] = {}
        self._problems: dict[str, str] = {}
        self._touched: dict[str, list[VersionId]] = {}
        # What damaged files hold instead, to recognise files that were swapped.
        self._actual: dict[str, tuple[object, ...]] = {}

    def small_objects(self) -> None:
        """Every JSON object beside the manifests of the history."""
        history = self._repository.history()
        counted = {v.manifest_name for v in (*history.versions, *history.condemned)}
        void = {v.manifest_name for v in history.listing.void}
        writers = {info.name for info in self._repository.store.list(names.WRITERS)}
        epochs = range(self._repository.origin.next_epoch, history.listing.epoch + 1)
        missing = (e for e in epochs if names.writer_name(e) not in writers)
        for epoch in islice(missing, _MOST_MISSING):
            self._blame(names.writer_name(epoch), "missing", ())
        self._deleted_manifests(history)
        for directory, readers in _READERS.items():
            for info in self._repository.store.list(directory):
                if (
                    info.name not in counted
                    and info.name not in void
                    and info.name not in self._sizes
                    and not names.is_note(info.name)
                ):
                    self._document(info.name, readers)

    def _deleted_manifests(self, history: History) -> None:
        """Blames numbers that were used and not removed by gc, under which nothing stands.

        gc notes how far it has removed each epoch; what is missing below that may have been
        retention's. Epochs of format 1 have no notes.
        """
        first = 1
        newest = history.newest
        current = (history.listing.epoch, newest.number if newest else 0)
        for epoch, last in (*history.lineage.ends, current):
            first, start = last + 1, max(first, history.listing.removed.get(epoch, 0) + 1)
            if epoch < self._repository.origin.next_epoch or self._format_of(epoch) < 2:
                continue
            versions = (VersionId(number, epoch) for number in range(start, last + 1))
            missing = (v for v in versions if v not in history.listing.manifests)
            for version in islice(missing, _MOST_MISSING):
                self._blame(version.manifest_name, "missing", ())

    def _format_of(self, epoch: int) -> int:
        try:
            claim = self._repository.document(names.writer_name(epoch), "writer")
        except DamageError:
            return 1
        return 1 if claim is None else claim.number("format")

    def _document(self, name: str, readers: Mapping[str, Callable[[Fields], object]]) -> None:
        for kind, read in readers.items():
            try:
                body = self._repository.document(name, kind)
                if body is not None:
                    read(body)
                return
            except DamageError as error:
                problem = str(error)
        self._blame(name, problem, ())

    def version(self, version: VersionId) -> bool:
        """Checks a version and all that it needs; whether it is whole."""
        whole = True
        waiting, seen = [version], {version}
        while waiting:
            manifest = self._manifest(waiting.pop(), version)
            if manifest is None:
                whole = False
                continue
            files = self._needed(manifest)
            if files is None:
                whole = False
                continue
            fresh = [file for file in files if file.name not in self._files]
            self._files.update((file.name, file) for file in fresh)
            for file, problem in zip(fresh, self._pool.map(self._problem, fresh), strict=True):
                if problem:
                    self._problems[file.name] = problem
            for file in files:
                if file.name in self._problems:
                    self._blame(file.name, self._problems[file.name], (version,))
                    whole = False
            new = set(manifest.needs) - seen
            seen |= new
            waiting.extend(new)
        return whole

    def _needed(self, manifest: Manifest) -> tuple[FileRef, ...] | None:
        """The files of a version; None if it cannot be found out what they are."""
        grid = grid_of(manifest)
        try:
            if grid is not None and grid not in self._catalogs:
                self._catalogs[grid] = newest_catalog(self._repository, grid)
            known = None if grid is None else self._catalogs[grid]
            if grid is not None:
                self._grids.setdefault(grid, {})[manifest.version] = before_in_grid(manifest)
            planned = plan(self._repository, manifest, known)
            return (*files_read(manifest, planned), *segments_read(planned))
        except (DamageError, NoVersionError) as error:
            name = getattr(error, "name", None) or manifest.name
            self._blame(name, str(error), (manifest.version,))
            return None

    def _branches(self) -> None:
        """Blames versions that go on from one which another version of their grid had continued."""
        for line in self._grids.values():
            for earlier, later in pairwise(sorted(line)):
                before = line[later]
                if before is not None and before < earlier:
                    problem = (
                        f"goes on from version {before}, although version {earlier} of the same "
                        "grid came between: rows of the two cannot be distinguished"
                    )
                    self._blame(later.manifest_name, problem, (later,))

    def report(
        self, versions: tuple[VersionId, ...], gone: frozenset[VersionId] = frozenset()
    ) -> Report:
        """On these versions; what touches none but those that are `gone` is left out."""
        self._branches()
        by_content = {file.content: file.name for file in self._files.values()}
        damages = []
        for name, problem in self._problems.items():
            found = by_content.get(self._actual.get(name, ()))
            if found is not None and found != name:
                problem = f"swapped: holds the content of {found}"
            touched = tuple(sorted(set(self._touched[name])))
            if touched and gone.issuperset(touched):
                continue
            damages.append(Damage(name=name, problem=problem, versions=touched))
        return Report(
            versions=versions,
            files=len(self._files),
            nbytes=sum(file.size for file in self._files.values()),
            damages=tuple(damages),
            unreferenced=tuple(sorted(self._sizes.keys() - self._files.keys())),
        )

    def _manifest(self, version: VersionId, on_behalf_of: VersionId) -> Manifest | None:
        if version not in self._manifests:
            try:
                self._manifests[version] = self._repository.manifest(version)
            except (DamageError, NoVersionError) as error:
                self._manifests[version] = None
                self._problems[version.manifest_name] = (
                    "missing" if isinstance(error, NoVersionError) else str(error)
                )
        if self._manifests[version] is None:
            name = version.manifest_name
            self._blame(name, self._problems[name], (on_behalf_of,))
        return self._manifests[version]

    def _problem(self, file: FileRef) -> str | None:
        size = self._sizes.get(file.name)
        if size is None:
            try:
                size = self._repository.store.size(file.name)  # it may be newer than the listing
            except MissingObjectError:
                return "missing"
        if size == file.size and not self._deep:
            return None
        digester = Digester(file.block_nbytes)
        store = self._repository.store
        try:
            if size <= file.block_nbytes:
                digester.update(memoryview(store.get(file.name)))
            else:
                for start in range(0, size, file.block_nbytes):
                    block = store.get_range(file.name, start, file.block_nbytes)
                    digester.update(memoryview(block))
        except MissingObjectError:
            return "missing"
        found = (digester.size, digester.blocks or digester.whole)
        if found == file.content:
            return None
        self._actual[file.name] = found
        if digester.size != file.size:
            return f"{digester.size} bytes instead of {file.size}"
        return "damaged: its content does not match its digest"

    def _blame(self, name: str, problem: str, versions: tuple[VersionId, ...]) -> None:
        self._problems[name] = problem
        self._touched.setdefault(name, []).extend(versions)
