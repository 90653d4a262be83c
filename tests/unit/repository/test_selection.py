"""Of each id the newest row counts, whatever tables there are, and every row is looked at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from emberkeep.repository.grid.selection import Chosen


class Groups(Chosen):
    """Rows that were unpacked already: groups of a table's ids, the newest first."""

    def __init__(self, groups: Sequence[tuple[int, Sequence[int] | range]]) -> None:
        self.tables_G = np.array([table for table, _ in groups], np.int32)
        self.counts_G = np.array([len(ids) for _, ids in groups], np.int64)
        self.ids = np.concatenate([np.asarray(ids, np.int64) for _, ids in groups])
        self.kept = np.zeros(self.ids.size, np.bool_)
        self.kept_G = np.zeros(len(groups), np.int64)

    def choose(
        self, limits: Sequence[int | None], wanted: Collection[int] | None = None
    ) -> tuple[list[bool], list[int]]:
        self._choose(limits, wanted)
        return self.kept.tolist(), self.kept_G.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wanted", [None, (0, 2)])
def test_the_first_of_equal_ids_is_kept_and_counted(
    seed: int, wanted: Collection[int] | None
) -> None:
    random = np.random.default_rng(seed)
    limits = [30, None, None, 50, None]
    groups = [
        (int(random.integers(5)), np.flatnonzero(random.random(30) < random.random()).tolist())
        for _ in range(60)
    ]
    seen, kept, counts = set[tuple[int, int]](), list[bool](), list[int]()
    for table, ids in groups:
        asked = wanted is None or table in wanted
        new = [asked and (table, id_) not in seen for id_ in ids]
        seen.update((table, id_) for id_ in ids)
        kept += new
        counts.append(sum(new))
    assert Groups(groups).choose(limits, wanted) == (kept, counts)


def test_rows_of_other_tables_are_not_gone_through_for_each_table_that_takes_any_id() -> None:
    """With dozens of such tables a restore would go through all rows dozens of times."""
    rows, dynamic = 1_000_000, 8
    groups = [(0, range(rows)), *((1 + t, range(t, t + 20)) for t in range(dynamic))]
    chosen = Groups(groups)
    limits = [rows, *[None] * dynamic]
    Groups(groups[1:]).choose(limits)  # what is loaded on first use is not counted
    tracemalloc.start()
    try:
        chosen._choose(limits, None)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chosen.kept_G.tolist() == [rows] + [20] * dynamic
    assert most < rows  # a byte for each of all rows would be more
