"""The grid: which pieces there are, when their rows were born and died, and who reads them.

Every version of a grid wrote the rows that changed. A row lives from the version that wrote it,
its *birth*, up to the version that overwrote or deleted it, its *death*. Restoring version v reads
the pieces with birth ≤ v < death. A *catalog* lists pieces and says up to which version it covers
the grid; pieces of later versions stand in their manifests and are alive.

Each shard has a part of the catalog to itself, in files of its own (`segments`), which the process
writes that holds the shard's rows. What makes them count is one small document that names them
all: a *generation*, created under the next free number, of which the newest counts. Extraction and
gc describe what they want as a change of whatever generation is newest, so one does not undo the
other; a writer that was replaced finds its number taken and stops. Before a writer removes
anything that an earlier one wrote, it makes a generation of its own. (The manifest of a version
could name the segments just as well, but a round would then wait for the next version, the last
one of a run for ever, and gc could drop nothing between two.)

- Births are never rewritten. A recorded death is never earlier than the true one: where it is
  later, or not known yet, two births of a row are read and the newer counts.
- A grid is linear. To go on from a version that is not its newest starts another; one that
  was continued twice is damaged, since deaths of one continuation hide rows of the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from emberkeep._types import Bools, Json
from emberkeep.blobs import BlobStore, together
from emberkeep.errors import DamageError, FencedError, MissingObjectError, NoVersionError
from emberkeep.repository import documents, names
from emberkeep.repository.grid.bundles import Bundle, Piece
from emberkeep.repository.grid.piece_table import ALIVE, Gone, GridFile, PieceTable
from emberkeep.repository.grid.segments import (
    Segment,
    SegmentRef,
    live_files,
    to_be_merged,
    without_gone,
    written,
)
from emberkeep.repository.history import create_or_read
from emberkeep.repository.manifest import FileRef, Manifest, version_in
from emberkeep.repository.names import VersionId
from emberkeep.repository.pieces import KIND
from emberkeep.repository.repository import Repository
from emberkeep.repository.writer import Writer
from emberkeep.runtime.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The catalog of one shard.

    `living` is another text whenever pieces that live have come or gone: who follows them knows by
    it whether there is something to read again. Format 1 has one part for all shards, without a
    number, whose pieces stand in the document itself.
    """

    shard: int | None
    living: str = ""
    next_file: int = 0
    segments: tuple[SegmentRef, ...] = ()
    inline: tuple[Bundle, ...] = ()

    def to_json(self) -> Json:
        return {
            "shard": self.shard,
            "living": self.living,
            "next_file": self.next_file,
            "segments": [segment.to_json() for segment in self.segments],
        }

    @classmethod
    def of(cls, fields: Fields, grid: VersionId) -> Part:
        segments = fields.list_of("segments", list)
        return cls(
            shard=fields.number("shard", most=2**31) if "shard" in fields else None,
            living=fields.text("living"),
            next_file=fields.number("next_file", most=2**48),
            segments=tuple(SegmentRef.of(fields, values, grid) for values in segments),
        )

    def opened(self, repository: Repository) -> list[Segment]:
        """The segments, of which the indexes are read if they were not."""
        known: dict[str, Segment] = repository.segments

        def opened(ref: SegmentRef) -> Segment:
            segment = known.get(ref.name) or Segment.open(repository.store, ref)
            known[ref.name] = segment
            return segment

        if all(ref.name in known for ref in self.segments):
            return [opened(ref) for ref in self.segments]
        return together(repository.store, [partial(opened, ref) for ref in self.segments])

    def everything(self, repository: Repository) -> PieceTable:
        """All pieces."""
        if self.inline:
            return PieceTable.of(enumerate(self.inline))
        opened = self.opened(repository)
        return without_gone((segment.everything, segment.gone) for segment in opened)[0]

    def read_by(self, repository: Repository, version: int) -> PieceTable:
        """The pieces that a restore of a version reads."""
        if self.inline:
            table = PieceTable.of(enumerate(self.inline))
        else:
            opened = self.opened(repository)
            table, _ = without_gone((segment.read_by(version), segment.gone) for segment in opened)
        return table.taken(table.read_by(version))

    def files(self, repository: Repository) -> dict[int, GridFile]:
        """The files that have pieces, by number."""
        if self.inline:
            return dict(PieceTable.of(enumerate(self.inline)).files)
        return live_files(self.opened(repository))

    def appended(
        self, repository: Repository, name: str, added: PieceTable, gone: Gone, living: str
    ) -> Part:
        """The part with more pieces and fewer, of which a segment under that name tells."""
        if self.inline:
            kept, earlier = 0, [(self.everything(repository), Gone())]
        else:
            kept = to_be_merged(self.segments, len(added) + len(gone))
            merged = replace(self, segments=self.segments[kept:]).opened(repository)
            earlier = [(segment.everything, segment.gone) for segment in merged]
        table, gone = without_gone([*earlier, (added, gone)])
        segments = self.segments[:kept]
        if len(table) or (kept and len(gone)):
            ref = written(repository.store, name, table, gone if kept else Gone())
            segments = (*segments, ref)
        highest = max([self.next_file - 1, *table.files])
        return Part(shard=self.shard, living=living, next_file=highest + 1, segments=segments)


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """One generation: the pieces of a grid up to version number `covered`.

    `taken` is the highest number under which a catalog stands, whole or not.
    """

    repository: Repository = field(repr=False, compare=False)
    grid: VersionId
    generation: int = 0
    taken: int = 0
    epoch: int = 0
    covered: int = 0
    parts: tuple[Part, ...] = ()
    _files: list[frozenset[str]] = field(
        init=False, repr=False, compare=False, default_factory=list
    )

    @property
    def name(self) -> str:
        return names.generation_name(self.grid, self.generation)

    @property
    def is_mixed(self) -> bool:
        """Whether rows of several shards may stand together, as format 1 has them."""
        return any(part.shard is None for part in self.parts)

    def part(self, shard: int) -> Part:
        """The part of a shard; an empty one where there is none yet."""
        return next((p for p in self.parts if p.shard == shard), Part(shard=shard))

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All pieces of all shards, file by file."""
        tables = [part.everything(self.repository) for part in self.parts]
        return tuple(bundle for table in tables for bundle in table.bundles())

    def pieces(self) -> Iterator[tuple[Bundle, Piece]]:
        return ((bundle, piece) for bundle in self.bundles for piece in bundle.pieces)

    def files(self) -> frozenset[str]:
        """The files of rows that have pieces, and those of the catalog itself. Found once, with no
        lock held meanwhile: segments may have to be read."""
        if not self._files:
            rows = (f.name for p in self.parts for f in p.files(self.repository).values())
            segments = (ref.name for part in self.parts for ref in part.segments)
            self._files.append(frozenset((*rows, *segments)))
        return self._files[0]

    def encode(self, repository: str) -> bytes:
        body = {
            "epoch": self.epoch,
            "covered": self.covered,
            "parts": [part.to_json() for part in self.parts],
        }
        return documents.encode(self.name, "catalog", repository, body)


class StaleError(Exception):
    """A change was made for a catalog that is no longer the newest, and does not fit that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What the next generation says instead: parts that replace those of their shards, and how far
    it reaches. With `mixed` the part without a shard, as format 1 has it, became one of them."""

    parts: Sequence[Part]
    covered: int
    mixed: bool = False

    def apply(self, catalog: Catalog, epoch: int) -> Catalog:
        parts = {part.shard: part for part in (*catalog.parts, *self.parts)}
        if self.mixed:
            parts.pop(None, None)
        return Catalog(
            repository=catalog.repository,
            grid=catalog.grid,
            generation=catalog.taken + 1,
            taken=catalog.taken + 1,
            epoch=epoch,
            covered=self.covered,
            parts=tuple(p for p in parts.values() if p.segments or p.next_file or p.inline),
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


def bundles_of(manifest: Manifest, shard: int | None = None) -> tuple[Bundle, ...]:
    """The pieces that a version wrote itself, or one shard of it."""
    files = (
        file for file in manifest.of_kind(KIND) if shard is None or shard_of_file(file) == shard
    )
    found = (Bundle.of(file) for file in files)
    return tuple(bundle for bundle in found if bundle is not None)


def shard_of_file(file: FileRef) -> int:
    """The shard whose rows a file of a version holds."""
    return Fields(file.name, file.metadata, "metadata.").number("shard", most=2**31)


def reading(bundles: Iterable[Bundle], version: int) -> tuple[Bundle, ...]:
    """The bundles that a restore of a version reads, each with the pieces that it reads there."""
    found = (bundle.read_by(version) for bundle in bundles)
    return tuple(bundle for bundle in found if bundle is not None)


def unneeded(table: PieceTable, kept: Collection[int]) -> Bools:
    """Pieces whose rows no kept version reads: all that lived between two of them.

    What is alive stays: versions to come read it.
    """
    numbers = np.append(np.array(sorted(kept), np.int64), ALIVE)
    following = numbers[np.searchsorted(numbers[:-1], table["birth"])]
    gone: Bools = (table["death"] < ALIVE) & (following >= table["death"])
    return gone


def can_be_unneeded(grid: VersionId, kept: Collection[int]) -> bool:
    """Whether there can be such pieces: not where every version stands since the first."""
    return not kept or max(kept) - grid.number + 1 > len(set(kept))


# -- on storage ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """What a restore of one version of a grid reads: thousands of pieces, as columns."""

    manifest: Manifest
    catalog: Catalog
    tables: tuple[PieceTable, ...]

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The files, each with its pieces one by one."""
        return tuple(bundle for table in self.tables for bundle in table.bundles())

    @property
    def rows(self) -> int:
        return sum(int(table["rows"].sum()) for table in self.tables)

    @property
    def nbytes(self) -> int:
        return sum(int(table["nbytes"].sum() + table["head_nbytes"].sum()) for table in self.tables)

    def since(self, version: int) -> tuple[PieceTable, ...]:
        """The part that was written after an earlier version of the same grid."""
        return tuple(table.taken(table["birth"] > version) for table in self.tables)


