"""What the index beside a log says of the records of a segment: noted when blocks are written, and
merged when the log is opened, as `log_records.merge_records` does with the blocks themselves."""

from __future__ import annotations

import numpy as np

from emberkeep._types import I64, U8, U32, U64, Bools
from emberkeep.kernels._jit import kernel
from emberkeep.kernels.log_records import HEADER_WORDS, LOW, copy_bytes

_ONE = np.uint64(1)
_S32 = np.uint64(32)


@kernel
def note_records(
    words: U64,
    block_words: int,
    per_block: int,
    record_words: int,
    blocks: int,
    first: int,
    widths: I64,
    by_row: Bools,
    counts: U8,
    heads: U64,
    planes: U8,
) -> None:
    """Takes from sealed blocks, which are `first`, first + 1, … of their segment, how many records
    each has, and of each record its two words and its planes by row, one after the other."""
    width = planes.shape[1]
    for b in range(blocks):
        base = b * block_words
        count = np.int64(words[base + 1] & LOW)
        counts[first + b] = np.uint8(count)
        for slot in range(count):
            word = base + HEADER_WORDS + slot * record_words
            place = (first + b) * per_block + slot
            heads[place, 0] = words[word]
            heads[place, 1] = words[word + 1]
            source = words.ctypes.data + np.uintp(8 * (word + 2))
            target = planes.ctypes.data + np.uintp(place * width)
            for p in range(widths.size):
                if by_row[p]:
                    copy_bytes(target, source, np.uintp(widths[p]))
                    target += np.uintp(widths[p])
                source += np.uintp(widths[p])


@kernel
def merge_entry(
    counts: U8,
    codes: U64,
    lowest: int,
    planes: U8,
    first_position: int,
    per_block: int,
    blocks: int,
    end: int,
    floor: int,
    rows: int,
    stamps_R: I64,
    positions_R: U32,
    touched: U64,
    addresses: I64,
    widths: I64,
    by_row: Bools,
) -> int:
    """Lets the records of the first `blocks` blocks of an entry take part, by the rules of
    `merge_records`: those up to stamp `end` and above `floor`.

    `codes` are the records, row * 2 + deleted and how far the stamp is above `lowest`. Returns a
    row that is out of range, or -1.
    """
    width = planes.shape[1]
    record = 0
    for b in range(blocks):
        for slot in range(np.int64(counts[b])):
            code = codes[record]
            source = planes.ctypes.data + np.uintp(record * width)
            record += 1
            stamp = lowest + np.int64(code >> _S32)
            if stamp > end or stamp <= floor:
                continue
            row = np.int64((code & LOW) >> _ONE)
            if row >= rows:
                return int(row)
            position = np.uint32(first_position + b * per_block + slot + 1)
            if stamp < stamps_R[row] or (stamp == stamps_R[row] and position < positions_R[row]):
                continue
            stamps_R[row] = stamp
            positions_R[row] = position
            mask = _ONE << np.uint64(row & 63)
            if code & _ONE:
                touched[row >> 6] &= ~mask
                continue
            touched[row >> 6] |= mask
            for p in range(widths.size):
                if by_row[p]:
                    copy_bytes(
                        np.uintp(addresses[p] + row * widths[p]), source, np.uintp(widths[p])
                    )
                    source += np.uintp(widths[p])
    return -1
