"""More rows than a dynamic table can hold: no restore loses any of them without a word."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import TableFullError
from emberkeep.repository import Repository
from emberkeep.tables import SGD, Table
from tests.contracts.engine import grads_of, state, wanted_of

CAPACITY = 40
LAYOUTS = ["full", "consecutive", "grid"]


def table(on_full: Any = "error", capacity: int = CAPACITY) -> Table:
    return Table("items", rows=None, capacity=capacity, dim=4, on_full=on_full)


def opened(shards: int, **given: Any) -> LocalCluster:
    return local(shards=shards, threads=1).open([table(**given)], SGD(lr=0.1), seed=1)


def push(cluster: Any, ids: Any) -> None:
    batch, grads = {"items": list(ids)}, {"items": np.ones((len(ids), 4))}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


def keeper_of(cluster: Any, store: Any, layout: Any = "full") -> Checkpointer:
    if not Repository.exists(store):
        Repository.create(store, schema=cluster.schema())
    return Checkpointer(Repository.open(store), cluster, spec=VersionSpec(layout=layout))


def saved(cluster: Any, keeper: Checkpointer, step: int) -> None:
    keeper.save(step)
    keeper.wait()
    keeper.settle()


def overfilled(on_full: str) -> LocalCluster:
    """Four shards that hold more rows together than the table's capacity."""
    cluster = opened(4, on_full=on_full)
    for at in range(300):
        try:
            push(cluster, [at])
        except TableFullError:
            break
    assert cluster.touched_ids("items").size > CAPACITY
    return cluster


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_version_with_too_many_rows_is_refused_before_any_row_changes(layout: str) -> None:
    cluster, store = overfilled("error"), MemoryStore()
    saved(cluster, keeper_of(cluster, store, layout), 1)
    rows = cluster.touched_ids("items").size
    fewer = opened(1)
    push(fewer, [7, 8])
    before = state(fewer)
    with pytest.raises(TableFullError, match=rf"'items'.* {rows} rows.*{CAPACITY}.*nothing was"):
        keeper_of(fewer, store, layout).restore()
    assert state(fewer) == before
    same, larger = opened(4), opened(1, capacity=rows)
    for fits in (same, larger):
        keeper_of(fits, store, layout).restore()
        assert state(fits) == state(cluster)


def test_a_smaller_capacity_is_refused_on_the_same_shards_too() -> None:
    cluster, store = overfilled("error"), MemoryStore()
    saved(cluster, keeper_of(cluster, store), 1)
    with pytest.raises(TableFullError, match="nothing was loaded") as refused:
        keeper_of(opened(4, capacity=8), store).restore()
    advice = re.search(r"raise capacity= to (\d+) or more", str(refused.value))
    assert advice is not None
    followed = opened(4, capacity=int(advice[1]))
    keeper_of(followed, store).restore()
    assert state(followed) == state(cluster)


def test_the_advice_works_where_one_shard_holds_most_rows() -> None:
    cluster, store = opened(4, capacity=200), MemoryStore()
    push(cluster, cluster.positions("items", np.arange(300))[2][:60].tolist())
    saved(cluster, keeper_of(cluster, store), 1)
    with pytest.raises(TableFullError) as refused:
        keeper_of(opened(4, capacity=60), store).restore()
    advice = re.search(r"raise capacity= to (\d+) or more", str(refused.value))
    assert advice is not None
    followed = opened(4, capacity=int(advice[1]))
    keeper_of(followed, store).restore()
    assert state(followed) == state(cluster)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_that_evicts_keeps_the_newest_rows_and_says_how_many_went(layout: str) -> None:
    cluster, store = overfilled("evict_oldest"), MemoryStore()
    saved(cluster, keeper_of(cluster, store, layout), 1)
    ids, planes = cluster.read_all("items")
    fewer = opened(1, on_full="evict_oldest")
    with pytest.warns(RuntimeWarning, match=rf"'items'.* {ids.size - CAPACITY} .*evicted"):
        keeper_of(fewer, store, layout).restore()
    kept, rows = fewer.read_all("items")
    assert kept.size == CAPACITY
    used = dict(zip(ids.tolist(), planes["used"][:, 0].tolist(), strict=True))
    gone = set(ids.tolist()) - set(kept.tolist())
    assert max(used[i] for i in gone) <= min(used[i] for i in kept.tolist())
    np.testing.assert_array_equal(rows["weight"], planes["weight"][np.isin(ids, kept)])


@pytest.mark.parametrize("on_full", ["error", "evict_oldest"])
@pytest.mark.parametrize("layout", ["one_shot", "consecutive"])
def test_rows_that_one_shard_lost_make_room_for_those_of_another(layout: str, on_full: str) -> None:
    """An increment holds the rows of a shard that has grown before the deletions of the next."""
    cluster, store = opened(2, on_full=on_full), MemoryStore()
    keeper = keeper_of(cluster, store, layout)
    first, second = (ids.tolist() for ids in cluster.positions("items", np.arange(90)))
    push(cluster, [*first[:10], *second[:30]])
    saved(cluster, keeper, 1)
    cluster.delete("items", np.array(second[:20]))
    push(cluster, first[10:30])
    saved(cluster, keeper, 2)
    fewer = opened(1, on_full=on_full)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeper_of(fewer, store, layout).restore()
    assert state(fewer) == state(cluster)


def test_a_state_dict_with_more_rows_than_fit_says_how_many_went() -> None:
    large, small = (
        ek.EmbeddingBags([table("evict_oldest", capacity)], optimizer=ek.SGD(lr=0.1))
        for capacity in (30, 20)
    )
    for at in range(0, 30, 10):
        large({"items": torch.arange(at, at + 10)}).sum().backward()
        large.optimizer.step()
    with pytest.warns(RuntimeWarning, match="10 of 30 rows had no room and were evicted"):
        small.load_state_dict(large.state_dict())
    np.testing.assert_array_equal(small.cluster.touched_ids("items"), np.arange(10, 30))
