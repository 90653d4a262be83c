"""What a tracker remembers of ids that left."""

from __future__ import annotations

import numpy as np

from emberkeep.rows.tracker import SINCE_BASELINE, SINCE_VERSION, Tracker


def test_ids_that_leave_again_and_again_take_no_more_memory() -> None:
    """Until the next baseline they were kept once for each time."""
    tracker, dirty = Tracker(1), np.zeros(1, np.uint64)
    gone = set[int]()
    for version in range(100):
        ids = np.arange(version % 7, version % 7 + 50)
        gone.update(ids.tolist())
        tracker.remove(0, ids)
        frozen = tracker.freeze(dirty)
        tracker.remove(0, np.array([1000 + version % 3]))  # while the version is written
        gone.add(1000 + version % 3)
        tracker.settle(frozen, (SINCE_VERSION,))
    held = tracker.changed(SINCE_BASELINE, dirty).removed[0]
    assert set(np.concatenate(held).tolist()) == gone
    assert sum(part.size for part in held) <= 3 * len(gone)
    assert [part.tolist() for part in tracker.changed(SINCE_VERSION, dirty).removed[0]] == [[1000]]
