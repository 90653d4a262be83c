"""Rows as records of a log: packed, sealed, found again; `log_reads` reads them from the file.

A block is a multiple of 4096 bytes: a header of 32 (checksum, count and life, sequence, generation)
and records of one size. A record is two words, `row * 2 + deleted` and the stamp, and then the
bytes of each plane. A plane is named by the address of its first row and its width; it is indexed
by frame, or by row where `by_row` says so. Record number p is slot `p % per_block` of block
`p // per_block`.
"""

from __future__ import annotations

import numpy as np
from numba import types

from emberkeep._types import F64, I32, I64, U8, U32, U64, Bools
from emberkeep.kernels._intrinsics import test_bit
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.hash_index import GOLDEN, mix64

HEADER = 32
HEADER_WORDS = HEADER // 8
_ONE = np.uint64(1)
_S32 = np.uint64(32)
_S29 = np.uint64(29)
LOW = np.uint64(0xFFFFFFFF)
_ODD = np.uint64(0xD6E8FEB86659FD93)

copy_bytes = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))


@inline
def checksum(words: U64, salt: np.uint64, block: int, generation: int) -> np.uint64:
    """Of all words but the first, and of where the block lies: four sums side by side."""
    a = mix64(salt + np.uint64(block) * GOLDEN)
    b = mix64(a + np.uint64(generation))
    c = a ^ _ODD
    d = b ^ _ODD
    whole = words.size & ~3
    for i in range(4, whole, 4):
        a = (a ^ words[i]) * _ODD
        b = (b ^ words[i + 1]) * _ODD
        c = (c ^ words[i + 2]) * _ODD
        d = (d ^ words[i + 3]) * _ODD
        a ^= a >> _S29
        b ^= b >> _S29
        c ^= c >> _S29
        d ^= d >> _S29
    for i in range(1, 4):
        a = mix64(a ^ words[i])
    for i in range(whole, words.size):
        b = mix64(b ^ words[i])
    return mix64(a + mix64(b + mix64(c + mix64(d))))


