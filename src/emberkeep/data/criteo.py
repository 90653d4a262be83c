"""Criteo's click logs: tab-separated lines as published for Kaggle and as the Terabyte logs.

A line holds the label, 13 integers and 26 hexadecimal categories; any value may be missing.
"""

from __future__ import annotations

import gzip
import operator
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import IO, Literal, cast

import numpy as np

from emberkeep._types import F32, I64, U8
from emberkeep.data.sources import Batch, Mark, existing_files, files_fingerprint
from emberkeep.errors import ConfigError, DataError, StateError
from emberkeep.kernels.sample_text import parse_lines, skip_lines

DENSE = 13
FIELDS = 26
FEATURES = tuple(f"C{f + 1}" for f in range(FIELDS))

_BLOCK = 1 << 22
_SCRATCH_ROWS = 8192
_START: Mark = {"file": 0, "offset": 0, "line": 0, "malformed": 0}
_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True, init=False)
class Criteo:
    """Samples of one file or of several in order; gzip is recognised by content, not by name.

    Transforms:

    - an integer x becomes log(1 + max(x, 0)); a missing one becomes 0, as do the negative ones;
    - a category of a field with a size becomes 1 + hash mod (size − 1); a missing one becomes 0;
    - without sizes ids are dynamic: field · 2³³ + value, with 2³² in place of a missing value. The
      field is part of the id, so fields may share one dynamic table and never collide; it is
      exact, and the category can be read back from it.

    Samples are numbered by their lines. Malformed lines raise `DataError`, or with
    `on_malformed="skip"` are left out, counted and not numbered.
    """

    files: tuple[Path, ...]
    sizes: tuple[int, ...] | None
    labelled: bool
    on_malformed: Literal["error", "skip"]

    def __init__(
        self,
        files: _Paths,
        *,
        sizes: int | Sequence[int] | None = None,
        labelled: bool = True,
        on_malformed: Literal["error", "skip"] = "error",
    ) -> None:
        """`sizes`: rows of each field's table, one number for all or 26; None: dynamic ids.

        `labelled=False` is for rows without the first column, as in Kaggle's test set; their
        labels are NaN.
        """
        # Plain integers, also of numpy's: they are part of the fingerprint.
        if sizes is not None:
            try:
                given = [sizes] * FIELDS if isinstance(sizes, Integral) else sizes
                sizes = tuple(map(operator.index, cast("Sequence[int]", given)))
            except TypeError:
                raise ConfigError(
                    f"sizes must be one whole number or {FIELDS}, not {sizes!r}"
                ) from None
        if sizes is not None and (len(sizes) != FIELDS or min(sizes) < 2):
            raise ConfigError(
                f"sizes must be {FIELDS} numbers from 2 up (row 0 is the missing category), "
                f"not {list(sizes)}"
            )
        if on_malformed not in ("error", "skip"):
            raise ConfigError(f"on_malformed must be 'error' or 'skip', not {on_malformed!r}")
        object.__setattr__(self, "files", existing_files(files))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "labelled", labelled)
        object.__setattr__(self, "on_malformed", on_malformed)

    def fingerprint(self) -> str:
        options = [self.sizes, self.labelled, self.on_malformed]
        return files_fingerprint("criteo", self.files, {"options": options})

    def count(self) -> int:
        """Passes over all files: newlines are counted, or lines parsed if malformed ones are
        skipped."""
        cursor = self.open(0)
        try:
            return cursor.skip(1 << 62)
        finally:
            cursor.close()

    def open(self, position: int, mark: Mark | None = None) -> _LineCursor:
        """Without a mark everything before the position is passed over; with one, files are
        opened at the byte (a gzip file is decompressed up to it)."""
        if mark is not None:
            if mark.keys() != _START.keys() or min(mark.values()) < 0:
                raise StateError(f"{mark} is no place in Criteo's files: the state is damaged")
            return _LineCursor(self, mark)
        cursor = _LineCursor(self, _START)
        cursor.skip(position)
        return cursor


