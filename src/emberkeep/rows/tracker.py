"""Which reader has taken which change: a cursor for each of them.

The push kernel sets one bitmap of *dirty* rows. Each cursor owns the rows that changed since its
reader last looked. Freezing moves the rows of every cursor, together with the dirty ones, into
frozen sets in constant time; settling drops the frozen set of a cursor whose reader has what it
needs and puts the others back. So an update between freeze and commit belongs to the next set,
and a failed save loses nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from emberkeep._types import I64, U64
from emberkeep.runtime.memory import lazy_zeros

Removed = dict[int, list[I64]]

# What changed since the last version, and since the version that increments count from.
SINCE_VERSION = "version"
SINCE_BASELINE = "baseline"
CURSORS = (SINCE_VERSION, SINCE_BASELINE)
# Not a cursor: the rows that matter most among those that changed.
PRIORITISED = "prioritised"


@dataclass(frozen=True, slots=True)
class Frozen:
    """The changes that one cursor owned at a freeze: rows `earlier | dirty`, ids that left."""

    earlier: U64
    dirty: U64
    removed: Removed


def _bits(words: int) -> U64:
    bits: U64 = lazy_zeros((words,), np.uint64)
    return bits


def _each_once(parts: list[I64]) -> list[I64]:
    """The same ids, which take no more memory the more often they leave: whenever as many have come
    as there were, those that are there twice are dropped."""
    if not parts or sum(part.size for part in parts[1:]) < parts[0].size:
        return parts
    return [np.unique(np.concatenate(parts))]


class Tracker:
    """The cursors over the rows of one slab.

    `removed` lists the ids that left each dynamic table (fixed rows that were deleted are dirty
    and not touched, which says the same). The shard's lock covers `freeze` and `remove`; between
    a freeze and its `settle` there is no other freeze.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._earlier = {cursor: _bits(words) for cursor in CURSORS}
        self._earlier_removed: dict[str, Removed] = {cursor: {} for cursor in CURSORS}
        self._removed: Removed = {}

    def remove(self, table: int, ids: I64) -> None:
        """Notes that ids left a dynamic table."""
        self._removed.setdefault(table, []).append(ids)

    def freeze(self, dirty: U64) -> dict[str, Frozen]:
        """Moves everything that changed into a frozen set per cursor. Constant time."""
        frozen = {}
        for cursor in CURSORS:
            frozen[cursor] = self.changed(cursor, dirty)
            self._earlier[cursor] = _bits(self._words)
            self._earlier_removed[cursor] = {}
        self._removed = {}
        return frozen

    def settle(self, frozen: dict[str, Frozen], advanced: Collection[str]) -> None:
        """Drops the frozen sets of the cursors that advanced; puts the others back."""
        for cursor, held in frozen.items():
            if cursor in advanced:
                continue
            back = self._earlier[cursor]
            np.bitwise_or(back, held.earlier, out=back)
            np.bitwise_or(back, held.dirty, out=back)
            for table, parts in held.removed.items():
                later = self._earlier_removed[cursor].get(table, [])
                self._earlier_removed[cursor][table] = _each_once(parts + later)

    def changed(self, cursor: str, dirty: U64) -> Frozen:
        """What a freeze would hand to a cursor now."""
        removed = {table: list(parts) for table, parts in self._earlier_removed[cursor].items()}
        for table, parts in self._removed.items():
            removed.setdefault(table, []).extend(parts)
        return Frozen(self._earlier[cursor], dirty, removed)

    def reset(self, changed_since_baseline: U64 | None = None) -> None:
        """After a restore: nothing changed since the version, and since the baseline just this."""
        removed, self._removed = self._removed, {}
        for cursor in CURSORS:
            self._earlier[cursor] = _bits(self._words)
            self._earlier_removed[cursor] = {}
        if changed_since_baseline is not None:
            self._earlier[SINCE_BASELINE] = changed_since_baseline
            self._earlier_removed[SINCE_BASELINE] = removed
