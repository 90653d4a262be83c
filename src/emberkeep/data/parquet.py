"""Samples from Parquet files, by a mapping of columns to labels, dense values and features."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from emberkeep._types import F64, Bools
from emberkeep.data.sources import Batch, Ids, Mark, MultiHot, existing_files, files_fingerprint
from emberkeep.errors import ConfigError, DataError
from emberkeep.kernels.sample_text import hash_integers, hash_strings

MISSING = 1 << 62
"""The dynamic id of a missing value; hashed strings lie below it."""

_ROWS_AT_ONCE = 1 << 15
_RowOf = Callable[[int], int]
"""The row that a value belongs to, by its place in a column."""
_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """A categorical column: integers, strings, or lists of either (multi-hot).

    - `size=None`: ids for a dynamic table. Integers are kept, strings hashed to 62 bits; a missing
      value is 2⁶².
    - `size=n`, `how="hash"`: 1 + hash mod (n − 1), a missing value is 0.
    - `size=n`, `how="mod"`: integers mod n, so ids that already lie below n stay as they are. There
      is no id left for a missing value: meeting one is an error.

    A missing list is an empty one.
    """

    column: str
    feature: str | None = None
    """The feature's name in the batch; the column's if not given."""
    size: int | None = None
    how: Literal["hash", "mod"] = "hash"

    def __post_init__(self) -> None:
        if self.how not in ("hash", "mod"):
            raise ConfigError(f"how must be 'hash' or 'mod', not {self.how!r}")
        if self.size is not None and self.size < (2 if self.how == "hash" else 1):
            raise ConfigError(f"column {self.column!r}: a table of {self.size} rows is too small")
        if self.size is None and self.how == "mod":
            raise ConfigError(f"column {self.column!r}: how='mod' needs a size")

    @property
    def name(self) -> str:
        return self.column if self.feature is None else self.feature


@dataclass(frozen=True, slots=True, init=False)
class Parquet:
    """Rows of one file or of several in order; any row is reached without reading those before
    its row group. A directory stands for all Parquet files below it, a pattern such as
    `day-*/part*` for what matches, in the order of names, numbers by their value.

    Numbers may be stored as strings; an empty one is null. A dense value that is null or NaN
    becomes 0; columns named in `log` become log(1 + max(x, 0)).
    Without a label column labels are NaN; a label that is null, NaN or infinite is an error.
    """

    files: tuple[Path, ...]
    label: str | None
    dense: tuple[str, ...]
    log: frozenset[str]
    categories: tuple[Category, ...]

    def __init__(
        self,
        files: _Paths,
        *,
        label: str | None,
        dense: Sequence[str] = (),
        log: Sequence[str] = (),
        categories: Sequence[Category] = (),
    ) -> None:
        for what, columns in (("dense", dense), ("log", log), ("categories", categories)):
            if isinstance(columns, str):
                raise ConfigError(f"{what} must be a list, not the string {columns!r}")
        for category in categories:
            if not isinstance(category, Category):
                raise ConfigError(f"categories are Category(column=...) each, not {category!r}")
        names = [category.name for category in categories]
        if len(set(names)) < len(names):
            raise ConfigError(f"features must have different names, not {names}")
        if not set(log) <= set(dense):
            raise ConfigError(f"log={list(log)} names columns that are not among the dense ones")
        object.__setattr__(self, "files", existing_files(files, (".parquet", ".parq", ".pq")))
        object.__setattr__(self, "label", label)
        object.__setattr__(self, "dense", tuple(dense))
        object.__setattr__(self, "log", frozenset(log))
        object.__setattr__(self, "categories", tuple(categories))

    def fingerprint(self) -> str:
        options = {
            "label": self.label,
            "dense": self.dense,
            "log": sorted(self.log),
            "categories": [asdict(category) for category in self.categories],
        }
        return files_fingerprint("parquet", self.files, options)

    def count(self) -> int:
        """From the files' footers alone."""
        return sum(_open(path).metadata.num_rows for path in self.files)

    def open(self, position: int, mark: Mark | None = None) -> _RowCursor:
        return _RowCursor(self, position)

    @property
    def _columns(self) -> list[str]:
        wanted = [*self.dense, *(category.column for category in self.categories)]
        if self.label is not None:
            wanted.append(self.label)
        return list(dict.fromkeys(wanted))


