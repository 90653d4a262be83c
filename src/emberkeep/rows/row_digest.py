"""One number for the rows of a table, whatever their order and wherever they live."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from emberkeep._types import I64, Planes
from emberkeep.kernels import batch_rows, grid_arrays
from emberkeep.rows.slab import Slab

# Words of the bitmap, of 64 rows each, that are looked at under one holding of the lock.
_WORDS = 256
_MASK = 2**64 - 1
# How old a row is among those of its shard: another number of shards has other ages.
_LOCAL = "used"


class RowDigest(NamedTuple):
    """How many rows there are, and two independent 64-bit sums of hashes of them.

    Digests of disjoint sets of rows add up to that of their union. Two sets that differ by
    accident have the same digest with a probability of about 2^-128; it is no signature.
    """

    rows: int = 0
    low: int = 0
    high: int = 0

    def joined(self, other: RowDigest) -> RowDigest:
        return RowDigest(
            self.rows + other.rows,
            (self.low + other.low) & _MASK,
            (self.high + other.high) & _MASK,
        )


def digest_rows(table: str, ids: I64, planes: Planes) -> RowDigest:
    """Of whole rows: ids, and all planes but those that one shard alone knows."""
    if not ids.size:
        return RowDigest()
    salts = {name: _salts(table, name) for name in planes if name != _LOCAL}
    sums = []
    for lane in (0, 1):
        sums_R = np.zeros(ids.size, np.uint64)
        for name, salt in salts.items():
            column_RB = np.ascontiguousarray(planes[name]).view(np.uint8).reshape(ids.size, -1)
            grid_arrays.hash_column(column_RB, salt[lane], sums_R)
        lanes = np.full(ids.size, lane, np.int32)
        sums.append(int(grid_arrays.sum_of_rows(lanes, ids, sums_R)))
    return RowDigest(ids.size, *sums)


def digest_chunk(slab: Slab, table: int, start: int) -> tuple[RowDigest, int]:
    """Of some rows of a table of a slab; where the next ones start, -1 after the last.

    Called with the lock held, from `start` 0 on.
    """
    base = int(slab.bases_T[table])
    first, last = base >> 6, (base + slab.slots_T[table] + 63) >> 6
    words = (first + start, min(last, first + start + _WORDS))
    found = np.empty(batch_rows.count_bits(slab.touched, *words), np.int64)
    batch_rows.list_bits(slab.touched, *words, found)
    after = start + _WORDS if words[1] < last else -1
    if not found.size:
        return RowDigest(), after
    dynamic = table in slab.slots
    ids = slab.ids[found] if dynamic else (found - base) * slab.shards + slab.shard
    return digest_rows(slab.tables[table].name, ids, slab.read(table, ids)), after


def _salts(table: str, plane: str) -> tuple[np.uint64, np.uint64]:
    name = hashlib.blake2b(f"{table}\0{plane}".encode(), digest_size=16).digest()
    low, high = np.frombuffer(name, np.uint64)
    return low, high