def newest_catalog(repository: Repository, grid: VersionId) -> Catalog:
    """The newest generation; an empty one, covering nothing, where there is none.

    One that was written in part only, which no store of ours does, is passed over: the one before
    it describes the same rows. Once gc has seen a catalog whole it removes those before it. The
    first of all has none before it: it is passed over where the versions' own files still hold all
    rows, and is `DamageError` elsewhere. Taken for empty, what it names would be taken for garbage.
    """
    while True:
        numbers = generations(repository.store, names.grid_directory(grid)).get(grid, [])
        damage: DamageError | None = None
        known: Catalog | None = repository.catalogs.get(grid)
        if known is not None and numbers and known.generation == known.taken == numbers[0]:
            return known
        for number in numbers:
            try:
                catalog = read_catalog(repository, grid, number, numbers[0])
                if catalog is None:
                    break  # removed since it was listed: there is a newer one
            except DamageError as error:
                damage = damage or error
                continue
            repository.catalogs[grid] = catalog
            _forget_segments(repository)
            return catalog
        else:
            if damage is not None and (numbers[-1] > 1 or _has_moved_rows(repository, grid)):
                raise damage
            return Catalog(
                repository=repository, grid=grid, covered=grid.number - 1,
                taken=numbers[0] if numbers else 0,
            )  # fmt: skip