class _RowCursor:
    """Streams record batches; only rows that are asked for are converted."""

    def __init__(self, source: Parquet, position: int) -> None:
        self._source = source
        self._stream = _record_batches(source, position)
        self._arrow: tuple[Path, int, pa.RecordBatch] | None = None

    def read(self, count: int) -> Batch:
        parts = [self._convert(*piece) for piece in self._pieces(count)]
        if not parts:
            return self._convert(self._source.files[0], 0, _no_rows(self._source))
        return parts[0] if len(parts) == 1 else _joined(parts)

    def skip(self, count: int) -> int:
        return sum(len(arrow) for _, _, arrow in self._pieces(count))

    def mark(self) -> Mark:
        return {}

    def close(self) -> None:
        self._stream.close()
        self._arrow = None

    def _pieces(self, count: int) -> Iterator[tuple[Path, int, pa.RecordBatch]]:
        """The next rows as (file, number of the first row in it, slice of a record batch)."""
        while count > 0:
            if self._arrow is None:
                self._arrow = next(self._stream, None)
                if self._arrow is None:
                    return
            path, row, arrow = self._arrow
            piece = arrow.slice(0, count)
            rest = arrow.slice(len(piece))
            self._arrow = (path, row + len(piece), rest) if len(rest) else None
            count -= len(piece)
            if len(piece):
                yield path, row, piece

    def _convert(self, path: Path, row: int, arrow: pa.RecordBatch) -> Batch:
        source = self._source
        rows = len(arrow)
        dense = np.empty((rows, len(source.dense)), np.float32)
        for j, name in enumerate(source.dense):
            dense[:, j] = _dense(path, row, name, arrow.column(name), name in source.log)
        if source.label is None:
            labels: Any = np.full(rows, np.nan, np.float32)
        else:
            labels = _numbers(path, row, source.label, arrow.column(source.label))
            if not np.isfinite(labels).all():
                first = int(np.argmin(np.isfinite(labels)))
                what = "no label" if np.isnan(labels[first]) else f"the label {labels[first]}"
                raise DataError(f"{path}, row {row + first}: column {source.label!r} has {what}")
            labels = labels.astype(np.float32)
        ids = {
            category.name: _ids(path, row, category, arrow.column(category.column))
            for category in source.categories
        }
        return Batch(dense=dense, ids=ids, labels=labels)


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _record_batches(
    source: Parquet, position: int
) -> Generator[tuple[Path, int, pa.RecordBatch], None, None]:
    """(file, number of the first row in it, rows) from a sample position on."""
    for path in source.files:
        with _open(path) as file:
            total = file.metadata.num_rows
            if position >= total:
                position -= total
                continue
            _check_columns(path, file, source)
            groups = range(file.metadata.num_row_groups)
            ends = list(itertools.accumulate(file.metadata.row_group(g).num_rows for g in groups))
            first = bisect.bisect_right(ends, position)
            row = ends[first - 1] if first else 0
            drop, position = position - row, 0
            try:
                stream = file.iter_batches(
                    _ROWS_AT_ONCE, row_groups=list(groups[first:]), columns=source._columns
                )
                for arrow in stream:
                    passed = min(drop, len(arrow))
                    drop -= passed
                    if passed < len(arrow):
                        yield path, row + passed, arrow.slice(passed)
                    row += len(arrow)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path}: damaged after row {row}: {error}") from error


def _check_columns(path: Path, file: pq.ParquetFile, source: Parquet) -> None:
    present = file.schema_arrow.names
    missing = [name for name in source._columns if name not in present]
    if missing:
        raise DataError(f"{path}: no columns {missing}; the file has {present}")


def _nulls(column: pa.Array) -> Bools:
    nulls: Bools = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _blank_as_null(path: Path, name: str, column: pa.Array) -> pa.Array:
    """A column of text without the empty ones; any other as it is."""
    if pa.types.is_dictionary(column.type) and _is_text(column.type.value_type):
        column = column.dictionary_decode()
    if not _is_text(column.type):
        return column
    try:
        text = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: column {name!r} holds bytes that are no text, numbers are needed: {error}"
        ) from error
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, text.type), text)


def _first_wrong(column: pa.Array, kind: Any) -> int:
    """Where text stands that is no number of that kind."""
    for at, text in enumerate(column.to_pylist()):
        try:
            pa.scalar(text, pa.large_string()).cast(kind)
        except pa.ArrowException:
            return at
    return 0


def _parsed(path: Path, row_of: _RowOf, name: str, column: pa.Array, kind: Any) -> pa.Array:
    """Text as numbers; what is none is named by its row."""
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        at = _first_wrong(column, kind)
        raise DataError(
            f"{path}, row {row_of(at)}: column {name!r} holds {column[at].as_py()!r}, which is no "
            f"{'whole ' if pa.types.is_integer(kind) else ''}number"
        ) from error