class _LineCursor:
    """Reads blocks of bytes and parses the whole lines in them."""

    def __init__(self, source: Criteo, mark: Mark) -> None:
        self._source = source
        self._sizes = np.array(source.sizes or (0,) * FIELDS, np.int64)
        self._file = mark["file"]
        self._line = mark["line"]
        self._malformed = mark["malformed"]
        self._stream: IO[bytes] | None = None
        self._base = mark["offset"]
        self._rest = b""
        self._text: U8 = np.frombuffer(b"", np.uint8)
        self._at = self._end = 0

    def mark(self) -> Mark:
        return {
            "file": self._file,
            "offset": self._base + self._at,
            "line": self._line,
            "malformed": self._malformed,
        }

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def read(self, count: int) -> Batch:
        dense = np.empty((count, DENSE), np.float32)
        ids = np.empty((FIELDS, count), np.int64)
        labels = np.empty(count, np.float32)
        rows = self._parse(dense, ids, labels)
        return Batch(
            dense=dense[:rows],
            ids=dict(zip(FEATURES, ids[:, :rows], strict=True)),
            labels=labels[:rows],
        )

    def skip(self, count: int) -> int:
        skipped = 0
        if self._source.on_malformed == "skip":
            # Only parsing tells which lines are samples.
            rows = min(_SCRATCH_ROWS, count)
            dense, labels = np.empty((rows, DENSE), np.float32), np.empty(rows, np.float32)
            ids = np.empty((FIELDS, rows), np.int64)
            while skipped < count:
                rows = min(_SCRATCH_ROWS, count - skipped)
                done = self._parse(dense[:rows], ids, labels[:rows])
                skipped += done
                if done < rows:
                    break
            return skipped
        while skipped < count and self._fill():
            self._at, lines = skip_lines(self._text, self._at, self._end, count - skipped)
            self._line += lines
            skipped += lines
        return skipped

    def _parse(
        self,
        dense: F32,
        ids: I64,
        labels: F32,
    ) -> int:
        row = 0
        while row < len(labels) and self._fill():
            before = row
            self._at, row, malformed = parse_lines(
                self._text, self._at, self._end, self._source.labelled, self._sizes, row,
                dense, ids, labels,
            )  # fmt: skip
            self._line += row - before
            if malformed:
                self._pass_malformed()
        return row

    def _pass_malformed(self) -> None:
        after, _ = skip_lines(self._text, self._at, self._end, 1)
        if self._source.on_malformed == "error":
            line = self._text[self._at : after].tobytes()
            raise DataError(
                f"{self._source.files[self._file]}, line {self._line + 1}: "
                f"{_complaint(line, self._source.labelled)}; "
                "repair the line, or pass on_malformed='skip' to leave such lines out"
            )
        self._at = after
        self._line += 1
        self._malformed += 1

    def _fill(self) -> bool:
        """Makes sure that a whole line stands at `_at`; False at the end of the last file."""
        while self._at >= self._end:
            if self._file >= len(self._source.files):
                return False
            path = self._source.files[self._file]
            try:
                block = self._next_block(path)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataError(
                    f"{path}: damaged gzip data after line {self._line}: {error}"
                ) from error
            except OSError as error:
                raise DataError(
                    f"{path}: cannot be read after line {self._line}: {error}"
                ) from error
            if block:
                self._take(block, path)
            elif self._rest:
                self._take(b"\n", path)  # the last line of a file may lack its newline
            else:
                self.close()
                self._file += 1
                self._base = self._at = self._end = self._line = 0
        return True

    def _next_block(self, path: Path) -> bytes:
        if self._stream is None:
            self._stream = _open(path)
            self._stream.seek(self._base)
        return self._stream.read(_BLOCK)

    def _take(self, block: bytes, path: Path) -> None:
        """Puts a block behind the unfinished line of the last one."""
        self._base += self._end
        text = self._rest + block
        self._at, self._end = 0, text.rfind(b"\n") + 1
        if self._end == 0 and len(text) >= _BLOCK:
            raise DataError(
                f"{path}, line {self._line + 1}: longer than {_BLOCK} bytes: this is no text "
                "of lines"
            )
        self._rest = text[self._end :]
        self._text = np.frombuffer(text, np.uint8)


def _open(path: Path) -> IO[bytes]:
    stream = path.open("rb", buffering=0)
    if stream.read(2) == b"\x1f\x8b":
        stream.close()
        return cast(IO[bytes], gzip.open(path, "rb"))
    stream.seek(0)
    return stream


def _complaint(line: bytes, labelled: bool) -> str:
    """Says what is wrong with a line that the kernel refused."""
    values = line.rstrip(b"\r\n").split(b"\t")
    expected = int(labelled) + DENSE + FIELDS
    if len(values) != expected:
        hint = ""
        if len(values) == DENSE + FIELDS:
            hint = " (rows without a label are read with labelled=False)"
        elif len(values) == 1 + DENSE + FIELDS:
            hint = " (rows with a label are read with labelled=True)"
        return f"{len(values)} columns instead of {expected}{hint}"
    first_integer = int(labelled)
    for column, value in enumerate(values):
        text = value.decode("ascii", "backslashreplace")[:40]
        if column < first_integer:
            good, kind = value in (b"0", b"1"), "a label (0 or 1)"
        elif column < first_integer + DENSE:
            digits = value[1:] if value.startswith(b"-") else value
            good = value == b"" or (digits.isdigit() and len(digits) <= 18)
            kind = "an integer of at most 18 digits"
        else:
            good = len(value) <= 8 and all(byte in b"0123456789abcdefABCDEF" for byte in value)
            kind = "a hexadecimal category of at most 8 digits"
        if not good:
            return f"column {column + 1} is {text!r}, not {kind}"
    return "it cannot be parsed"