@kernel
def pack(
    words: U64,
    block_words: int,
    per_block: int,
    record_words: int,
    first: int,
    rows: I64,
    deleted: bool,
    frames: I64,
    stamps: I64,
    addresses: I64,
    widths: I64,
    by_row: Bools,
) -> None:
    """Writes records first, first + 1, … of a buffer of blocks; headers are written by `seal`."""
    base = words.ctypes.data
    for i in range(rows.size):
        at = first + i
        word = (at // per_block) * block_words + HEADER_WORDS + (at % per_block) * record_words
        words[word] = np.uint64(rows[i] * 2 + (1 if deleted else 0))
        words[word + 1] = np.uint64(stamps[i])
        if deleted:
            continue
        target = base + np.uintp(8 * (word + 2))
        for p in range(addresses.size):
            index = rows[i] if by_row[p] else frames[i]
            source = np.uintp(addresses[p] + index * widths[p])
            copy_bytes(target, source, np.uintp(widths[p]))
            target += np.uintp(widths[p])


@kernel
def seal(
    words: U64,
    block_words: int,
    per_block: int,
    records: int,
    life: int,
    sequence: int,
    generation: int,
    block: int,
    salt: np.uint64,
) -> None:
    """Writes the headers of the blocks of a buffer that hold `records` records, from `block` on."""
    blocks = (records + per_block - 1) // per_block
    for b in range(blocks):
        content = words[b * block_words : (b + 1) * block_words]
        count = min(per_block, records - b * per_block)
        content[1] = np.uint64(count) | (np.uint64(life) << _S32)
        content[2] = np.uint64(sequence + b)
        content[3] = np.uint64(generation)
        content[0] = checksum(content, salt, block + b, generation)


@kernel
def check_blocks(
    words: U64,
    block_words: int,
    per_block: int,
    block: int,
    salt: np.uint64,
    generations: I64,
    sequences: I64,
) -> None:
    """For each block of a segment its generation and sequence; -1 where it is not whole.

    A whole block holds as many records as it says: nothing that it says leads out of it.
    """
    for b in range(generations.size):
        content = words[b * block_words : (b + 1) * block_words]
        generation = np.int64(content[3])
        whole = generation > 0 and np.int64(content[1] & LOW) <= per_block
        whole = whole and content[0] == checksum(content, salt, block + b, int(generation))
        generations[b] = generation if whole else -1
        sequences[b] = np.int64(content[2]) if whole else -1


@kernel
def merge_records(
    words: U64,
    block_words: int,
    per_block: int,
    record_words: int,
    first_block: int,
    generations: I64,
    generation: int,
    first_life: int,
    ends: I64,
    floor: int,
    rows: int,
    stamps_R: I64,
    positions_R: U32,
    touched: U64,
    addresses: I64,
    widths: I64,
    by_row: Bools,
) -> int:
    """Lets the records of one segment that are not void take part: for each row the newest wins.

    A record of life l counts up to stamp `ends[l - first_life]`, and none up to `floor`. Of a
    record and the cleaner's copy of it the later place wins, in whatever order they are met. Planes
    by row are filled at once. Returns a row that is out of range, or -1.
    """
    for b in range(generations.size):
        if generations[b] != generation:
            continue
        base = b * block_words
        head = words[base + 1]
        life = np.int64(head >> _S32) - first_life
        if life < 0 or life >= ends.size:
            continue
        for slot in range(np.int64(head & LOW)):
            word = base + HEADER_WORDS + slot * record_words
            stamp = np.int64(words[word + 1])
            if stamp > ends[life] or stamp <= floor:
                continue
            row = np.int64(words[word] >> _ONE)
            if row >= rows:
                return int(row)
            position = np.uint32((first_block + b) * per_block + slot + 1)
            if stamp < stamps_R[row] or (stamp == stamps_R[row] and position < positions_R[row]):
                continue
            stamps_R[row] = stamp
            positions_R[row] = position
            mask = _ONE << np.uint64(row & 63)
            if words[word] & _ONE:
                touched[row >> 6] &= ~mask
                continue
            touched[row >> 6] |= mask
            source = words.ctypes.data + np.uintp(8 * (word + 2))
            for p in range(addresses.size):
                if by_row[p]:
                    copy_bytes(
                        np.uintp(addresses[p] + row * widths[p]), source, np.uintp(widths[p])
                    )
                source += np.uintp(widths[p])
    return -1


@kernel
def count_live(positions_R: U32, slots: int, live: I64) -> None:
    """How many records of each segment are the newest of their row."""
    for row in range(positions_R.size):
        if positions_R[row]:
            live[(np.int64(positions_R[row]) - 1) // slots] += 1


@kernel
def list_live(
    words: U64,
    block_words: int,
    per_block: int,
    record_words: int,
    first_block: int,
    generations: I64,
    generation: int,
    positions_R: U32,
    rows: I64,
    sources: I64,
) -> int:
    """The records of a segment that are the newest of their row: which rows, at which words.

    Only blocks of that generation are looked at; `check_blocks` has found them whole.
    """
    found = 0
    for b in range(generations.size):
        if generations[b] != generation:
            continue
        base = b * block_words
        for slot in range(np.int64(words[base + 1] & LOW)):
            word = base + HEADER_WORDS + slot * record_words
            row = np.int64(words[word] >> _ONE)
            position = (first_block + b) * per_block + slot + 1
            if row < positions_R.size and np.int64(positions_R[row]) == position:
                rows[found] = row
                sources[found] = word
                found += 1
    return found


@kernel
def move_records(
    words: U64,
    block_words: int,
    per_block: int,
    record_words: int,
    first: int,
    source: U64,
    sources: I64,
) -> None:
    """Copies whole records from one buffer of blocks to another, stamps and all."""
    for i in range(sources.size):
        at = first + i
        word = (at // per_block) * block_words + HEADER_WORDS + (at % per_block) * record_words
        words[word : word + record_words] = source[sources[i] : sources[i] + record_words]


# -- frames --------------------------------------------------------------------------------------


@kernel
def translate(
    frame_of: I32, touched: U64, rows: I64, turn: int, used: I64, frames: I64, missing: I64
) -> int:
    """Frames of rows, -1 where there is none; lists the positions of touched rows without one.

    With turn > 0 the frames that are found become used in that turn.
    """
    missed = 0
    for i in range(rows.size):
        row = rows[i]
        frames[i] = -1
        if row < 0:
            continue
        frame = np.int64(frame_of[row]) - 1
        if frame >= 0:
            frames[i] = frame
            if turn > 0:
                used[frame] = turn
        elif test_bit(touched, row):
            missing[missed] = i
            missed += 1
    return missed


@kernel
def list_idle(
    worth: F64, most: float, used: I64, before: int, row_of: I64, busy: U8, out: I64
) -> int:
    """Frames that hold a row of at most that worth which was last used before a turn."""
    found = 0
    for frame in range(used.size):
        if worth[frame] <= most and used[frame] < before and row_of[frame] >= 0 and not busy[frame]:
            out[found] = frame
            found += 1
    return found
