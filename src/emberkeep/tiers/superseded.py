"""Records that have a successor and are kept until it is committed: how many a segment has.

Only counts are kept, whatever the number of records. Stamps rise, and one batch is prepared at a
time: when it begins, every successor so far belongs to it, and the later ones are those with higher
stamps. So two counts for each segment say what dies with that batch and what dies with the next.

What is written after all rows were cleared, and before another batch begins, is of no batch: the
last one ended before it, and the next has what is newest then. Segments that hold nothing else are
*loose*; a superseded record of theirs is dead at once.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import I64


class Superseded:
    """By segment, the superseded records that are `undecided`. The slab's lock covers it."""

    def __init__(self, segments: int) -> None:
        self.undecided: I64 = np.zeros(segments, np.int64)
        # Of these, the ones that die with a batch that is committed up to this stamp.
        self._dying: I64 = np.zeros(segments, np.int64)
        self._boundary = 0
        self._loose = np.zeros(segments, np.bool_)
        self._cleared = False

    def add_segment(self) -> None:
        self.undecided = np.append(self.undecided, 0)
        self._dying = np.append(self._dying, 0)
        self._loose = np.append(self._loose, np.False_)

    def clear(self) -> None:
        """All rows are cleared, and no batch is under way: no record before this is the newest of
        its row, so that none is copied to a segment that is started after it."""
        self._cleared = True

    def begin_segment(self, segment: int) -> None:
        """Records are appended to another segment from now on."""
        self._loose[segment] = self._cleared

    def is_loose(self, segment: int) -> bool:
        return bool(self._loose[segment])

    def note(self, segments: I64, stamps: I64) -> I64:
        """Records in these segments have successors with those stamps. Returns the segments of
        those that are dead at once."""
        loose = self._loose[segments]
        dead, segments, stamps = segments[loose], segments[~loose], stamps[~loose]
        np.add.at(self.undecided, segments, 1)
        dying = stamps <= self._boundary
        np.add.at(self._dying, segments[dying], 1)
        return dead

    def begin_batch(self, stamp: int) -> None:
        """A batch of all that was written up to now begins; no successor has a later stamp yet.

        It takes the place of the one before, whether that was committed or given up.
        """
        self._cleared = False
        self._loose[:] = False
        self._boundary = stamp
        self._dying = self.undecided.copy()

    def decide(self, committed: int) -> I64:
        """By segment, the records that die since everything up to that stamp is committed.

        Where another batch was started before this one was recorded, the counts are of both:
        nothing dies until the next is committed.
        """
        if committed < self._boundary:
            return np.zeros_like(self._dying)
        dead, self._dying = self._dying, np.zeros_like(self._dying)
        self.undecided -= dead
        return dead
