"""Extraction in the part of one shard, in the process that holds it: this one, or a server.

A round notes which rows of the living pieces the versions that wait have ended. It moves rows once
enough of all living rows have ended, so that rounds which move are few and their files long: then
pieces are split, those first of which the largest share has ended, until half of what is allowed is
left; and all of which twice as much has ended as is allowed on average. So a restore of the newest
version reads at most 1/(1 − ratio) times the rows that it needs. Deaths are recorded in the steps
that let all versions together read least (`death_steps`), so those before it read less in vain. A
piece all of whose rows have ended is not moved unless its rows died at very different times: that
it ended is written in the catalog.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import groupby

import numpy as np

from emberkeep._types import I32, Json
from emberkeep.errors import DamageError
from emberkeep.repository import names
from emberkeep.repository.digests import BLOCK_NBYTES, Digester
from emberkeep.repository.grid.bundle_reader import Range, ranges, read_range, rows_of_pieces
from emberkeep.repository.grid.bundles import (
    Bundle,
    BundleStream,
    EncodedRows,
    Piece,
    columns_of,
)
from emberkeep.repository.grid.catalog import Part, bundles_of
from emberkeep.repository.grid.death_steps import COST_NBYTES, Steps, steps_of, worth_moving
from emberkeep.repository.grid.living import Deaths, Key, Living, LivingRows, by_birth
from emberkeep.repository.grid.piece_table import ALIVE, Gone, PieceTable
from emberkeep.repository.grid.segments import SegmentRef
from emberkeep.repository.manifest import FileRef, Manifest
from emberkeep.repository.names import VersionId
from emberkeep.repository.pieces import KIND
from emberkeep.repository.policies import Grid
from emberkeep.repository.repository import Repository
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.fields import Fields

_ROUND_NBYTES = 256 * 2**20
# A file of which less than this is used is rewritten.
_LEAST_USED = 0.5
# Files that a round may write for one shard before names could meet those of the next.
_SHARD_FILES = 10**6

Chosen = dict[Key, tuple[Bundle, Piece]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """What a round shall do in one shard: begin with this part, take in these versions."""

    grid: VersionId
    part: Part
    shard: int
    epoch: int
    nonce: str
    waiting: tuple[VersionId, ...]
    split: bool
    rules: Grid

    def to_json(self) -> Json:
        rules = asdict(self.rules)
        budget = self.rules.restore_budget
        rules["restore_budget"] = None if budget is None else budget.total_seconds()
        return {
            "grid": str(self.grid),
            "part": self.part.to_json(),
            "shard": self.shard,
            "epoch": self.epoch,
            "nonce": self.nonce,
            "waiting": list(map(str, self.waiting)),
            "split": self.split,
            "rules": rules,
        }

    @classmethod
    def from_json(cls, document: Json) -> RoundOrder:
        rules = dict(document["rules"])
        budget = rules["restore_budget"]
        rules["restore_budget"] = None if budget is None else timedelta(seconds=budget)
        grid = VersionId.parse(document["grid"])
        return cls(
            grid=grid,
            part=Part.of(Fields("the order of a round", document["part"]), grid),
            shard=int(document["shard"]),
            epoch=int(document["epoch"]),
            nonce=str(document["nonce"]),
            waiting=tuple(map(VersionId.parse, document["waiting"])),
            split=bool(document["split"]),
            rules=Grid(**rules),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRound:
    """What a round has prepared in one shard: it counts once a generation names the part.

    `stored_nbytes` are those of the part's files, with what in them no piece uses. `living` is how
    many bytes the living pieces have, which a restore of the newest version reads, and how many of
    them are of rows that are not known to have ended.
    """

    part: Part
    pieces: int = 0
    read_nbytes: int = 0
    read_seconds: float = 0.0
    written_nbytes: int = 0
    stored_nbytes: int = 0
    living: tuple[int, int] = (0, 0)

    def to_json(self) -> Json:
        return {**asdict(self), "part": self.part.to_json()}

    @classmethod
    def from_json(cls, document: Json, grid: VersionId) -> ShardRound:
        answer = Fields("the answer of a server", document)
        read, needed = answer.list_of("living", int)
        return cls(
            part=Part.of(answer.object("part"), grid),
            pieces=answer.number("pieces"),
            read_nbytes=answer.number("read_nbytes"),
            read_seconds=float(document["read_seconds"]),
            written_nbytes=answer.number("written_nbytes"),
            stored_nbytes=answer.number("stored_nbytes"),
            living=(read, needed),
        )


class ShardExtraction:
    """Rounds in the part of one shard, in one thread.

    What is known of living rows is kept from round to round, as long as the next order begins with
    what the last one prepared; otherwise it is read again. Rows that had ended in pieces not
    split yet are then found again from the living pieces: their deaths may be recorded later than
    they were, never earlier. `advance` is called as the work goes on.
    """

    def __init__(
        self, repository: Repository, grid: VersionId, shard: int,
        advance: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.repository = repository
        self.grid = grid
        self.shard = shard
        self.bandwidth = Bandwidth(None, clock=repository.clock)
        self._advance = advance
        self._known: str | None = None
        self._listed_in: tuple[SegmentRef, ...] = ()
        self._rows = LivingRows()
        self._whole: set[Key] = set()
        self._kept: dict[tuple[int, bool], Deaths] = {}
        self._tables = list(repository.tables)
        self._read_nbytes = self._written_nbytes = 0
        self._read_seconds = 0.0

    def run(self, order: RoundOrder, manifests: Sequence[Manifest] | None = None) -> ShardRound:
        """Prepares a round. The `manifests` of what waits are read unless they are given."""
        self._read_nbytes = self._written_nbytes = 0
        self._read_seconds = 0.0
        known, self._known = self._known, None  # until it has ended well
        if known is None or known != order.part.living:
            self._start(order.part)
        prepared = self._run(order, manifests)
        self._known = prepared.part.living
        self._listed_in = prepared.part.segments
        for ref in {*order.part.segments} - {*self._listed_in}:
            self.repository.segments.pop(ref.name, None)
        return prepared

    def _start(self, part: Part) -> None:
        self._rows = LivingRows()
        table = part.everything(self.repository)
        alive = table.taken(table["death"] == ALIVE)
        for heads in by_birth(rows_of_pieces(self.repository, alive.bundles())):
            self._admit(heads)

    def _admit(self, heads: Sequence[tuple[Bundle, Piece, object]]) -> None:
        self._rows.admit(heads)  # type: ignore[arg-type]
        self._advance()

    def _run(self, order: RoundOrder, manifests: Sequence[Manifest] | None) -> ShardRound:
        repository = self.repository
        if manifests is None:
            manifests = [repository.manifest(version) for version in order.waiting]
        taken: list[Bundle] = []
        for manifest in manifests:
            bundles = bundles_of(manifest, self.shard)
            self._admit(rows_of_pieces(repository, bundles))
            taken.extend(bundles)
        chosen, ended = self._chosen(order, taken) if order.split else ({}, {})
        if not taken and not chosen and not ended:
            return self._prepared(order.part)
        new = self._split(order, chosen)
        part = self._listed(order, taken, {*chosen}, ended, new)
        self._replace({*chosen, *ended}, new)
        return self._prepared(part, len(chosen))

    def _prepared(self, part: Part, pieces: int = 0) -> ShardRound:
        stored = sum(file.size for file in part.files(self.repository).values())
        return ShardRound(
            part=part, pieces=pieces, read_nbytes=self._read_nbytes,
            read_seconds=self._read_seconds, written_nbytes=self._written_nbytes,
            stored_nbytes=stored, living=self._measure(),
        )  # fmt: skip

    def _measure(self) -> tuple[int, int]:
        read = needed = 0
        for living in self._rows.pieces.values():
            rows = living.piece.rows
            read += living.nbytes
            needed += living.nbytes * (rows - self._rows.dead(living)) // max(1, rows)
        return read, needed

    # -- what is moved -------------------------------------------------------------------------

    def _chosen(self, order: RoundOrder, taken: Sequence[Bundle]) -> tuple[Chosen, dict[Key, int]]:
        """The pieces whose rows are moved, and those that ended as they are, with their deaths."""
        ratio, rows = order.rules.ratio, self._rows
        found: Chosen = {}
        ended: dict[Key, int] = {}
        total, dead = rows.totals()
        dying: list[tuple[bool, float, int, Key]] = []
        for key, living in rows.pieces.items():
            piece = living.piece
            count, own = piece.rows, rows.dead(living)
            if not count:  # as earlier releases wrote them: it leaves nothing behind
                found[key] = living.bundle, piece
            elif own == count:
                deaths = rows.rows_of(living)[2]
                total, dead = total - count, dead - count
                if self._stays(piece, deaths, ratio):
                    ended[key] = int(deaths.max())
                else:
                    found[key] = living.bundle, piece
            elif own:
                dying.append((self._has_few_dead(living), own / count, own, key))
        if dead >= ratio * total:
            # The most dead for what is moved; few dead rows become a piece only if they must.
            for few, share, own, key in sorted(
                dying, key=lambda each: (each[0], -each[1], each[3])
            ):
                if dead < ratio * total / (1 if few else 2) and (few or share < 2 * ratio):
                    continue
                found[key] = rows.pieces[key].bundle, rows.pieces[key].piece
                total, dead = total - own, dead - own
        moving: Counter[str] = Counter()
        for (name, _), (_, piece) in found.items():
            moving[name] += piece.nbytes + piece.head_nbytes
        # How much of a file is used changes when something moves, or when gc has dropped pieces.
        same = not found and order.part.segments == self._listed_in
        unused = [] if same else self._mostly_unused(order.part, moving)
        divided = {*found}
        for bundle in (*unused, *taken):
            if bundle.used_nbytes - moving[bundle.name] < _LEAST_USED * bundle.file.size:
                found.update(((bundle.name, p.head), (bundle, p)) for p in bundle.pieces)
        self._whole = {
            key
            for key in found.keys() - divided
            if ratio and key in rows.pieces and self._has_few_dead(rows.pieces[key])
        }
        return found, {key: death for key, death in ended.items() if key not in found}

    def _mostly_unused(self, part: Part, moving: Counter[str]) -> list[Bundle]:
        """The files of which little is used once some bytes have moved."""
        table = part.everything(self.repository)
        few = [
            number
            for number, used in table.used_nbytes().items()
            if used - moving[(file := table.files[number]).name] < _LEAST_USED * file.size
        ]
        return table.taken(np.isin(table["file"], few)).bundles() if few else []

    def _has_few_dead(self, living: Living) -> bool:
        """Whether some rows of a piece have died, and a piece of them would cost more than they."""
        own, rows = self._rows.dead(living), living.piece.rows
        return 0 < own < rows and own * living.nbytes < COST_NBYTES * rows

    @staticmethod
    def _stays(piece: Piece, deaths: I32, ratio: float) -> bool:
        """Whether a piece all of whose rows have died can be recorded as one that has."""
        if not ratio:
            return bool(deaths.min() == deaths.max())
        return not worth_moving(piece.birth, deaths, piece.nbytes // piece.rows)

    # -- moving rows ---------------------------------------------------------------------------

    def _split(self, order: RoundOrder, chosen: Chosen) -> list[Bundle]:
        """Reads the pieces, divides them, and writes the halves; returns the new files."""
        new: list[Bundle] = []
        steps = self._steps(chosen) if order.rules.ratio else {}
        self._kept = {}
        waiting = sorted(chosen.items(), key=lambda item: (item[1][1].birth, item[0]))
        for batch in _batches([about for _, about in waiting], _ROUND_NBYTES):
            by_file: dict[str, tuple[Bundle, list[Piece]]] = {}
            for bundle, piece in batch:
                by_file.setdefault(bundle.name, (bundle, []))[1].append(piece)
            dead: list[EncodedRows] = []
            alive: list[EncodedRows] = []
            for bundle, pieces in by_file.values():
                for wanted in ranges(bundle.with_pieces(pieces)):
                    self._divide(wanted, steps, dead, alive)
            for half in (dead, alive):
                half.sort(key=lambda part: (part.birth, part.death or 0, repr(part.family)))
                for parts in _files(half, together=order.rules.concatenate):
                    index = self.shard * _SHARD_FILES + len(new)
                    name = names.bundle_name(self.grid, order.epoch, order.nonce, index)
                    new.append(self._write(name, parts))
        return new

    def _steps(self, chosen: Chosen) -> dict[int, Steps]:
        """Of each birth, in which steps its rows are recorded to have died."""
        parts: dict[int, list[tuple[I32, int]]] = {}
        for key, (_, piece) in chosen.items():
            living = self._rows.pieces.get(key)
            if living is not None and piece.rows:
                about = self._rows.rows_of(living)[2], piece.nbytes // piece.rows
                parts.setdefault(piece.birth, []).append(about)
        return {birth: steps_of(birth, some) for birth, some in parts.items()}

    def _divide(
        self, wanted: Range, steps: Mapping[int, Steps], dead: list[EncodedRows],
        alive: list[EncodedRows],
    ) -> None:  # fmt: skip
        clock = self.repository.clock
        start = clock.monotonic()
        data = memoryview(read_range(self.repository, wanted))
        self._read_seconds += clock.monotonic() - start
        self._read_nbytes += wanted.length
        self._advance()
        bundle = wanted.bundle
        for piece, at in wanted.pieces:
            if not piece.rows:
                continue
            living = self._rows.pieces.get((bundle.name, piece.head))
            if living is not None:
                tables, ids, deaths = self._rows.rows_of(living)
                if piece.birth in steps:
                    deaths = self._recorded(living, steps[piece.birth])
            else:
                ((_, _, rows),) = rows_of_pieces(self.repository, [bundle.with_pieces([piece])])
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

    def _recorded(self, living: Living, steps: Steps) -> I32:
        """The deaths that are recorded for the rows of a piece. In one that moves only because
        little else of its file is used, too few may have died for a piece of their own: they stay,
        and are remembered."""
        tables, ids, deaths = self._rows.rows_of(living)
        if living.key not in self._whole:
            return steps.record(deaths)
        dead = np.flatnonzero(deaths)
        rows = zip(tables[dead].tolist(), ids[dead].tolist(), strict=True)
        kept = self._kept.setdefault((living.piece.birth, living.is_tombstones), {})
        kept.update(zip(rows, deaths[dead].tolist(), strict=True))
        return np.zeros_like(deaths)

    def _write(self, name: str, parts: Iterator[EncodedRows]) -> Bundle:
        bundle = BundleStream(parts, self._tables, nbytes=2**62, metadata={"shard": self.shard})
        digester = Digester()
        paced = self.bandwidth.passing(self._advancing(bundle.stream()))
        self.repository.store.put(name, digester.passing(paced))
        self._written_nbytes += digester.size
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

    def _advancing(self, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        for buffer in buffers:
            self._advance()
            yield buffer

    # -- what the catalog says -----------------------------------------------------------------

    def _listed(
        self, order: RoundOrder, taken: Sequence[Bundle], moved: set[Key], ended: dict[Key, int],
        new: Sequence[Bundle],
    ) -> Part:  # fmt: skip
        """The part with what came, what moved and what ended."""
        own = []
        for bundle in taken:
            pieces = [
                piece._replace(death=ended.get((bundle.name, piece.head), piece.death))
                for piece in bundle.pieces
                if (bundle.name, piece.head) not in moved
            ]
            if pieces:
                own.append(bundle.with_pieces(pieces))
        here = {bundle.name for bundle in taken}
        earlier = [key for key in (*moved, *ended) if key[0] not in here]
        number_of: dict[str, int] = {}
        if earlier:
            files = order.part.files(self.repository)
            number_of = {file.name: number for number, file in files.items()}
        in_place = []
        for key, death in ended.items():
            if key[0] in number_of:
                living = self._rows.pieces[key]
                piece = living.piece._replace(death=death)
                in_place.append((number_of[key[0]], living.bundle.with_pieces([piece])))
        first = order.part.next_file or len(order.part.inline)
        added = PieceTable.of([*in_place, *enumerate([*own, *new], first)])
        gone = Gone(
            np.array([[number_of[name], head] for name, head in earlier], np.int64).reshape(-1, 2)
        )
        index = self.shard * _SHARD_FILES
        name = names.segment_name(self.grid, order.epoch, order.nonce, index)
        part = replace(order.part, shard=self.shard)
        return part.appended(self.repository, name, added, gone, secrets.token_hex(8))

    def _replace(self, gone: Iterable[Key], new: Sequence[Bundle]) -> None:
        """What lives on is followed in its new place, with what is known about its rows."""
        alive = [
            bundle.with_pieces(pieces)
            for bundle in new
            if (pieces := [piece for piece in bundle.pieces if piece.death is None])
        ]
        self._rows.replace(gone, rows_of_pieces(self.repository, alive), self._kept)
        self._kept = {}


def _batches(
    chosen: Sequence[tuple[Bundle, Piece]], most_nbytes: int
) -> Iterator[Sequence[tuple[Bundle, Piece]]]:
    """As many pieces at a time as may be in memory at once, at least one."""
    first, total = 0, 0
    for at, (_, piece) in enumerate(chosen):
        if at > first and total + piece.nbytes > most_nbytes:
            yield chosen[first:at]
            first, total = at, 0
        total += piece.nbytes
    if first < len(chosen):
        yield chosen[first:]


def _files(parts: Sequence[EncodedRows], *, together: bool) -> Iterator[Iterator[EncodedRows]]:
    """The parts that go into one file: all, or those of one piece."""
    if together:
        if parts:
            yield iter(parts)
        return
    for _, alike in groupby(parts, key=lambda part: (part.birth, part.death, part.family)):
        yield iter(list(alike))
