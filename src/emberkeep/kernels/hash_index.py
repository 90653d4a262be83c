"""Mixing of 64-bit ids, and the index of a dynamic table: id → slot.

The index is one array of 64-bit entries probed linearly: the high half of an entry is a
fingerprint of the id's hash, the low half the slot plus one; zero is empty. Ids themselves stand
in the `id` plane, so an entry is half the size of a (key, value) pair and a wrong fingerprint
costs no access to the plane. Deletion shifts entries back: there are no tombstones to clean up,
and a table that lost rows is as fast as one that never had them.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import I64, U64, Bools
from emberkeep.kernels._jit import inline, kernel

_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S27 = np.uint64(27)
_S30 = np.uint64(30)
_S31 = np.uint64(31)
_S32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@inline
def mix64(x: np.uint64) -> np.uint64:
    """A bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> _S30)) * _MIX_A
    x = (x ^ (x >> _S27)) * _MIX_B
    return x ^ (x >> _S31)


@inline
def hash_id(identity: int) -> np.uint64:
    return mix64(np.uint64(identity) + GOLDEN)


@inline
def shard_of(identity: int, shards: int, dynamic: bool) -> np.int64:
    """The shard that owns an id: `id mod n`; dynamic ids are mixed first, they may be strided."""
    if dynamic:
        # A second mixing: the low bits of hash_id also choose the index entry within the shard.
        return np.int64(mix64(hash_id(identity)) % np.uint64(shards))
    return np.int64(identity % shards)


@inline
def _probe(entries: U64, ids: I64, identity: int) -> tuple[np.uint64, np.int64]:
    """The position of the id's entry and its slot, or the empty position and -1."""
    mask = np.uint64(entries.size - 1)
    h = hash_id(identity)
    print_ = h >> _S32
    at = h & mask
    while True:
        entry = entries[at]
        if entry == _ZERO:
            return at, np.int64(-1)
        if entry >> _S32 == print_:
            slot = np.int64(entry & _LOW) - 1
            if ids[slot] == identity:
                return at, slot
        at = (at + _ONE) & mask


@kernel
def index_find(entries: U64, ids: I64, wanted: I64, base: int, slots: I64) -> int:
    """Fills `slots` with base + slot of each wanted id, -1 where it is unknown; counts those."""
    unknown = 0
    for i in range(wanted.size):
        _, slot = _probe(entries, ids, wanted[i])
        if slot < 0:
            slots[i] = -1
            unknown += 1
        else:
            slots[i] = base + slot
    return unknown


@inline
def _put(entries: U64, ids: I64, identity: int, slot: np.int64) -> None:
    at, _ = _probe(entries, ids, identity)
    entries[at] = ((hash_id(identity) >> _S32) << _S32) | np.uint64(slot + 1)
    ids[slot] = identity


@kernel
def index_insert(entries: U64, ids: I64, new: I64, slots: I64) -> None:
    """Enters each new id at its slot. The ids must be distinct and unknown."""
    for i in range(new.size):
        _put(entries, ids, new[i], slots[i])


@kernel
def index_remove(entries: U64, ids: I64, gone: I64) -> None:
    """Removes ids; unknown ones are passed over. The index is as if they had never been."""
    mask = np.uint64(entries.size - 1)
    for i in range(gone.size):
        hole, slot = _probe(entries, ids, gone[i])
        if slot < 0:
            continue
        at = hole
        while True:
            at = (at + _ONE) & mask
            entry = entries[at]
            if entry == _ZERO:
                break
            home = hash_id(ids[np.int64(entry & _LOW) - 1]) & mask
            # Move the entry into the hole unless its home lies cyclically after the hole.
            if ((at - home) & mask) >= ((at - hole) & mask):
                entries[hole] = entry
                hole = at
        entries[hole] = _ZERO


@kernel
def route(
    ids: I64,
    offsets_T: I64,
    dynamic_T: Bools,
    shards: int,
    counts_ST: I64,
    order: I64,
) -> None:
    """Sorts the positions of `ids` by (shard, table), stably; fills counts and the order."""
    tables = dynamic_T.size
    owner = np.empty(ids.size, np.int32)
    for t in range(tables):
        for i in range(offsets_T[t], offsets_T[t + 1]):
            owner[i] = shard_of(ids[i], shards, dynamic_T[t])
            counts_ST[owner[i], t] += 1
    starts = np.empty((shards, tables), np.int64)
    at = 0
    for s in range(shards):
        for t in range(tables):
            starts[s, t] = at
            at += counts_ST[s, t]
    for t in range(tables):
        for i in range(offsets_T[t], offsets_T[t + 1]):
            order[starts[owner[i], t]] = i
            starts[owner[i], t] += 1