def generations(store: BlobStore, directory: str) -> dict[VersionId, list[int]]:
    """The numbers under which catalogs of grids stand below a directory, highest first."""
    found: dict[VersionId, list[int]] = {}
    for info in store.list(directory):
        parsed = names.parse_generation(info.name)
        if parsed is not None:
            found.setdefault(parsed[0], []).append(parsed[1])
    return {grid: sorted(numbers, reverse=True) for grid, numbers in found.items()}


def read_catalog(
    repository: Repository, grid: VersionId, number: int, taken: int
) -> Catalog | None:
    """A generation; None if there is none."""
    body = repository.document(names.generation_name(grid, number), "catalog")
    if body is None:
        return None
    return Catalog(
        repository=repository,
        grid=grid,
        generation=number,
        taken=taken,
        epoch=body.number("epoch"),
        covered=body.number("covered"),
        parts=parts_in(body),
    )


def _forget_segments(repository: Repository) -> None:
    """Lets go of segments that no catalog has any more which was read."""
    # Other threads may come to know of more meanwhile: what there is is copied at once.
    catalogs = list(repository.catalogs.values())
    named = {ref.name for catalog in catalogs for part in catalog.parts for ref in part.segments}
    for name in [name for name in list(repository.segments) if name not in named]:
        repository.segments.pop(name, None)


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


