"""Extraction: rows that a newer version overwrote move out of the pieces that live on.

A *round* takes every version that was committed since the last one, notes which rows of the living
pieces they ended, and splits the pieces of which enough has died: the dead, with the version that
ended them, into one bundle, the survivors into another. Then the next catalog counts.

Whether a piece is split is decided by three filters, cheapest first: do the ranges of ids overlap,
how many new ids does its bloom filter know, how many of its rows are really dead. The last two are
held against `ratio`, as a share of the piece, and *accumulate*: what a round passes over is counted
again in the next, and when a piece is split at last each row is given its own death. So a restore
reads at most 1/(1 − ratio) times the rows that it needs, and a row is rewritten about 1/ratio
times at worst.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from emberkeep._types import I32, I64, U64
from emberkeep.errors import DamageError, StorageError
from emberkeep.repository import names
from emberkeep.repository.digests import BLOCK_NBYTES, Digester
from emberkeep.repository.grid.bundle_reader import Range, ranges, read_range, rows_of_pieces
from emberkeep.repository.grid.bundles import (
    Bundle,
    BundleStream,
    EncodedRows,
    Piece,
    Rows,
    columns_of,
)
from emberkeep.repository.grid.catalog import (
    Catalog,
    Change,
    Key,
    StaleError,
    bundles_of,
    commit,
    newest_catalog,
    uncovered,
)
from emberkeep.repository.manifest import FileRef, Manifest
from emberkeep.repository.names import VersionId
from emberkeep.repository.pieces import KIND
from emberkeep.repository.policies import Grid
from emberkeep.repository.writer import Writer
from emberkeep.runtime.bandwidth import Bandwidth

# Versions whose ids are remembered for pieces that were not compared with them yet.
_MOST_UNSEEN = 16
_ROUND_NBYTES = 256 * 2**20
# A file of which less than this is used is rewritten.
_LEAST_USED = 0.5
_SMALLEST_BLOOM_WORDS = 8
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Keys:
    """Rows by name, sorted by (table, id); of one table those lie within lows and highs."""

    tables: I32
    ids: I64
    present: I32
    lows: I64
    highs: I64

    @classmethod
    def of(cls, tables: I32, ids: I64) -> Keys:
        """Keys from sorted arrays."""
        present, firsts = np.unique(tables, return_index=True)
        # One end for each beginning, also where there is none: earlier releases wrote pieces
        # without rows.
        lasts = np.append(firsts, ids.size)[1:] - 1
        return cls(tables, ids, present, ids[firsts], ids[lasts])

    def hashes(self) -> U64:
        """What bloom filters know them by."""
        from emberkeep.kernels import grid_arrays

        hashes = np.empty(self.ids.size, np.uint64)
        grid_arrays.hash_keys(self.tables, self.ids, hashes)
        return hashes

    def may_meet(self, other: Keys) -> bool:
        """Whether a table has ids of both in one range."""
        _, own, others = np.intersect1d(
            self.present, other.present, assume_unique=True, return_indices=True
        )
        return bool(
            (
                (self.lows[own] <= other.highs[others]) & (other.lows[others] <= self.highs[own])
            ).any()
        )


def _sorted(rows: Sequence[Rows]) -> tuple[I32, I64, I64]:
    """Tables, ids, and where each stood, sorted by (table, id)."""
    tables = np.concatenate([np.empty(0, np.int32), *(each.tables() for each in rows)])
    ids = np.concatenate([np.empty(0, np.int64), *(each.ids for each in rows)])
    order = np.lexsort((ids, tables))
    return tables[order], ids[order], order


@dataclass(slots=True)
class Living:
    """A piece that has no death yet: its rows, and which of them have ended."""

    bundle: Bundle
    piece: Piece
    keys: Keys
    order: I64
    deaths: I32
    bloom: U64
    dead: int = 0
    suspected: float = 0.0
    unseen: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, bundle: Bundle, piece: Piece, rows: Rows) -> Living:
        from emberkeep.kernels import grid_arrays

        tables, ids, order = _sorted([rows])
        words = max(_SMALLEST_BLOOM_WORDS, 1 << int(ids.size * 10 // 64).bit_length())
        bloom = np.zeros(words, np.uint64)
        keys = Keys.of(tables, ids)
        grid_arrays.bloom_add(bloom, keys.hashes())
        return cls(bundle, piece, keys, order, np.zeros(ids.size, np.int32), bloom)

    @property
    def key(self) -> Key:
        return self.bundle.name, self.piece.head

    def deaths_by_row(self) -> I32:
        deaths = np.empty(self.deaths.size, np.int32)
        deaths[self.order] = self.deaths
        return deaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """What a round did."""

    versions: tuple[int, ...] = ()
    covered: int
    generation: int
    pieces: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    skipped: bool = False


class Extractor:
    """Rounds of extraction in one grid, for its current writer, in one thread.

    A round that fails leaves the grid as it was and files that gc removes; the next round does its
    work. After a restart, rows that had ended in pieces not split yet are found again from the
    living pieces: their deaths may be recorded later than they were, never earlier.
    """

    def __init__(
        self, writer: Writer, grid: VersionId, settings: Grid, bandwidth: Bandwidth | None = None
    ) -> None:
        self.writer = writer
        self._bandwidth = bandwidth or Bandwidth(None, clock=writer.repository.clock)
        self.grid = grid
        self.settings = settings
        self.catalog: Catalog | None = None
        self.read_nbytes = 0
        self.read_seconds = 0.0
        self.written_nbytes = 0
        # Bytes of the living pieces, which a restore of the newest version reads, and of the rows
        # in them that are not known to have ended, which is what a new baseline would hold.
        self.living = (0, 0)
        self._living: dict[Key, Living] = {}
        self._recent: dict[int, Keys] = {}
        self._tables = list(writer.repository.tables)

    def run(self, newest: Manifest, *, split: bool = True) -> Extracted:
        """Takes in all versions up to `newest`; without `split` nothing is rewritten now."""
        try:
            if self.catalog is None:
                self._start()
            return self._run(newest, split)
        except BaseException as error:
            # What is known of pieces may no longer fit the storage: it is read again.
            known, self.catalog = self.catalog, None
            if isinstance(error, DamageError):
                # A file may be missing because a later writer, or our own gc, was done with it.
                self.writer.check()
                newest_one = newest_catalog(self.writer.repository, self.grid)
                if known is not None and newest_one.generation != known.generation:
                    raise StaleError from error
            raise

    def settle(self, newest: Manifest, *, split: bool = True) -> Extracted:
        """`run`, and again if gc has changed the catalog meanwhile."""
        for _ in range(_ATTEMPTS - 1):
            with suppress(StaleError):
                return self.run(newest, split=split)
        return self.run(newest, split=split)

    def _start(self) -> None:
        self._living, self._recent = {}, {}
        catalog = newest_catalog(self.writer.repository, self.grid)
        alive = [
            bundle.with_pieces(pieces)
            for bundle in catalog.bundles
            if (pieces := [piece for piece in bundle.pieces if piece.death is None])
        ]
        heads = sorted(
            rows_of_pieces(self.writer.repository, alive), key=lambda found: found[1].birth
        )
        for birth, found in groupby(heads, key=lambda found: found[1].birth):
            self._admit(birth, list(found))
        self.catalog = catalog

    def _run(self, newest: Manifest, split: bool) -> Extracted:
        assert self.catalog is not None
        repository = self.writer.repository
        # gc may have taken pieces out of it since.
        catalog = newest_catalog(repository, self.grid)
        if catalog.covered != self.catalog.covered:
            raise StaleError
        waiting = uncovered(repository, newest, catalog.covered)
        taken: list[Bundle] = []
        for manifest in waiting:
            bundles = bundles_of(manifest)
            self._admit(manifest.version.number, rows_of_pieces(repository, bundles))
            taken.extend(bundles)
        covered = max([catalog.covered, *(m.version.number for m in waiting)])
        chosen = self._chosen(catalog, taken) if split else []
        done = written = read = 0
        following = catalog
        while chosen or taken:
            batch, chosen = _first_of(chosen, _ROUND_NBYTES)
            before = self.read_nbytes, self.written_nbytes
            gone = frozenset(key for key, _ in batch)
            own = [b for b in (_without(bundle, gone) for bundle in taken) if b is not None]
            taken_names = {bundle.name for bundle in taken}
            files: list[str] = []
            try:
                new = self._split(batch, files)
                change = Change(
                    moved=frozenset(key for key in gone if key[0] not in taken_names),
                    new=(*own, *new),
                    covered=(following.covered, covered),
                )
            except BaseException:
                self.writer.let_go_files(files)
                raise
            following = self._commit(change, files)
            self._replace(gone, new)
            taken = []
            done += len(batch)
            read += self.read_nbytes - before[0]
            written += self.written_nbytes - before[1]
        self.catalog = following
        self.living = self._measure()
        return Extracted(
            versions=tuple(m.version.number for m in waiting),
            covered=covered,
            generation=following.generation,
            pieces=done,
            read_nbytes=read,
            written_nbytes=written,
            skipped=not split,
        )

    def _commit(self, change: Change, files: Sequence[str]) -> Catalog:
        try:
            following = commit(self.writer, self.grid, change)
        except StorageError:
            # It may still come to exist, so its files stay until the next writer's gc decides.
            raise
        except BaseException:
            self.writer.let_go_files(files)
            raise
        self.writer.let_go_files(files)
        return following

    def _measure(self) -> tuple[int, int]:
        read = needed = 0
        for living in self._living.values():
            nbytes, rows = living.piece.nbytes + living.piece.head_nbytes, living.piece.rows
            read += nbytes
            needed += nbytes * (rows - living.dead) // max(1, rows)
        return read, needed

    # -- who has died --------------------------------------------------------------------------

    def _admit(self, birth: int, heads: Sequence[tuple[Bundle, Piece, Rows]]) -> None:
        """A version arrives: it ends rows of the living pieces, and its own begin to live."""
        tables, ids, _ = _sorted([rows for _, _, rows in heads])
        if ids.size:
            first = np.ones(ids.size, np.bool_)
            first[1:] = (np.diff(tables) != 0) | (np.diff(ids) != 0)
            keys = Keys.of(tables[first], ids[first])
            hashes = keys.hashes()
            for living in self._living.values():
                self._look_at(living, birth, keys, hashes)
        for bundle, piece, rows in heads:
            living = Living.of(bundle, piece, rows)
            self._living[living.key] = living
        unseen = {version for living in self._living.values() for version in living.unseen}
        self._recent = {v: keys for v, keys in self._recent.items() if v in unseen}

    def _look_at(self, living: Living, birth: int, keys: Keys, hashes: U64) -> None:
        """The filters; a piece that passes them is compared with all that it has not seen."""
        from emberkeep.kernels import grid_arrays

        if "range" in self.settings.filters and not living.keys.may_meet(keys):
            return
        if "bloom" in self.settings.filters:
            hits = grid_arrays.bloom_hits(living.bloom, hashes)
            if not hits:
                return
            living.suspected += hits
            living.unseen.append(birth)
            self._recent[birth] = keys
            few = living.suspected < self.settings.ratio * living.piece.rows
            if few and len(living.unseen) < _MOST_UNSEEN:
                return
        else:
            living.unseen.append(birth)
            self._recent[birth] = keys
        self._compare(living)

    def _compare(self, living: Living) -> None:
        """Finds the deaths that versions not looked at so far have brought."""
        from emberkeep.kernels import grid_arrays

        for version in living.unseen:
            seen = self._recent[version]
            living.dead += grid_arrays.mark_deaths(
                living.keys.tables, living.keys.ids, living.deaths, seen.tables, seen.ids, version
            )
        living.unseen = []
        living.suspected = living.dead

    def _chosen(
        self, catalog: Catalog, taken: Iterable[Bundle]
    ) -> list[tuple[Key, tuple[Bundle, Piece]]]:
        """The pieces to be split, those without rows, and those that stand in files which are
        mostly unused."""
        found: dict[Key, tuple[Bundle, Piece]] = {}
        for living in self._living.values():
            enough = self.settings.ratio * living.piece.rows
            dying = living.dead and ("true" not in self.settings.filters or living.dead >= enough)
            # A piece without rows, as earlier releases wrote them, leaves nothing behind.
            if dying or not living.piece.rows:
                found[living.key] = living.bundle, living.piece
        for bundle in (*catalog.bundles, *taken):
            keys = [(bundle.name, piece.head) for piece in bundle.pieces]
            moving = sum(
                piece.nbytes + piece.head_nbytes
                for key, piece in zip(keys, bundle.pieces, strict=True)
                if key in found
            )
            if bundle.used_nbytes - moving < _LEAST_USED * bundle.file.size:
                found.update(
                    (key, (bundle, piece)) for key, piece in zip(keys, bundle.pieces, strict=True)
                )
        for key in found:
            if key in self._living:
                self._compare(self._living[key])
        return sorted(found.items(), key=lambda item: (item[1][1].birth, item[0]))

    # -- moving rows ---------------------------------------------------------------------------

    def _split(
        self, batch: Sequence[tuple[Key, tuple[Bundle, Piece]]], files: list[str]
    ) -> tuple[Bundle, ...]:
        """Reads the pieces, divides them, and writes the halves; returns the new files."""
        by_file: dict[str, tuple[Bundle, list[Piece]]] = {}
        for _, (bundle, piece) in batch:
            by_file.setdefault(bundle.name, (bundle, []))[1].append(piece)
        dead: list[EncodedRows] = []
        alive: list[EncodedRows] = []
        for bundle, pieces in by_file.values():
            for wanted in ranges(bundle.with_pieces(pieces)):
                self._divide(wanted, dead, alive)
        nonce = secrets.token_hex(8)
        new: list[Bundle] = []
        for half in (dead, alive):
            half.sort(key=lambda part: (part.birth, part.death or 0, repr(part.family)))
            for parts in _files(half, together=self.settings.concatenate):
                name = names.bundle_name(self.grid, self.writer.epoch, nonce, len(new))
                files.append(name)
                self.writer.hold_files([name])
                new.append(self._write(name, parts))
        return tuple(new)

    def _divide(self, wanted: Range, dead: list[EncodedRows], alive: list[EncodedRows]) -> None:
        clock = self.writer.repository.clock
        start = clock.monotonic()
        data = memoryview(read_range(self.writer.repository, wanted))
        self.read_seconds += clock.monotonic() - start
        self.read_nbytes += wanted.length
        for piece, at in wanted.pieces:
            bundle = wanted.bundle
            living = self._living.get((bundle.name, piece.head))
            rows = _rows_of(self.writer, bundle, piece) if living is None else None
            if living is not None:
                tables, ids = np.empty_like(living.keys.tables), np.empty_like(living.keys.ids)
                tables[living.order], ids[living.order] = living.keys.tables, living.keys.ids
                deaths = living.deaths_by_row()
            else:
                assert rows is not None
                tables, ids = rows.tables(), rows.ids
                deaths = np.full(ids.size, piece.death or 0, np.int32)
            columns = columns_of(bundle, piece, data[at : at + piece.nbytes])
            whole = EncodedRows(
                piece.birth, None, bundle.families[piece.family], tables, ids, columns
            )
            total = 0
            for death in np.unique(deaths).tolist():
                part = whole.take(np.flatnonzero(deaths == death), death or None)
                total += part.sum
                (dead if death else alive).append(part)
            if total % 2**64 != piece.sum:
                raise DamageError(
                    f"the rows of a piece of {bundle.name} did not add up when it was split: "
                    "nothing was changed; please report this",
                    name=bundle.name,
                )

    def _write(self, name: str, parts: Iterator[EncodedRows]) -> Bundle:
        bundle = BundleStream(parts, self._tables, nbytes=2**62, metadata={})
        digester = Digester()
        paced = self._bandwidth.passing(bundle.stream())
        self.writer.repository.store.put(name, digester.passing(paced))
        self.written_nbytes += digester.size
        file = FileRef(
            name=name,
            size=digester.size,
            digest=digester.whole,
            kind=KIND,
            metadata=bundle.metadata,
            block_nbytes=BLOCK_NBYTES,
            blocks=digester.blocks,
        )
        described = Bundle.of(file)
        assert described is not None
        return described

    def _replace(self, gone: frozenset[Key], new: Sequence[Bundle]) -> None:
        """What lives on is followed in its new place, with what is known about its rows."""
        for key in gone:
            self._living.pop(key, None)
        alive = [
            bundle.with_pieces(pieces)
            for bundle in new
            if (pieces := [piece for piece in bundle.pieces if piece.death is None])
        ]
        for bundle, piece, rows in rows_of_pieces(self.writer.repository, alive):
            living = Living.of(bundle, piece, rows)
            self._living[living.key] = living


def _rows_of(writer: Writer, bundle: Bundle, piece: Piece) -> Rows:
    ((_, _, rows),) = rows_of_pieces(writer.repository, [bundle.with_pieces([piece])])
    return rows


def _without(bundle: Bundle, gone: frozenset[Key]) -> Bundle | None:
    pieces = [piece for piece in bundle.pieces if (bundle.name, piece.head) not in gone]
    return bundle.with_pieces(pieces) if pieces else None


def _first_of(
    chosen: Sequence[tuple[Key, tuple[Bundle, Piece]]], most_nbytes: int
) -> tuple[list[tuple[Key, tuple[Bundle, Piece]]], list[tuple[Key, tuple[Bundle, Piece]]]]:
    """As many pieces as may be in memory at once, at least one, and the rest."""
    total = 0
    for at, (_, (_, piece)) in enumerate(chosen):
        total += piece.nbytes
        if at and total > most_nbytes:
            return list(chosen[:at]), list(chosen[at:])
    return list(chosen), []


def _files(parts: Sequence[EncodedRows], *, together: bool) -> Iterator[Iterator[EncodedRows]]:
    """The parts that go into one file: all, or those of one piece."""
    if together:
        if parts:
            yield iter(parts)
        return
    for _, alike in groupby(parts, key=lambda part: (part.birth, part.death, part.family)):
        yield iter(list(alike))
