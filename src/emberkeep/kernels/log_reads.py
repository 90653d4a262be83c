"""Records of a log from its file to frames, many reads under way at once, without the GIL."""

from __future__ import annotations

import platform
import sys

import numpy as np
from numba import types

from emberkeep._types import I64, U64, Bools
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.log_records import HEADER_WORDS, LOW, checksum, copy_bytes

_pread = types.ExternalFunction(
    "pread", types.int64(types.int32, types.uintp, types.uintp, types.int64)
)
_syscall = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64),
)
# io_setup, io_getevents, io_submit: many reads under way from one thread, at a third
# of the processor time that as many threads take.
_CALLS = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}
HAS_AIO = sys.platform == "linux" and platform.machine() in _CALLS
_IO_SETUP, _IO_GETEVENTS, _IO_SUBMIT = _CALLS.get(platform.machine(), (0, 0, 0))


@kernel
def open_queue(depth: int, context: I64) -> int:
    """Makes a queue of the kernel's for `read_records`; 0, or an error."""
    context[0] = 0
    return int(_syscall(_IO_SETUP, depth, np.int64(context.ctypes.data), 0, 0, 0))


@inline
def _take(
    words: U64,
    per_block: int,
    record_words: int,
    position: int,
    row: int,
    frame: int,
    stamps: I64,
    addresses: I64,
    widths: I64,
    by_row: Bools,
) -> bool:
    """Copies one record of a block that was checked to its frame; False if it is not there."""
    slot = position % per_block
    word = HEADER_WORDS + slot * record_words
    if slot >= np.int64(words[1] & LOW) or words[word] != np.uint64(row * 2):
        return False
    stamps[frame] = np.int64(words[word + 1])
    source = words.ctypes.data + np.uintp(8 * (word + 2))
    for p in range(addresses.size):
        if not by_row[p]:
            copy_bytes(np.uintp(addresses[p] + frame * widths[p]), source, np.uintp(widths[p]))
        source += np.uintp(widths[p])
    return True


@inline
def _take_all(
    words: U64,
    begin: int,
    end: int,
    salt: np.uint64,
    per_block: int,
    record_words: int,
    segment_blocks: int,
    generations: I64,
    positions: I64,
    rows: I64,
    frames: I64,
    stamps: I64,
    addresses: I64,
    widths: I64,
    by_row: Bools,
) -> int:
    """Checks a block that was read and copies the records begin:end from it; a bad one, or -1."""
    block = positions[begin] // per_block
    generation = generations[block // segment_blocks]
    if words[3] != np.uint64(generation):
        return begin
    if words[0] != checksum(words, salt, block, generation):
        return begin
    for i in range(begin, end):
        if not _take(
            words, per_block, record_words, positions[i], rows[i], frames[i], stamps, addresses,
            widths, by_row,
        ):  # fmt: skip
            return i
    return -1


@kernel
def read_records(
    context: I64,
    handle: int,
    start: int,
    buffers: U64,
    requests: I64,
    pointers: I64,
    events: I64,
    salt: np.uint64,
    per_block: int,
    record_words: int,
    segment_blocks: int,
    generations: I64,
    positions: I64,
    rows: I64,
    frames: I64,
    stamps: I64,
    addresses: I64,
    widths: I64,
    by_row: Bools,
) -> int:
    """Reads records to frames, with as many reads under way as there are buffers.

    Positions are ascending: a block that holds several is read once. Without a queue, context 0,
    blocks are read one after the other. Returns -1, or one of the records that is not there.
    """
    depth = buffers.shape[0]
    size = buffers.shape[1] * 8
    begins = np.empty(depth, np.int64)  # for each buffer the positions that its block holds
    ends = np.empty(depth, np.int64)
    free = np.arange(depth)
    idle = depth
    following = 0
    bad = np.int64(-1)
    while (following < positions.size and bad == -1) or idle < depth:
        queued = 0
        while idle > 0 and following < positions.size and bad == -1:
            idle -= 1
            slot = free[idle]
            block = positions[following] // per_block
            begins[slot] = following
            while following < positions.size and positions[following] // per_block == block:
                following += 1
            ends[slot] = following
            requests[slot, :] = 0
            requests[slot, 0] = slot
            requests[slot, 2] = np.int64(handle) << 32
            requests[slot, 3] = np.int64(buffers.ctypes.data) + slot * size
            requests[slot, 4] = size
            requests[slot, 5] = start + block * size
            pointers[queued] = np.int64(requests.ctypes.data) + slot * 64
            queued += 1
        sent = 0
        while context[0] != 0 and sent < queued:
            taken = _syscall(
                _IO_SUBMIT, context[0], queued - sent, np.int64(pointers.ctypes.data) + 8 * sent,
                0, 0,
            )  # fmt: skip
            if taken <= 0:
                break
            sent += taken
        came = np.int64(0)
        for i in range(sent, queued):  # refused, or no queue: read them here
            slot = (pointers[i] - np.int64(requests.ctypes.data)) // 64
            events[came, 0] = slot
            events[came, 2] = _pread(
                np.int32(handle), np.uintp(requests[slot, 3]), np.uintp(size), requests[slot, 5]
            )
            came += 1
        under_way = depth - idle - came
        if came == 0 and under_way > 0:
            least = under_way if following >= positions.size else max(1, under_way // 4)
            came = _syscall(
                _IO_GETEVENTS, context[0], least, depth, np.int64(events.ctypes.data), 0
            )
            if came < 0:  # interrupted by a signal: what is under way must come back
                came = _syscall(
                    _IO_GETEVENTS, context[0], 1, depth, np.int64(events.ctypes.data), 0
                )
        for e in range(came):
            slot = events[e, 0]
            wrong = begins[slot]
            if events[e, 2] == size:
                wrong = _take_all(
                    buffers[slot], begins[slot], ends[slot], salt, per_block, record_words,
                    segment_blocks, generations, positions, rows, frames, stamps, addresses,
                    widths, by_row,
                )  # fmt: skip
            bad = max(bad, wrong)
            free[idle] = slot
            idle += 1
    return int(bad)
