"""Rows as files: chunks of rows become Arrow IPC streams and come back.

One record of a stream is one buffer: the packed ids of a group of rows, or a buffer of one of
their planes as the codec made it. A large buffer is a batch of its own, so that it is written from
where it is; small ones share a batch. The schema is the same for every table and codec.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import Json
from emberkeep.blobs import Buffer
from emberkeep.codecs import Codec, codec_from_dict, is_plane, pack_ids, unpack_ids
from emberkeep.codecs.table_codecs import codec_of, differ_by_table
from emberkeep.errors import ConfigError, DamageError, FormatError
from emberkeep.repository.manifest import FileRef
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.fields import Fields, parse
from emberkeep.runtime.memory import recycled
from emberkeep.runtime.pool import Pool

KIND = "rows"
SUFFIX = "arrow"
PIECE_NBYTES = 256 * 2**20
_SMALL_NBYTES = 2**18
_MANY_RECORDS = 64
_FORMAT = 2

Codecs = Mapping[str, Codec]


def _schema(codecs: Codecs) -> Any:
    import pyarrow as pa

    # Format 2 has codecs by table: a release that would take them for absent refuses the file.
    about = {
        "format": 2 if differ_by_table(codecs) else 1,
        "codecs": {name: codec.to_dict() for name, codec in codecs.items()},
    }
    return pa.schema(
        [
            ("table", pa.string()),
            ("group", pa.int32()),
            ("part", pa.string()),
            ("rows", pa.int64()),
            ("plane", pa.string()),
            ("width", pa.int32()),
            ("dtype", pa.string()),
            ("buffer", pa.string()),
            ("data", pa.large_binary()),
        ],
        metadata={"emberkeep": json.dumps(about)},
    )


class Piece:
    """One file to be: stream it to its end, then look at `metadata`."""

    def __init__(
        self, first: Chunk, rest: Iterator[Chunk], codecs: Codecs, nbytes: int, pool: Pool,
        metadata: Json,
    ) -> None:  # fmt: skip
        self._chunks = rest
        self._codecs = codecs
        self._nbytes = nbytes
        self._pool = pool
        self.next: Chunk | None = first
        self.metadata: Json = {**metadata, "rows": {}, "tombstones": {}}

    def stream(self) -> Iterator[Buffer]:
        """The bytes of the file; ends when it is large enough or there are no more chunks."""
        import pyarrow as pa

        sink = _Sink()
        schema = _schema(self._codecs)
        written = group = 0
        with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema) as stream:
            small: list[tuple[Any, ...]] = []
            while self.next is not None and written < self._nbytes:
                for record in self._records(self.next, group):
                    written += record[-1].nbytes
                    if record[-1].nbytes < _SMALL_NBYTES:
                        small.append(record)
                        continue
                    if small:
                        stream.write_batch(_batch(schema, small))
                        small = []
                    stream.write_batch(_batch(schema, [record]))
                    yield from sink.take()
                group += 1
                self.next = next(self._chunks, None)
                if len(small) > _MANY_RECORDS:
                    stream.write_batch(_batch(schema, small))
                    small = []
                    yield from sink.take()
            if small:
                stream.write_batch(_batch(schema, small))
        yield from sink.take()

    def _records(self, chunk: Chunk, group: int) -> Iterator[tuple[Any, ...]]:
        count = chunk.ids.size
        counted = self.metadata["tombstones" if chunk.planes is None else "rows"]
        counted[chunk.table] = counted.get(chunk.table, 0) + count
        part = "tombstones" if chunk.planes is None else "ids"
        yield chunk.table, group, part, count, "", 0, "", "", pack_ids(chunk.ids)
        for plane, values in (chunk.planes or {}).items():
            codec = codec_of(self._codecs, chunk.table, plane)
            for name, buffer in codec.encode(values, self._pool).items():
                width, kind = values.shape[1], values.dtype.name
                yield chunk.table, group, "plane", count, plane, width, kind, name, buffer


def pieces(
    chunks: Iterable[Chunk], codecs: Codecs, pool: Pool, *, piece_nbytes: int, metadata: Json
) -> Iterator[Piece]:
    """Cuts chunks into files of about `piece_nbytes`; each must be streamed before the next.

    A chunk without rows says nothing and is left out: no file holds nothing.
    """
    rest = (chunk for chunk in chunks if chunk.ids.size)
    first = next(rest, None)
    while first is not None:
        piece = Piece(first, rest, codecs, piece_nbytes, pool, metadata)
        yield piece
        first = piece.next


def counts_of(file: FileRef, what: str) -> dict[str, int]:
    """How many `rows` or `tombstones` of each table a file holds, as its manifest says; rows are
    never more than bytes, so that room for them can be made in advance."""
    metadata = Fields(file.name, file.metadata, "metadata.")
    if what not in metadata:
        return {}
    counts = metadata.object(what)
    most = file.size if what == "rows" else 2**63 - 1
    return {table: counts.number(table, most=most) for table in counts}


def read_chunks(name: str, blocks: Iterator[Buffer], pool: Pool) -> Iterator[Chunk]:
    """The chunks of one file, in the order in which they were written.

    The blocks have been checked against their digests; what still does not make sense is
    `DamageError`, and a file of a later format is refused. Memory is taken in proportion to the
    file: bodies are never compressed, whatever lengths they state lie in them, and ids that need
    no bytes are bounded in number.
    """
    import pyarrow as pa

    try:
        messages = pa.ipc.MessageReader.open_stream(_Source(blocks))
        schema = pa.ipc.read_schema(messages.read_next_message())
        if not schema.equals(_schema({})):
            raise DamageError(f"{name} is not a piece: it has other columns", name=name)
        about = Fields(name, parse(name, (schema.metadata or {}).get(b"emberkeep", b"")))
        if about.number("format", least=1) > _FORMAT:
            raise FormatError(
                f"{name} was written by a later release of emberkeep: upgrade to read it"
            )
        specs = about.object("codecs")
        codecs = {plane: codec_from_dict(specs.plain(plane)) for plane in specs}
        group: list[dict[str, Any]] = []
        for record in _records(messages, schema):
            if group and record["group"] != group[0]["group"]:
                yield _chunk(group, codecs, pool)
                group = []
            group.append(record)
        if group:
            yield _chunk(group, codecs, pool)
    except (
        pa.ArrowException, ConfigError, StopIteration, struct.error, OSError, ValueError, TypeError,
        KeyError,
    ) as error:  # fmt: skip
        raise DamageError(f"{name} does not hold rows: {error}", name=name) from error
    except DamageError as error:
        raise DamageError(f"{name}: {error}", name=name) if error.name is None else error from None


def _records(messages: Any, schema: Any) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    for message in messages:
        # Before a body is looked at: a few bytes can stand for gigabytes of another.
        if message.type != "record batch" or is_compressed(message.metadata):
            raise DamageError(f"a {message.type} that is compressed, or does not belong there")
        batch = pa.ipc.read_record_batch(message, schema)
        # Offsets that lead out of their buffers end the process where they are followed.
        batch.validate(full=True)
        if any(column.null_count for column in batch.columns):
            raise DamageError("a record lacks a value")
        fields = [field for field in batch.schema.names if field != "data"]
        columns = [batch.column(field).to_pylist() for field in fields]
        data = _buffers(batch.column("data"))
        for values, buffer in zip(zip(*columns, strict=True), data, strict=True):
            yield {**dict(zip(fields, values, strict=True)), "data": buffer}


def is_compressed(metadata: Any) -> bool:
    """Whether the head of a batch says so: Message, header, RecordBatch, compression, as the
    flatbuffers of Arrow have them."""
    data = memoryview(metadata)

    def field(table: int, number: int) -> int:
        """Where a field of a table stands; 0 where it is left out."""
        (back,) = struct.unpack_from("<i", data, table)
        (size,) = struct.unpack_from("<H", data, table - back)
        if 4 + 2 * number >= size:
            return 0
        (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * number)
        return table + offset if offset else 0

    def target(at: int) -> int:
        return int(at + struct.unpack_from("<I", data, at)[0])

    return field(target(field(target(0), 2)), 3) != 0


def _chunk(group: list[dict[str, Any]], codecs: Codecs, pool: Pool) -> Chunk:
    """The rows of one group of records: ids first, then the buffers of each plane."""
    first = group[0]
    count = first["rows"]
    deleted = first["part"] == "tombstones"
    if first["part"] not in ("ids", "tombstones") or any(
        (record["part"], record["rows"], record["table"]) != ("plane", count, first["table"])
        for record in group[1:]
    ):
        raise DamageError("its records do not belong together")
    # Planes first: their bytes are there, and bound how many ids there can be.
    planes: dict[str, Any] = {}
    for plane, records in groupby(group[1:], key=lambda record: record["plane"]):
        parts = list(records)
        forms = {(record["width"], record["dtype"]) for record in parts}
        ((width, dtype),) = forms if len(forms) == 1 else ((0, ""),)
        if count < 0 or plane in planes or not is_plane(width, dtype):
            raise DamageError(f"plane {plane!r} has a form that is never written")
        codec = codec_of(codecs, first["table"], plane)
        planes[plane] = codec.decode(
            {record["buffer"]: record["data"] for record in parts},
            rows=count, width=width, dtype=dtype, pool=pool,
        )  # fmt: skip
    if deleted == bool(planes):
        raise DamageError("rows have planes, and tombstones have none")
    ids = unpack_ids(first["data"], count=count)
    return Chunk(first["table"], ids, None if deleted else planes)


def _batch(schema: Any, records: list[tuple[Any, ...]]) -> Any:
    import pyarrow as pa

    *columns, buffers = zip(*records, strict=True)
    flat = [np.ascontiguousarray(buffer).reshape(-1).view(np.uint8) for buffer in buffers]
    joined = flat[0] if len(flat) == 1 else np.concatenate(flat)
    offsets = np.cumsum([0, *(part.size for part in flat)]).astype(np.int64)
    data = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        len(flat),
        [None, pa.py_buffer(offsets), pa.py_buffer(joined)],
    )
    arrays = [
        pa.array(values, field.type)
        for values, field in zip(columns, list(schema)[:-1], strict=True)
    ]
    return pa.RecordBatch.from_arrays([*arrays, data], schema=schema)


def _buffers(data: Any) -> list[npt.NDArray[np.uint8]]:
    """The values of a binary column, where they stand: its scalars would be copies."""
    _, offsets, content = data.buffers()
    bounds = np.frombuffer(offsets, np.int64)[data.offset : data.offset + len(data) + 1]
    flat = np.frombuffer(content, np.uint8) if content else np.empty(0, np.uint8)
    return [flat[start:stop] for start, stop in pairwise(bounds.tolist())]


def _joined(parts: list[memoryview]) -> Buffer:
    nbytes = sum(map(len, parts))
    if nbytes < _SMALL_NBYTES:
        return b"".join(parts)
    joined = recycled(nbytes)
    np.concatenate([np.frombuffer(part, np.uint8) for part in parts], out=np.asarray(joined))
    return joined


class _Sink(io.RawIOBase):
    """Collects what the Arrow writer writes until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[Buffer] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        # Arrow hands its buffers over as they are: a view keeps them, nothing is copied.
        part = data if isinstance(data, bytes) else memoryview(data).cast("B")
        self._parts.append(part)
        return len(part)

    def take(self) -> list[Buffer]:
        """What was written since. The writer writes frames in words, each of which would cost
        as much on its way to the file as a megabyte of rows: such parts are joined."""
        parts, self._parts = self._parts, []
        taken: list[Buffer] = []
        for small, run in groupby(parts, key=lambda part: len(part) < _SMALL_NBYTES):
            if small:
                taken.append(b"".join(run))
            else:
                taken.extend(run)
        return taken


class _Source(io.RawIOBase):
    """Blocks one after the other as a file that can only be read on."""

    def __init__(self, blocks: Iterator[Buffer]) -> None:
        super().__init__()
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> Any:
        parts = []
        wanted = size if size is not None and size >= 0 else 2**62
        while wanted:
            if not self._rest:
                block = next(self._blocks, None)
                if block is None:
                    break
                self._rest = memoryview(block)
            part = self._rest[:wanted]
            self._rest = self._rest[len(part) :]
            wanted -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else _joined(parts)
