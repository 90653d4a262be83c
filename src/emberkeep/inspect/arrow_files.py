"""Rows in columns: Parquet and Arrow files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from emberkeep._types import Array
from emberkeep.errors import ConfigError, DataError
from emberkeep.inspect.plane_names import IDS, WEIGHT, plane_of
from emberkeep.inspect.row_sources import (
    Part,
    Rows,
    Source,
    as_ids,
    chunk_rows,
    fingerprint_of,
)

_BATCH_ROWS = 16384


def open_columns(
    files: Sequence[Path], *, ids: str | None = None, vector: str | None = None
) -> Source:
    """Parquet or Arrow files: one row of a table in each line. `ids` and `vector` name the columns
    of ids and weights; else they are found by their names."""
    parts: list[Part] = []
    others: list[str] = []
    for file in files:
        with _parsing(file):
            opened = _Parquet(file) if _is_parquet(file) else _Arrow(file)
            own, rest = _parts(file, opened, ids, vector)
        parts += own
        others += [name for name in rest if name not in others]
    # Other columns of the same files are another import.
    named = [[ids, vector]] if ids is not None or vector is not None else []
    return Source(
        file=str(files[0]), kind="parquet" if _is_parquet(files[0]) else "arrow", parts=parts,
        passed_over=others, fingerprint=[*fingerprint_of(files), *named],
    )  # fmt: skip


@contextmanager
def _parsing(file: Path) -> Iterator[None]:
    """What the parser makes of a damaged file comes out with the file's name."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's, not the parser's
        raise DataError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _is_parquet(file: Path) -> bool:
    with open(file, "rb") as opened:
        return opened.read(4) == b"PAR1"


class _Parquet:
    """One part for each row group, which is found without reading those before."""

    def __init__(self, file: Path) -> None:
        import pyarrow.parquet as pq

        self._file = file
        with pq.ParquetFile(file) as opened:
            self.schema = opened.schema_arrow
            about = opened.metadata
            self.counts = [about.row_group(g).num_rows for g in range(about.num_row_groups)]

    def batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._file) as opened:
            yield from opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)


