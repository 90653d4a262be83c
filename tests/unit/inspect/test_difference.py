"""What moved between two versions, against a comparison of plain dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emberkeep.inspect.difference import TableDifference, compare
from emberkeep.runtime import pool
from tests.nightly import checkered
from tests.unit.repositories import TABLES, Run, State

POOL = pool.Pool(1)


def plain(before: State, after: State, top: int) -> list[TableDifference]:
    found = []
    for table in TABLES:
        one, two = (
            dict(zip(ids.tolist(), planes["weight"].astype(np.float64), strict=True))
            for ids, planes in (before[table.name], after[table.name])
        )
        both = sorted(one.keys() & two.keys())
        moved = {i: two[i] - one[i] for i in both if (two[i] != one[i]).any()}
        far = sorted(((float(np.linalg.norm(m)), i) for i, m in moved.items()), reverse=True)
        line = TableDifference(table=table.name)
        line.removed, line.added = len(one.keys() - two.keys()), len(two.keys() - one.keys())
        line.changed = len(moved)
        line.l2 = float(np.sqrt(sum(distance**2 for distance, _ in far)))
        line.largest = max((float(np.abs(m).max()) for m in moved.values()), default=0.0)
        line.top = far[:top]  # type: ignore[assignment]
        found.append(line)
    return found


@pytest.mark.parametrize(
    ("layout", "budget_nbytes"),
    checkered(["full", "one_shot", "intermittent", "consecutive", "grid"], [2**30, 3000]),
)
@pytest.mark.long
def test_differences_are_those_of_the_rows(layout: Any, budget_nbytes: int) -> None:
    run = Run(layout=layout, shards=1)
    for _ in range(4):
        run.save(1)
    versions = run.repository.versions()
    for one in versions:
        for two in versions:
            expected = plain(run.states[one.number], run.states[two.number], 4)
            found = compare(run.repository, one, two, POOL, top=4, budget_nbytes=budget_nbytes)
            for got, wanted in zip(found, expected, strict=True):
                assert (got.table, got.removed, got.added, got.changed) == (
                    wanted.table, wanted.removed, wanted.added, wanted.changed,
                )  # fmt: skip
                assert got.l2 == pytest.approx(wanted.l2)
                assert got.largest == wanted.largest
                assert [row.id for row in got.top] == [row for _, row in wanted.top]  # type: ignore[misc]


def test_tables_can_be_chosen() -> None:
    run = Run()
    run.save()
    run.save()
    one, two = run.repository.versions()
    found = compare(run.repository, one, two, POOL, tables=["evicting"], top=0)
    assert [(line.table, line.top) for line in found] == [("evicting", [])]
