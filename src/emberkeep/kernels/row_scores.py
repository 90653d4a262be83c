"""Which rows matter most: counting updates, remembering a sample of them, measuring distances.

Rows are rows of a slab. A *list* of a table is a hash table of buckets of eight entries, each the
number of a row within its table plus one (0: free): membership costs one cache line, and a list
takes the memory of its entries and no more.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import F32, I32, I64, U32, U64
from emberkeep.kernels._intrinsics import set_bit, test_bit
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.hash_index import mix64

WAYS = 8
_MOST = np.uint32(0xFFFFFFFF)
_HALF = np.uint32(16)
_WORD = np.uint64(32)
_LOW = np.uint32(0xFFFF)


@kernel
def count(rows: I64, start: int, stop: int, counts: U32) -> None:
    """One more update of each row at positions start..stop; the counter stays at its largest."""
    for i in range(start, stop):
        row = rows[i]
        if counts[row] != _MOST:
            counts[row] += np.uint32(1)


@inline
def _bucket(local: np.int64, buckets: np.int64) -> np.int64:
    return np.int64(((mix64(np.uint64(local)) >> _WORD) * np.uint64(buckets)) >> _WORD)


@kernel
def remember(
    rows: I64,
    offsets_T: I64,
    first: int,
    last: int,
    bases_T: I64,
    firsts_T: I64,
    buckets_T: I64,
    salt: int,
    entries: I32,
) -> None:
    """Puts rows of tables first..last on their lists.

    Where a bucket is full, one of its entries or the new one, each with the same probability, is
    dropped.
    """
    for t in range(first, last):
        buckets = buckets_T[t]
        if buckets == 0:
            continue
        for i in range(offsets_T[t], offsets_T[t + 1]):
            local = rows[i] - bases_T[t]
            entry = np.int32(local + 1)
            at = (firsts_T[t] + _bucket(local, buckets)) * WAYS
            free = np.int64(-1)
            known = False
            for way in range(WAYS):
                held = entries[at + way]
                if held == entry:
                    known = True
                    break
                if held == 0:
                    free = np.int64(way)
                    break
            if known:
                continue
            if free < 0:
                chance = mix64(np.uint64(local) ^ mix64(np.uint64(salt)))
                free = np.int64(chance % np.uint64(WAYS + 1))
                if free == WAYS:
                    continue
            entries[at + free] = entry


@kernel
def forget(
    rows: I64,
    offsets_T: I64,
    bases_T: I64,
    firsts_T: I64,
    buckets_T: I64,
    entries: I32,
) -> None:
    """Takes rows off their lists; the entries of a bucket stay together."""
    for t in range(offsets_T.size - 1):
        buckets = buckets_T[t]
        if buckets == 0:
            continue
        for i in range(offsets_T[t], offsets_T[t + 1]):
            local = rows[i] - bases_T[t]
            at = (firsts_T[t] + _bucket(local, buckets)) * WAYS
            last = WAYS
            own_way = -1
            for way in range(WAYS):
                if entries[at + way] == np.int32(local + 1):
                    own_way = way
                if entries[at + way] == 0:
                    last = way
                    break
            if own_way >= 0:
                entries[at + own_way] = entries[at + last - 1]
                entries[at + last - 1] = 0


@kernel
def keep_before(rows: I64, start: int, stop: int, weight_RD: F32, held: U64, kept_RD: F32) -> None:
    """Keeps the weight of each row that is about to change for the first time since it was saved.

    The rows of positions start..stop are nobody else's; words of `held` are shared.
    """
    for i in range(start, stop):
        row = rows[i]
        if not test_bit(held, row):
            for d in range(weight_RD.shape[1]):
                kept_RD[row, d] = weight_RD[row, d]
            set_bit(held, row)


@kernel
def distances(start: int, stop: int, weight_RD: F32, held: U64, kept_RD: F32, out_R: F32) -> None:
    """How far each row start..stop is from where it was kept; 0 where it was not."""
    for row in range(start, stop):
        square = np.float32(0.0)
        if test_bit(held, row):
            for d in range(weight_RD.shape[1]):
                change = weight_RD[row, d] - kept_RD[row, d]
                square += change * change
        out_R[row] = np.sqrt(square)


@kernel
def histogram(keys: U32, start: int, stop: int, prefix: int, bins: I64) -> None:
    """Counts keys by their upper half, or with `prefix` ≥ 0 the keys of that upper half by their
    lower one. Keys of 0 are not counted."""
    for i in range(start, stop):
        key = keys[i]
        if key == 0:
            continue
        upper = np.int64(key >> _HALF)
        if prefix < 0:
            bins[upper] += 1
        elif upper == prefix:
            bins[np.int64(key & _LOW)] += 1


@kernel
def collect(
    keys: U32, start: int, stop: int, threshold: int, equal: int, taken: int, wanted: int,
    seen: int, out: I64,
) -> tuple[int, int]:  # fmt: skip
    """Lists the rows whose key is above the threshold, and `wanted` of the `equal` ones at it.

    Those at the threshold are taken evenly over all of them, so that no table is always first.
    `seen` of them were met and `taken` rows listed before; returns both as they are after. Keys may
    grow meanwhile: what no longer fits into `out` has its turn the next time.
    """
    limit = np.uint32(threshold)
    for i in range(start, stop):
        key = keys[i]
        if key < limit or key == 0:
            continue
        if key == limit:
            before = seen * wanted // max(1, equal)
            seen += 1
            if seen * wanted // max(1, equal) == before:
                continue
        if taken == out.size:
            break
        out[taken] = i
        taken += 1
    return taken, seen
