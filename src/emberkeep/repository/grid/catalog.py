"""The grid: which pieces there are, when their rows were born and died, and who reads them.

Every version of a grid wrote the rows that changed. A row lives from the version that wrote it,
its *birth*, up to the version that overwrote or deleted it, its *death*. Restoring version v reads
the pieces with birth ≤ v < death. A *catalog* lists pieces and says up to which version it covers
the grid; pieces of later versions stand in their manifests and are alive.

Catalogs are numbered *generations*, each created under the next free number, and the newest one
counts. Extraction and gc describe what they want as a change of whatever catalog is newest, so one
does not undo the other; a writer that was replaced finds its number taken and stops. Before a
writer removes anything that an earlier one wrote, it makes a generation of its own.

- Births are never rewritten. A recorded death is never earlier than the true one: where it is
  later, or not known yet, two births of a row are read and the newer counts.
- A grid is linear. To go on from a version that is not its newest starts another; one that
  was continued twice is damaged, since deaths of one continuation hide rows of the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from emberkeep.errors import DamageError, FencedError, MissingObjectError, NoVersionError
from emberkeep.repository import documents, names
from emberkeep.repository.grid.bundles import Bundle, Piece
from emberkeep.repository.history import create_or_read
from emberkeep.repository.manifest import FileRef, Manifest, version_in
from emberkeep.repository.names import VersionId
from emberkeep.repository.pieces import KIND
from emberkeep.repository.repository import Repository
from emberkeep.repository.writer import Writer
from emberkeep.runtime.fields import Fields

Key = tuple[str, int]
"""A piece: the name of its file and where its head stands."""


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """One generation: the pieces of a grid up to version number `covered`.

    `taken` is the highest number under which a catalog stands, whole or not.
    """

    grid: VersionId
    generation: int = 0
    taken: int = 0
    epoch: int = 0
    covered: int = 0
    bundles: tuple[Bundle, ...] = ()

    @property
    def name(self) -> str:
        return names.generation_name(self.grid, self.generation)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the files, with what in them no piece uses any more."""
        return sum(bundle.file.size for bundle in self.bundles)

    def pieces(self) -> Iterable[tuple[Bundle, Piece]]:
        return ((bundle, piece) for bundle in self.bundles for piece in bundle.pieces)

    def files(self) -> frozenset[str]:
        return frozenset(bundle.name for bundle in self.bundles)

    def encode(self, repository: str) -> bytes:
        body = {
            "epoch": self.epoch,
            "covered": self.covered,
            "files": [bundle.to_json() for bundle in self.bundles],
        }
        return documents.encode(self.name, "catalog", repository, body)


class StaleError(Exception):
    """A change was made for a catalog that is no longer the newest, and does not fit that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What becomes of a catalog: pieces that go, files that come, and how far it reaches.

    `moved` are pieces whose rows stand in the new files: all of them must still be there.
    """

    gone: frozenset[Key] = frozenset()
    moved: frozenset[Key] = frozenset()
    new: tuple[Bundle, ...] = ()
    covered: tuple[int, int] | None = None

    def apply(self, catalog: Catalog, epoch: int) -> Catalog:
        """The next generation; `StaleError` if it would hold rows twice or lose some."""
        here = {(bundle.name, piece.head) for bundle, piece in catalog.pieces()}
        if not self.moved <= here or (self.covered and self.covered[0] != catalog.covered):
            raise StaleError
        gone = self.gone | self.moved
        kept = []
        for bundle in catalog.bundles:
            pieces = [p for p in bundle.pieces if (bundle.name, p.head) not in gone]
            if len(pieces) == len(bundle.pieces):
                kept.append(bundle)
            elif pieces:
                kept.append(bundle.with_pieces(pieces))
        return Catalog(
            grid=catalog.grid,
            generation=catalog.taken + 1,
            taken=catalog.taken + 1,
            epoch=epoch,
            covered=self.covered[1] if self.covered else catalog.covered,
            bundles=(*kept, *self.new),
        )


# -- which grid, which pieces: pure --------------------------------------------------------------


def grid_of(manifest: Manifest) -> VersionId | None:
    """The grid that a version belongs to, named by its first version."""
    grid = version_in(manifest.described, "grid")
    if grid is not None and grid.number > manifest.version.number:
        raise manifest.described.wrong("grid", "the version that began the grid")
    return grid