def _numbers(path: Path, row: int, name: str, column: pa.Array) -> F64:
    """A column of numbers, booleans, or text that says numbers, as float64; nulls as NaN."""
    column = _blank_as_null(path, name, column)
    try:
        if _is_text(column.type):
            column = _parsed(path, lambda at: row + at, name, column, pa.float64())
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.uint8())
        numbers: F64 = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: column {name!r} is {column.type}, numbers are needed: {error}"
        ) from error
    return numbers


def _dense(path: Path, row: int, name: str, column: pa.Array, log: bool) -> F64:
    numbers = np.nan_to_num(
        _numbers(path, row, name, column), nan=0.0, posinf=np.inf, neginf=-np.inf
    )
    return np.log1p(np.maximum(numbers, 0.0)) if log else numbers


def _ids(path: Path, row: int, category: Category, column: pa.Array) -> Ids | MultiHot:
    if not _is_list(column.type):
        return _single(path, lambda at: row + at, category, column)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column), np.int64)
    np.cumsum(lengths[:-1], out=offsets[1:])
    # `flatten` leaves out missing lists and respects the slice, where `values` would not.
    return _single(
        path, lambda at: row + int(np.searchsorted(offsets, at, side="right")) - 1, category,
        column.flatten(),
    ), offsets  # fmt: skip


def _is_list(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _single(path: Path, row_of: _RowOf, category: Category, column: pa.Array) -> Ids:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    size = category.size or 0
    if category.how == "mod" and _is_text(column.type):
        column = _blank_as_null(path, category.column, column)
        column = _parsed(path, row_of, category.column, column, pa.int64())
    ids = np.empty(len(column), np.int64)
    if pa.types.is_integer(column.type):
        # 64-bit ids above 2^63 wrap to negative ones: they stay distinct.
        unsigned = column.type == pa.uint64()
        plain = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
        values = plain.view(np.int64) if unsigned else plain.astype(np.int64)
        if size == 0:
            ids[:] = values
        elif category.how == "hash":
            hash_integers(np.ascontiguousarray(values), size, ids)
        else:
            ids[:] = (plain.astype(np.uint64) % np.uint64(size)) if unsigned else values % size
    elif _is_text(column.type) and category.how == "hash":
        column = column.cast(pa.large_binary())
        _, offsets, text = column.buffers()
        starts = np.frombuffer(offsets, np.int64, len(column) + 1, column.offset * 8)
        data = b"" if text is None else text
        hash_strings(np.frombuffer(data, np.uint8), starts, size, ids)
    else:
        needed = "integers" if category.how == "mod" else "integers, strings, or lists of them"
        raise DataError(
            f"{path}: column {category.column!r} is {column.type}; a category with "
            f"how={category.how!r} needs {needed}"
        )
    if column.null_count:
        if category.how == "mod":
            raise DataError(
                f"{path}, row {row_of(int(np.argmax(_nulls(column))))}: column "
                f"{category.column!r} has a missing value; how='hash' has an id for it"
            )
        ids[_nulls(column)] = 0 if size else MISSING
    return ids


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind)
        or types.is_binary(kind) or types.is_large_binary(kind)
        or types.is_string_view(kind) or types.is_binary_view(kind)
    )  # fmt: skip


def _no_rows(source: Parquet) -> pa.RecordBatch:
    """A record batch without rows, so that an empty batch has the shape of the others."""
    with _open(source.files[0]) as file:
        _check_columns(source.files[0], file, source)
        schema = pa.schema([file.schema_arrow.field(name) for name in source._columns])
    return pa.RecordBatch.from_arrays([pa.array([], kind) for kind in schema.types], schema=schema)


def _joined(parts: list[Batch]) -> Batch:
    ids: dict[str, Ids | MultiHot] = {}
    for name in parts[0].ids:
        pieces = [part.ids[name] for part in parts]
        bags = [piece for piece in pieces if isinstance(piece, tuple)]
        if bags and len(bags) < len(pieces):
            raise DataError(
                f"feature {name!r} is a list in some of the files and a single value in others: "
                "store it alike in all"
            )
        if bags:
            starts = itertools.accumulate((len(values) for values, _ in bags), initial=0)
            offsets = [bag[1] + start for bag, start in zip(bags, starts, strict=False)]
            ids[name] = (np.concatenate([values for values, _ in bags]), np.concatenate(offsets))
        else:
            ids[name] = np.concatenate([piece for piece in pieces if not isinstance(piece, tuple)])
    return Batch(
        dense=np.concatenate([part.dense for part in parts]),
        ids=ids,
        labels=np.concatenate([part.labels for part in parts]),
    )
