"""Files of rows: what is written comes back, large buffers begin where blocks of the file do."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from emberkeep.blobs.system_disk import BLOCK_NBYTES
from emberkeep.codecs import Quantized, Raw
from emberkeep.repository import arrow_frames
from emberkeep.repository import pieces as pieces_module
from emberkeep.repository.pieces import pieces, read_chunks
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.pool import shared


def chunk(table: str, rows: int, width: int, first: int = 0) -> Chunk:
    random = np.random.default_rng(rows)
    planes = {
        "weight": random.standard_normal((rows, width), np.float32),
        "accumulator": random.random((rows, 1), np.float32),
    }
    return Chunk(table, np.arange(first, first + rows), planes)


def test_a_large_message_is_what_arrow_would_write() -> None:
    schema = pieces_module._schema({})
    data = np.random.default_rng(0).integers(0, 255, 300_001, np.uint8)
    record = ("t", 5, "plane", 11, "weight", 64, "float32", "values")
    stand_in = np.frombuffer(arrow_frames.STAND_IN, np.uint8)
    message = pieces_module._batch(schema, [(*record, stand_in)]).serialize()
    head = schema.serialize().to_pybytes()
    before, after = arrow_frames.large_message(message, memoryview(data), len(head))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pieces_module._batch(schema, [(*record, data)]))
    assert sink.getvalue() == head + before + data.tobytes() + after + arrow_frames.END


@pytest.mark.parametrize("bits", [None, 8])
def test_rows_come_back_and_large_buffers_stand_on_blocks(bits: int | None) -> None:
    codecs: Any = {"weight": Raw() if bits is None else Quantized(bits=bits), "accumulator": Raw()}
    given = [
        chunk("a", 20_000, 64), chunk("a", 17, 64, 20_000), chunk("a", 16_384, 64, 30_000),
        Chunk("b", np.array([3, 9]), None), chunk("b", 4097, 64, 10), chunk("b", 20_001, 64, 10**6),
    ]  # fmt: skip
    written = pieces(iter(given), codecs, shared(), piece_nbytes=10**9, metadata={})
    (file,) = [(piece, list(piece.stream())) for piece in written]
    piece, parts = file
    large, offset = 0, 0
    for part in parts:
        if len(part) >= 2**20:
            assert offset % BLOCK_NBYTES == 0
            large += 1
        offset += len(part)
    assert large == (4 if bits is None else 3)
    content = b"".join(parts)
    assert piece.metadata["rows"] == {"a": 36_401, "b": 24_098}
    found = list(read_chunks("piece", iter([content]), shared()))
    assert [(c.table, c.ids.tolist()) for c in found] == [(c.table, c.ids.tolist()) for c in given]
    for one, other in zip(found, given, strict=True):
        if other.planes is None:
            assert one.planes is None
            continue
        assert one.planes is not None
        assert one.planes["accumulator"].tobytes() == other.planes["accumulator"].tobytes()
        if bits is None:
            assert one.planes["weight"].tobytes() == other.planes["weight"].tobytes()
    # It is a file of Arrow's for every other reader too.
    table = pa.ipc.open_stream(content).read_all()
    assert sum(len(data) for data in table["data"].to_pylist()) > 0
    assert len(table) == sum(1 if c.planes is None else 3 if bits is None else 6 for c in given)
