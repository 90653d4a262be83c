"""Frames of an Arrow IPC stream, made so that large buffers are written from where they are.

pyarrow's stream writer hands a message over in words, through Python each time, or copies it whole.
Here a message is serialized with eight bytes in the place of its large buffer; then three numbers
are made right: how long the buffer is, where its one value ends, and how long the body is. A reader
finds what the writer would have written.
"""

from __future__ import annotations

import struct
from typing import Any

from emberkeep.blobs import Buffer
from emberkeep.blobs.system_disk import BLOCK_NBYTES

END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last message of a stream, which has none after it."""
STAND_IN = bytes(8)
"""Stands for a large buffer while its message is serialized."""

# Buffers from this length on begin where a block of the file does.
_ALIGNED_NBYTES = 2**20
# What a message begins with: a mark, and how long its head is.
_FRAME = struct.Struct("<Ii")
_NUMBER = struct.Struct("<q")
_BUFFER = struct.Struct("<qq")


def large_message(message: Buffer, data: Buffer, at: int) -> tuple[bytes, bytes]:
    """What stands before and after `data` in a stream, if the message begins at byte `at`.

    The message is a batch whose last column has one value, `STAND_IN`. A large buffer then begins
    where a block of the file does: it can be written past the page cache as it is. A message may
    have as many zeros after its head as it likes; the head says how many.
    """
    given, nbytes = bytearray(message), len(data)
    mark, head_nbytes = _FRAME.unpack_from(given)
    body = _FRAME.size + head_nbytes
    head = memoryview(given)[_FRAME.size : body]
    root = _target(head, 0)
    batch = _target(head, _field(head, root, 2))
    buffers = _target(head, _field(head, batch, 2))
    (count,) = struct.unpack_from("<I", head, buffers)
    last = buffers + 4 + _BUFFER.size * (count - 1)
    start, _ = _BUFFER.unpack_from(head, last)
    ends, _ = _BUFFER.unpack_from(head, last - _BUFFER.size)
    length = _field(head, root, 3)
    (alignment,) = _NUMBER.unpack_from(head, length)
    alignment -= start
    padding = -nbytes % alignment
    _BUFFER.pack_into(head, last, start, nbytes)
    _NUMBER.pack_into(given, body + ends + _NUMBER.size, nbytes)
    _NUMBER.pack_into(head, length, start + nbytes + padding)
    zeros = -(at + body + start) % BLOCK_NBYTES if nbytes >= _ALIGNED_NBYTES else 0
    _FRAME.pack_into(given, 0, mark, head_nbytes + zeros)
    del head
    given[body:] = given[body : body + start]
    given[body:body] = bytes(zeros)
    return bytes(given), bytes(padding)


def is_compressed(metadata: Any) -> bool:
    """Whether the head of a batch says so: Message, header, RecordBatch, compression, as the
    flatbuffers of Arrow have them."""
    data = memoryview(metadata)
    return _field(data, _target(data, _field(data, _target(data, 0), 2)), 3) != 0


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table stands; 0 where it is left out."""
    (back,) = struct.unpack_from("<i", data, table)
    (size,) = struct.unpack_from("<H", data, table - back)
    if 4 + 2 * number >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * number)
    return table + offset if offset else 0


def _target(data: memoryview, at: int) -> int:
    return int(at + struct.unpack_from("<I", data, at)[0])