def before_in_grid(manifest: Manifest) -> VersionId | None:
    """The version before this one in its grid; None for the first."""
    before = version_in(manifest.described, "before")
    if before is not None and before.number >= manifest.version.number:
        raise manifest.described.wrong("before", "an earlier version")
    return before


def needed_versions(
    manifest: Manifest, covered: Callable[[VersionId], int]
) -> tuple[VersionId, ...]:
    """The versions that a version needs: those that it names, and in a grid the one before it as
    long as no catalog covers that; `covered` says how far a grid's catalog reaches."""
    grid, before = grid_of(manifest), before_in_grid(manifest)
    if grid is None or before is None or before.number <= covered(grid):
        return manifest.needs
    return (*manifest.needs, before)


def bundles_of(manifest: Manifest) -> tuple[Bundle, ...]:
    """The pieces that a version wrote itself."""
    found = (Bundle.of(file) for file in manifest.of_kind(KIND))
    return tuple(bundle for bundle in found if bundle is not None)


def reading(bundles: Iterable[Bundle], version: int) -> tuple[Bundle, ...]:
    """The bundles that a restore of a version reads, each with the pieces that it reads there."""
    found = (bundle.read_by(version) for bundle in bundles)
    return tuple(bundle for bundle in found if bundle is not None)


def unneeded(catalog: Catalog, kept: Collection[int]) -> frozenset[Key]:
    """Pieces whose rows no kept version reads: all that lived between two of them.

    What is alive stays: versions to come read it.
    """
    numbers = sorted(kept)
    gone = set()
    for bundle, piece in catalog.pieces():
        if piece.death is not None:
            first = bisect_left(numbers, piece.birth)
            if first == len(numbers) or numbers[first] >= piece.death:
                gone.add((bundle.name, piece.head))
    return frozenset(gone)


# -- on storage ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """What a restore of one version of a grid reads."""

    manifest: Manifest
    catalog: Catalog
    bundles: tuple[Bundle, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for bundle in self.bundles for piece in bundle.pieces)

    @property
    def nbytes(self) -> int:
        return sum(bundle.used_nbytes for bundle in self.bundles)

    def since(self, version: int) -> tuple[Bundle, ...]:
        """The part that was written after an earlier version of the same grid."""
        top = self.manifest.version.number
        found = (bundle.read_by(top, since=version) for bundle in self.bundles)
        return tuple(bundle for bundle in found if bundle is not None)


def newest_catalog(repository: Repository, grid: VersionId) -> Catalog:
    """The newest generation; an empty one, covering nothing, where there is none.

    One that was written in part only, which no store of ours does, is passed over: the one before
    it describes the same rows. Once gc has seen a catalog whole it removes those before it. The
    first of all has none before it: it is passed over where the versions' own files still hold all
    rows, and is `DamageError` elsewhere. Taken for empty, what it names would be taken for garbage.
    """
    while True:
        parsed = [
            names.parse_generation(info.name)
            for info in repository.store.list(names.grid_directory(grid))
        ]
        numbers = sorted((found[1] for found in parsed if found), reverse=True)
        damage: DamageError | None = None
        known: Catalog | None = repository.catalogs.get(grid)
        if known is not None and numbers and known.generation == known.taken == numbers[0]:
            return known
        for number in numbers:
            try:
                body = repository.document(names.generation_name(grid, number), "catalog")
                if body is None:
                    break  # removed since it was listed: there is a newer one
                catalog = Catalog(
                    grid=grid,
                    generation=number,
                    taken=numbers[0],
                    epoch=body.number("epoch"),
                    covered=body.number("covered"),
                    bundles=bundles_in(body),
                )
            except DamageError as error:
                damage = damage or error
                continue
            repository.catalogs[grid] = catalog
            return catalog
        else:
            if damage is not None and (numbers[-1] > 1 or _has_moved_rows(repository, grid)):
                raise damage
            return Catalog(grid=grid, covered=grid.number - 1, taken=numbers[0] if numbers else 0)


def _has_moved_rows(repository: Repository, grid: VersionId) -> bool:
    """Whether rows of a grid may be where nothing but its catalog says: not all are in the files
    that its versions name."""
    try:
        for version in repository.versions():
            manifest = repository.manifest(version)
            if grid_of(manifest) == grid:
                for file in manifest.of_kind(KIND):
                    repository.store.size(file.name)
    except (DamageError, MissingObjectError, NoVersionError):
        return True
    return False