class _Arrow:
    """An IPC file or stream, read in order."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with self._open() as batches:
            self.schema = batches.schema
        self.counts = [sum(batch.num_rows for batch in self.batches(0, self.schema.names[:1]))]

    def _open(self) -> Any:
        import pyarrow as pa

        source = pa.OSFile(str(self._file), "rb")
        try:
            return pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source)

    def batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        with self._open() as opened:
            one_by_one = (
                (opened.get_batch(i) for i in range(opened.num_record_batches))
                if hasattr(opened, "num_record_batches")
                else opened
            )
            for batch in one_by_one:
                yield batch.select(columns)


def _parts(
    file: Path, opened: _Parquet | _Arrow, ids: str | None, vector: str | None
) -> tuple[list[Part], list[str]]:
    import pyarrow as pa

    names = opened.schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{file} has several columns {', '.join(twice)}: rename or drop some")
    for option, column in (("--ids", ids), ("--vector", vector)):
        if column is not None and column not in names:
            raise ConfigError(
                f"{file} has no column {column!r} for {option}; it has {', '.join(names)}"
            )
    id_column = ids or _column(file, names, IDS, "--ids")
    weight = vector or _column(file, names, WEIGHT, "--vector")
    columns = {"weight": weight}
    for name in names:
        kind = opened.schema.field(name).type
        numbers = kind.value_type if _is_list(kind) else kind
        is_numbers = pa.types.is_integer(numbers) or pa.types.is_floating(numbers)
        plane = plane_of(name, ())
        if name not in (id_column, weight) and plane not in (None, IDS, WEIGHT) and is_numbers:
            columns[name] = name
    stem = _table_of(opened.schema) or unquote(file.name.rsplit(".", 1)[0])
    widths = _widths(file, opened, columns)
    parts = []
    for group, rows in enumerate(opened.counts):
        if rows:
            chunks = _chunks(file, opened, group, id_column, columns, widths)
            parts.append(
                Part(
                    file=str(file),
                    path=stem,
                    rows=rows,
                    planes=widths,
                    dense=False,
                    chunks=chunks,
                    name=stem,
                )
            )
    return parts, [name for name in names if name not in (id_column, *columns.values())]


def _table_of(schema: Any) -> str | None:
    """The table whose rows these are, where an export of ours has said so."""
    try:
        table = json.loads((schema.metadata or {})[b"emberkeep"])["table"]
    except (KeyError, ValueError, TypeError):
        return None
    return table if isinstance(table, str) else None


def _column(file: Path, names: Sequence[str], plane: str, option: str) -> str:
    found = [name for name in names if plane_of(name, ()) == plane]
    if len(found) != 1:
        which = f"columns {', '.join(found)} could be it" if found else "no column is called so"
        what = "ids" if plane == IDS else "weights"
        raise ConfigError(
            f"{file}: which column holds the {what}? {which}; name it by {option} COLUMN, of "
            f"{', '.join(names)}"
        )
    return found[0]


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _widths(file: Path, opened: _Parquet | _Arrow, columns: dict[str, str]) -> dict[str, int]:
    """How wide planes are, by the first row; all others must be as wide."""
    import pyarrow as pa

    first = next((group for group, rows in enumerate(opened.counts) if rows), None)
    if first is None:
        return dict.fromkeys(columns, 1)
    batches = opened.batches(first, list(columns.values()))
    batch = next(batch for batch in batches if batch.num_rows)
    widths = {}
    for word, name in columns.items():
        column = batch.column(name)
        width = 1
        numbers = column.type.value_type if _is_list(column.type) else column.type
        if not (pa.types.is_integer(numbers) or pa.types.is_floating(numbers)):
            raise DataError(f"{file}: column {name!r} holds {column.type}, not numbers")
        if _is_list(column.type):
            width = len(column[0]) if column[0].is_valid else 0
        if not width:
            raise DataError(f"{file}: column {name!r} is empty in the first row")
        widths[word] = width
    return widths


def _chunks(
    file: Path, opened: _Parquet | _Arrow, group: int, id_column: str, columns: dict[str, str],
    widths: dict[str, int],
) -> Callable[[int], Iterator[Rows]]:  # fmt: skip
    step = chunk_rows(widths)

    def chunks(start: int) -> Iterator[Rows]:
        at = 0
        batches = opened.batches(group, [id_column, *columns.values()])
        while True:
            with _parsing(file):
                whole = next(batches, None)
            if whole is None:
                return
            begin, at = at, at + whole.num_rows
            if at <= start:
                continue
            rest = whole.slice(max(0, start - begin))
            for first in range(0, rest.num_rows, step):
                batch = rest.slice(first, step)
                ids = _numbers(file, id_column, batch.column(id_column), 1)
                yield (
                    as_ids(str(file), f"column {id_column!r}", ids[:, 0]),
                    {
                        word: _numbers(file, name, batch.column(name), widths[word])
                        for word, name in columns.items()
                    },
                )

    return chunks


def _numbers(file: Path, name: str, column: Any, width: int) -> Array:
    """A column as numbers, `width` in each row."""
    import pyarrow as pa

    if column.null_count:
        raise DataError(f"{file}: column {name!r} has a row without a value: fill or leave it out")
    if _is_list(column.type):
        if not pa.types.is_fixed_size_list(column.type):
            lengths = np.asarray(column.value_lengths())
            if (lengths != width).any():
                other = lengths[lengths != width][0]
                raise DataError(
                    f"{file}: column {name!r} has rows of {width} and of {other} numbers: all rows "
                    "of a table are as wide"
                )
        elif column.type.list_size != width:
            raise DataError(f"{file}: column {name!r} is {column.type.list_size} wide, not {width}")
        column = column.flatten()
        if column.null_count:
            raise DataError(f"{file}: column {name!r} has a number without a value")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(f"{file}: column {name!r} holds {column.type}, not numbers")
    found: Array = np.asarray(column).reshape(-1, width)
    return found
