"""A view hands rows to the targets that they belong to, under their own names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emberkeep as ek
from emberkeep._types import Json
from emberkeep.checkpoint.target_view import TargetView, ViewPart, shard_view, view_of
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.runtime.memory import ScatteredRows
from tests.contracts.engine import state

TABLES = [ek.Table("fixed", rows=400, dim=8), ek.Table("grown", rows=None, capacity=300, dim=8)]
NAMES = {"a.fixed": "fixed", "a.grown": "grown"}
# Rows of a table that no target has stand between those of one that two have.
SAVED = ["a.fixed", "elsewhere", "nowhere", "a.grown", "b.fixed", "b.grown"]


class OnlyPlain:
    """A cluster that can do no more than every target must."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def clear(self) -> None:
        self._cluster.clear()

    def install(self, table: str, ids: Any, planes: Any) -> None:
        assert all(isinstance(values, np.ndarray) for values in planes.values())
        self._cluster.install(table, ids, planes)

    def delete(self, table: str, ids: Any) -> int:
        return self._cluster.delete(table, ids)

    def load_table_state(self, state: Json) -> None:
        self._cluster.load_table_state(state)

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        self._cluster.forget_changes(keep_since_baseline=keep_since_baseline)


def opened(shards: int = 1) -> LocalCluster:
    return ek.local(shards=shards).open(TABLES, ek.Adagrad(lr=0.1), seed=0)


def some_rows(tables: int) -> tuple[list[int], Any, dict[str, Any]]:
    random = np.random.default_rng(0)
    words = random.standard_normal(9000).astype(np.float32)
    ids = np.concatenate([random.choice(400, 90, replace=False) for _ in range(tables)])
    planes = {
        name: ScatteredRows(words, random.integers(0, words.size - 8, ids.size), 8)
        for name in ("weight", "accumulator")
    }
    return [90 * at for at in range(tables + 1)], ids, planes


@pytest.mark.parametrize("plain", [False, True])
def test_scattered_rows_reach_the_target_of_their_table(plain: bool) -> None:
    offsets, ids, planes = some_rows(len(SAVED))
    first, second, expected = opened(), opened(3), opened()
    view = TargetView(
        [
            ViewPart(OnlyPlain(first) if plain else first, NAMES),
            ViewPart(second, {"b.fixed": "fixed", "b.grown": "grown"}),
        ]
    )
    view.install_scattered(SAVED, offsets, ids, planes)
    for found, prefix in ((first, "a"), (second, "b")):
        expected.clear()
        for table in ("fixed", "grown"):
            at = SAVED.index(f"{prefix}.{table}")
            some = slice(offsets[at], offsets[at + 1])
            arrays = {name: np.asarray(values[some]) for name, values in planes.items()}
            expected.install(table, ids[some], arrays)
        assert state(found) == state(expected)
    assert view.delete("nowhere", ids) == 0
    assert view.delete("a.fixed", np.arange(400)) == 90
    assert first.touched_ids("fixed").size == 0
    assert second.touched_ids("fixed").size == 90


def test_one_shard_takes_its_own_rows_alone_however_they_come() -> None:
    offsets, ids, planes = some_rows(2)
    scattered, plain, whole = opened(3), opened(3), opened(3)
    names = ["a.fixed", "a.grown"]
    shard_view(scattered, 1, NAMES).install_scattered(names, offsets, ids, planes)
    for name, start, stop in zip(names, offsets, offsets[1:], strict=False):
        arrays = {plane: np.asarray(values[start:stop]) for plane, values in planes.items()}
        shard_view(plain, 1, NAMES).install(name, ids[start:stop], arrays)
        whole.install(NAMES[name], ids[start:stop], arrays)
        for shard in (0, 1, 2):
            found, expected = (
                cluster.shards[shard].touched_ids(NAMES[name]) for cluster in (plain, whole)
            )
            assert found.tolist() == (expected.tolist() if shard == 1 else [])
    assert state(scattered) == state(plain)
    tables = {name: {"steps": 7, "tick": 5, "ticks": [3, 4, 5]} for name in (*names, "nowhere")}
    view = shard_view(scattered, 1, NAMES)
    view.load_table_state(tables)
    assert {state["steps"] for state in scattered.shards[1].table_state().values()} == {7}
    assert {state["steps"] for state in scattered.shards[2].table_state().values()} == {0}


def test_a_view_is_seen_as_it_is() -> None:
    cluster = opened()
    view = view_of(cluster)
    assert view_of(view) is view  # type: ignore[arg-type]
    assert dict(view.parts[0].names) == {"fixed": "fixed", "grown": "grown"}