def bundles_in(body: Fields) -> tuple[Bundle, ...]:
    """The files that a catalog names, with their pieces; these are many, so they are taken out
    before a file is looked at as any other."""
    parsed = names.parse_generation(body.name)
    grid = None if parsed is None else parsed[0]
    found: dict[str, Bundle] = {}
    for file in body.objects("files"):
        reference = FileRef.of(file, without="grid")
        name = reference.name
        extracted = names.parse_bundle(name)
        own = names.parse_data(name) is not None if extracted is None else extracted[0] == grid
        if name in found or not own:
            raise file.wrong("name", "a file of the grid, named once")
        found[name] = Bundle.described(reference, file.object("metadata").object("grid"))
    return tuple(found.values())


def commit(
    writer: Writer, grid: VersionId, change: Change | Callable[[Catalog], Change | None]
) -> Catalog:
    """Makes the next generation from the newest one and a change; returns what is newest then.

    `FencedError` if a later writer made it; `StaleError` if the change does not fit the newest
    one. After a `StorageError` it may still come to exist. A function is asked for the change that
    the newest catalog needs; None means that there is nothing to change.
    """
    repository = writer.repository
    while True:
        catalog = newest_catalog(repository, grid)
        if catalog.epoch > writer.epoch:
            raise FencedError(
                f"a newer process has taken over {repository.store.url} from epoch "
                f"{writer.epoch}: this one must stop"
            )
        wanted = change(catalog) if callable(change) else change
        if wanted is None:
            return catalog
        following = wanted.apply(catalog, writer.epoch)
        writer.check()
        content = following.encode(repository.id)
        if create_or_read(repository.store, following.name, content) == content:
            repository.catalogs[grid] = following
            return following


def uncovered(repository: Repository, manifest: Manifest, covered: int) -> list[Manifest]:
    """A version and those before it in its grid that no catalog covers yet, oldest first.

    They follow the last version that the catalog covers; `DamageError` if they follow an earlier
    one, so that the catalog tells of another past than theirs.
    """
    found = []
    current: Manifest | None = manifest
    while current is not None and current.version.number > covered:
        found.append(current)
        before = before_in_grid(current)
        if before is not None and before.number < covered:
            raise DamageError(
                f"version {current.version} goes on from version {before}, but its grid was "
                f"continued to version {covered} before: its rows cannot be distinguished from "
                "those of the other continuation; restore another version",
                name=current.name,
            )
        if before is None or before.number == covered:
            break
        current = repository.needed_manifest(before, current.version)
    return found[::-1]


def plan(
    repository: Repository, manifest: Manifest, catalog: Catalog | None = None
) -> GridPlan | None:
    """What a restore of a version reads; None if it belongs to no grid.

    A catalog that is known already is used unless it has become too old.
    """
    grid = grid_of(manifest)
    if grid is None:
        return None
    catalog = catalog or newest_catalog(repository, grid)
    while True:
        try:
            later = uncovered(repository, manifest, catalog.covered)
            break
        except (NoVersionError, DamageError):
            # It may have been covered and removed since the catalog was read.
            newer = newest_catalog(repository, grid)
            if newer.generation == catalog.generation:
                raise
            catalog = newer
    own = [bundle for each in later for bundle in bundles_of(each)]
    return GridPlan(
        manifest=manifest,
        catalog=catalog,
        bundles=reading((*catalog.bundles, *own), manifest.version.number),
    )


def files_read(manifest: Manifest, planned: GridPlan | None) -> tuple[FileRef, ...]:
    """Every file of its own and of its grid that a restore of a version reads.

    In a grid rows stand where the catalog says: the manifest may name files that are gone.
    """
    if planned is None:
        return manifest.files
    others = [file for file in manifest.files if file.kind != KIND]
    return (*others, *(bundle.reference() for bundle in planned.bundles))


def without_deaths(bundles: Sequence[Bundle], top: int) -> tuple[Bundle, ...]:
    """Pieces as they are in a history that ends with version `top`: later deaths have not been."""
    return tuple(
        bundle.with_pieces(
            piece._replace(death=None) if piece.death is not None and piece.death > top else piece
            for piece in bundle.pieces
        )
        for bundle in bundles
    )
