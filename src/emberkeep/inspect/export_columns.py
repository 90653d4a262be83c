"""One version as columns: Parquet or Arrow files, one for each table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from emberkeep._types import Json
from emberkeep.checkpoint.contents import Hold, check_tables
from emberkeep.inspect.export import Exported, about, exported_rows, file_name, output, published
from emberkeep.inspect.plane_names import Style, styled
from emberkeep.repository import Repository, VersionId
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.pool import Pool

Columns = Literal["parquet", "arrow"]


def to_columns(
    repository: Repository, version: VersionId, path: Path, pool: Pool, *,
    kind: Columns = "parquet", tables: Sequence[str] | None = None, force: bool = False,
    names: Style = "emberkeep",
) -> Exported:  # fmt: skip
    """Files with the columns `id`, `weight` as a list, and the other planes.

    Planes of one number a row are plain columns, wider ones are lists. One table under a name that
    ends with the kind becomes that file; otherwise there is a directory with a file for each table.
    """
    chosen = check_tables(repository, tables)
    ends = {"parquet": (".parquet",), "arrow": (".arrow", ".feather")}[kind]
    single = len(chosen) == 1 and path.suffix.lower() in ends and not path.is_dir()
    with (
        output(path, force=force, holds=() if single else [f"*.{kind}"]) as scratch,
        Hold(repository, version) as hold,
    ):
        chain = repository.chain(version)
        folder = scratch / "tables"
        folder.mkdir()
        writers: dict[str, Any] = {}
        try:
            for name in chosen:
                described = {**about(chain[-1]), "table": name}
                schema = _schema(repository.tables[name]["planes"], names, described)
                writers[name] = _writer(folder / f"{file_name(name)}.{kind}", schema, kind)
            rows = dict.fromkeys(chosen, 0)
            for chunk in exported_rows(repository, chain, pool, chosen, hold):
                _write(writers[chunk.table], chunk, repository.tables[chunk.table]["planes"])
                rows[chunk.table] += chunk.ids.size
        finally:
            for writer, _ in writers.values():
                writer.close()
        files = sorted(folder.iterdir())
        if single:
            return published(chain[-1], rows, {path: files[0]})
        staged = {path / file.name: file for file in files}
        return published(chain[-1], rows, staged, whole=(folder, path))


def _schema(planes: Json, names: Style, described: dict[str, str]) -> Any:
    import pyarrow as pa

    columns = [(styled(plane, names), _type(*shape)) for plane, shape in planes.items()]
    return pa.schema([("id", pa.int64()), *columns], metadata={"emberkeep": json.dumps(described)})


def _writer(file: Path, schema: Any, kind: Columns) -> tuple[Any, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        return pq.ParquetWriter(file, schema), schema
    return pa.ipc.new_file(str(file), schema), schema


def _write(writer: tuple[Any, Any], chunk: Chunk, planes: Json) -> None:
    import pyarrow as pa

    opened, schema = writer
    opened.write_table(pa.Table.from_arrays(_columns(chunk, list(planes)), schema=schema))


def _type(width: int, kind: str) -> Any:
    import pyarrow as pa

    number = pa.from_numpy_dtype(np.dtype(kind))
    return number if width == 1 else pa.list_(number)


def _columns(chunk: Chunk, planes: Sequence[str]) -> list[Any]:
    import pyarrow as pa

    assert chunk.planes is not None
    columns = [pa.array(chunk.ids)]
    for plane in planes:
        values = chunk.planes[plane]
        rows, width = values.shape
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        if width > 1:
            offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
            flat = pa.ListArray.from_arrays(offsets, flat)
        columns.append(flat)
    return columns
