"""What has changed in a slab since the last version, for rows that go back to it."""

from __future__ import annotations

import numpy as np

from emberkeep._types import I64
from emberkeep.kernels import batch_rows
from emberkeep.rows.slab import Slab
from emberkeep.rows.tracker import SINCE_VERSION
from emberkeep.runtime.memory import lazy_zeros


def changed_ids(slab: Slab, table: int) -> I64:
    """The ids of a table's rows that changed, came or left since the last version, ascending."""
    assert slab.tracker is not None
    changed = slab.tracker.changed(SINCE_VERSION, slab.dirty)
    held = slab.ranges()[table]
    word, last = held.base >> 6, (held.base + held.rows + 63) >> 6
    bits = changed.earlier[word:last] | changed.dirty[word:last]
    if held.ids is not None:  # a slot without a row names an id that has left
        bits &= slab.touched[word:last]
    rows = np.empty(batch_rows.count_bits(bits, 0, bits.size), np.int64)
    batch_rows.list_bits(bits, 0, bits.size, rows)
    ids = held.ids_of(rows + 64 * word)
    return np.unique(np.concatenate([ids, *changed.removed.get(table, [])]))


def forget_rewound(slab: Slab) -> None:
    """Rows are again as they were at the last version. What was written on the way may have
    changed since the baseline."""
    assert slab.tracker is not None
    dirty, slab.dirty = slab.dirty, lazy_zeros(slab.dirty.shape, np.uint64)
    slab.tracker.settle(slab.tracker.freeze(dirty), (SINCE_VERSION,))
    if slab.ranking is not None:
        slab.ranking.take_all()
