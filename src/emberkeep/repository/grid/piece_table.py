"""Pieces as columns: what a catalog holds of them, and what is asked of thousands at once.

Files are numbered within the catalog of a shard, and a number is never used twice there. A piece
is known by the number of its file and the place of its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, Bools
from emberkeep.repository.grid.bundles import Bundle, Family, Piece, misplaced, widths_of
from emberkeep.repository.manifest import FileRef

ALIVE = 2**62
"""Stands for the death of rows that have none yet: later than every version."""

NUMBERS = (
    "file", "birth", "death", "family", "rows", "offset", "nbytes", "head", "head_nbytes"
)  # fmt: skip
DIGESTS = ("digest", "head_digest", "sum")
COLUMNS = (*NUMBERS, *DIGESTS)

Columns = Mapping[str, npt.NDArray[Any]]


class GridFile:
    """A file of pieces as a catalog names it.

    `file` is all that is known of it, but for its pieces; it is made when it is asked for, which a
    restore does not: pieces have digests of their own.
    """

    def __init__(
        self, name: str, size: int, families: tuple[Family, ...], described: Callable[[], FileRef]
    ) -> None:
        self.name = name
        self.size = size
        self.families = families
        self._described = described

    @classmethod
    def of(cls, file: FileRef, families: tuple[Family, ...]) -> GridFile:
        return cls(file.name, file.size, families, lambda: file)

    @cached_property
    def file(self) -> FileRef:
        return self._described()


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Pieces, in any order, and the files that they stand in."""

    files: Mapping[int, GridFile] = field(default_factory=dict)
    columns: Columns = field(
        default_factory=lambda: {
            name: np.empty(0, np.uint64 if name in DIGESTS else np.int64) for name in COLUMNS
        }
    )

    def __len__(self) -> int:
        return int(self.columns["file"].size)

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        return self.columns[column]

    @classmethod
    def of(cls, bundles: Iterable[tuple[int, Bundle]]) -> PieceTable:
        """Bundles, each with the number of its file."""
        files: dict[int, GridFile] = {}
        rows: list[tuple[int, ...]] = []
        for number, bundle in bundles:
            plain = {k: v for k, v in bundle.file.metadata.items() if k != "grid"}
            files[number] = GridFile.of(_with_metadata(bundle.file, plain), bundle.families)
            rows += [
                (
                    number, p.birth, ALIVE if p.death is None else p.death, p.family, p.rows,
                    p.offset, p.nbytes, p.head, p.head_nbytes, int(p.digest, 16),
                    int(p.head_digest, 16), p.sum,
                )
                for p in bundle.pieces
            ]  # fmt: skip
        if not rows:
            return cls(files)
        found = zip(COLUMNS, zip(*rows, strict=True), strict=True)
        return cls(
            files,
            {
                name: np.array(values, np.uint64 if name in DIGESTS else np.int64)
                for name, values in found
            },
        )

    @classmethod
    def joined(cls, tables: Sequence[PieceTable]) -> PieceTable:
        if len(tables) == 1:
            return tables[0]
        if tables and all(table.files is tables[0].files for table in tables):
            return cls(tables[0].files, joined_columns(tables))
        files = {
            number: table.files[number]
            for table in tables
            for number in np.unique(table["file"]).tolist()
        }
        return cls(files, joined_columns(tables))

    def taken(self, chosen: Bools | I64) -> PieceTable:
        """Some of the pieces; files without any are left out."""
        columns = {name: values[chosen] for name, values in self.columns.items()}
        present = np.unique(columns["file"]).tolist()
        return PieceTable({number: self.files[number] for number in present}, columns)

    def only(self, chosen: Bools) -> PieceTable:
        """Some of the pieces, with all files."""
        return PieceTable(self.files, {name: v[chosen] for name, v in self.columns.items()})

    def without(self, gone: Gone) -> tuple[PieceTable, Gone]:
        """The pieces that are not in a list, and the part of the list that is not among them."""
        if not len(gone) or not len(self):
            return self, gone
        keys = np.concatenate([self.keys().keys, gone.keys])
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        ranks = np.empty(len(keys), np.int64)
        ranks[order] = np.cumsum(
            np.append(False, (keys[order[1:]] != keys[order[:-1]]).any(axis=1))
        )  # fmt: skip
        own, others = ranks[: len(self)], ranks[len(self) :]
        return self.only(~np.isin(own, others)), Gone(gone.keys[~np.isin(others, own)])

    def read_by(self, version: int) -> Bools:
        """Which pieces a restore of a version reads."""
        found: Bools = (self["birth"] <= version) & (version < self["death"])
        return found

    def keys(self) -> Gone:
        """How the pieces are known."""
        return Gone(np.stack([self["file"], self["head"]], axis=1))

    def used_nbytes(self) -> dict[int, int]:
        """How much of each file pieces use."""
        numbers, inverse = np.unique(self["file"], return_inverse=True)
        used = np.bincount(
            inverse.reshape(-1), weights=(self["nbytes"] + self["head_nbytes"]).astype(np.float64)
        )
        return dict(zip(numbers.tolist(), used.astype(np.int64).tolist(), strict=True))

    def stored_nbytes(self) -> int:
        """Bytes of the files, with what in them no piece uses."""
        return sum(file.size for file in self.files.values())

    def pieces(self) -> list[Piece]:
        columns = self.columns
        death = [None if death == ALIVE else death for death in columns["death"].tolist()]
        return list(
            map(
                Piece._make,
                zip(
                    columns["birth"].tolist(), death, columns["family"].tolist(),
                    columns["rows"].tolist(), columns["offset"].tolist(),
                    columns["nbytes"].tolist(), _hex(columns["digest"]), columns["head"].tolist(),
                    columns["head_nbytes"].tolist(), _hex(columns["head_digest"]),
                    columns["sum"].tolist(), strict=True,
                ),
            )
        )  # fmt: skip

    def bundles(self) -> list[Bundle]:
        """The files by number, each with its pieces in the order in which they stand there."""
        order = np.lexsort((self["head"], self["file"]))
        ordered = PieceTable(self.files, {name: v[order] for name, v in self.columns.items()})
        pieces = ordered.pieces()
        numbers, firsts = np.unique(ordered["file"], return_index=True)
        ends = np.append(firsts, len(pieces))[1:].tolist()
        return [
            Bundle(self.files[number].file, self.files[number].families, pieces[first:end])
            for number, first, end in zip(numbers.tolist(), firsts.tolist(), ends, strict=True)
        ]

    def problem(self) -> str | None:
        """Why these cannot be pieces of these files; None if they can."""
        if not len(self):
            return None
        columns = self.columns
        numbers, inverse = np.unique(columns["file"], return_inverse=True)
        inverse = inverse.reshape(-1)
        if any(number not in self.files for number in numbers.tolist()):
            return "a piece is in no file"
        families = [self.files[number].families for number in numbers.tolist()]
        counts = np.array([len(each) for each in families], np.int64)
        if (columns["family"] < 0).any() or (columns["family"] >= counts[inverse]).any():
            return "a piece is of no family"
        firsts = np.cumsum(counts) - counts
        widths = np.array([sum(widths_of(f)) for each in families for f in each], np.int64)
        sizes = np.array([self.files[number].size for number in numbers.tolist()], np.int64)
        return misplaced(
            columns, sizes[inverse], widths[firsts[inverse] + columns["family"]], inverse
        )


def joined_columns(tables: Sequence[PieceTable]) -> Columns:
    """The columns of all, one after the other; files may bear the same numbers in several."""
    if not tables:
        return PieceTable().columns
    return {name: np.concatenate([table[name] for table in tables]) for name in COLUMNS}


@dataclass(frozen=True, slots=True)
class Gone:
    """Pieces that are no longer part of a catalog, by how they are known."""

    keys: I64 = field(default_factory=lambda: np.empty((0, 2), np.int64))

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def joined(cls, lists: Sequence[Gone]) -> Gone:
        return cls(np.concatenate([np.empty((0, 2), np.int64), *(each.keys for each in lists)]))


def _hex(numbers: npt.NDArray[Any]) -> list[str]:
    text = numbers.astype(">u8").tobytes().hex()
    return [text[at : at + 16] for at in range(0, len(text), 16)]


def _with_metadata(file: FileRef, metadata: dict[str, Any]) -> FileRef:
    if metadata == file.metadata:
        return file
    return FileRef(
        name=file.name, size=file.size, digest=file.digest, kind=file.kind, metadata=metadata,
        block_nbytes=file.block_nbytes, blocks=file.blocks,
    )  # fmt: skip