def parts_in(body: Fields) -> tuple[Part, ...]:
    """The parts of a catalog, each shard's once."""
    parsed = names.parse_generation(body.name)
    if "files" in body or parsed is None:
        return (Part(shard=None, inline=_bundles_in(body, None if parsed is None else parsed[0])),)
    parts = tuple(Part.of(part, parsed[0]) for part in body.objects("parts"))
    segments = [ref.name for part in parts for ref in part.segments]
    if len({part.shard for part in parts}) < len(parts) or len({*segments}) < len(segments):
        raise body.wrong("parts", "one part of each shard, with segments of its own")
    return parts


def _bundles_in(body: Fields, grid: VersionId | None) -> tuple[Bundle, ...]:
    """The files that a catalog of format 1 names, with their pieces; these are many, so they are
    taken out before a file is looked at as any other."""
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


def commit(writer: Writer, grid: VersionId, change: Callable[[Catalog], Change | None]) -> Catalog:
    """Makes the next generation from the newest one; returns what is newest then.

    `change` is asked what the newest catalog needs; None means that there is nothing to change, and
    `StaleError` that what was prepared does not fit it. `FencedError` if a later writer made it.
    After a `StorageError` the generation may still come to exist.
    """
    repository = writer.repository
    while True:
        catalog = newest_catalog(repository, grid)
        if catalog.epoch > writer.epoch:
            raise FencedError(
                f"a newer process has taken over {repository.store.url} from epoch "
                f"{writer.epoch}: this one must stop"
            )
        wanted = change(catalog)
        if wanted is None:
            return catalog
        following = wanted.apply(catalog, writer.epoch)
        prefix = names.round_prefix(grid, writer.epoch, nonce := secrets.token_hex(8))
        writer.hold_files([prefix])
        following = _without_inline(following, nonce)
        writer.check()
        content = following.encode(repository.id)
        created = create_or_read(repository.store, following.name, content) == content
        writer.let_go_files([prefix])
        if created:
            repository.catalogs[grid] = following
            _forget_segments(repository)
            return following


def _without_inline(catalog: Catalog, nonce: str) -> Catalog:
    """Pieces that stood in the document of format 1 go to a segment."""

    def moved(part: Part) -> Part:
        if not part.inline:
            return part
        name = names.segment_name(catalog.grid, catalog.epoch, nonce, 0)
        return part.appended(catalog.repository, name, PieceTable(), Gone(), nonce)

    return replace(catalog, parts=tuple(map(moved, catalog.parts)))


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
    repository: Repository, manifest: Manifest, catalog: Catalog | None = None, *,
    shard: int | None = None,
) -> GridPlan | None:  # fmt: skip
    """What a restore of a version reads; None if it belongs to no grid. With `shard`, of what was
    written for that one alone.

    A catalog that is known already is used unless it has become too old.
    """
    grid = grid_of(manifest)
    if grid is None:
        return None
    catalog = catalog or newest_catalog(repository, grid)
    while True:
        try:
            tables = _planned(repository, manifest, catalog, shard)
            break
        except (NoVersionError, DamageError):
            # It may have been covered and removed since the catalog was read, or a segment merged.
            newer = newest_catalog(repository, grid)
            if newer.generation == catalog.generation:
                raise
            catalog = newer
    return GridPlan(manifest=manifest, catalog=catalog, tables=tables)


def _planned(
    repository: Repository, manifest: Manifest, catalog: Catalog, shard: int | None
) -> tuple[PieceTable, ...]:
    number = manifest.version.number
    found = [
        part.read_by(repository, number)
        for part in catalog.parts
        if shard is None or part.shard in (None, shard)
    ]
    for each in uncovered(repository, manifest, catalog.covered):
        found.append(PieceTable.of(enumerate(reading(bundles_of(each, shard), number))))
    return tuple(found)


def segments_read(planned: GridPlan | None) -> tuple[FileRef, ...]:
    """The files of the catalog that a plan was made with."""
    if planned is None:
        return ()
    return tuple(ref.file() for part in planned.catalog.parts for ref in part.segments)


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
