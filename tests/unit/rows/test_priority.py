"""Rankings against plain references; prioritised rows while training goes on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import ConfigError, ShardLostError
from emberkeep.kernels import row_scores as kernels
from emberkeep.rows.priority import (
    Farthest,
    MostUsed,
    Priority,
    Ranking,
    Span,
    SubSampled,
    prioritised,
    ranking,
)
from emberkeep.rows.tracker import PRIORITISED, SINCE_BASELINE, SINCE_VERSION
from emberkeep.runtime.pool import Pool
from emberkeep.tables import SGD, Table
from tests.contracts.engine import wanted_of
from tests.nightly import examples

ROWS = 448
TABLES = [Span(0, 0, 100), Span(2, 192, 200)]  # of a slab whose middle table is not ranked
BASES = np.array([0, 128, 192])
POOL = Pool(2)
REAL = np.r_[0:100, 128:190, 192:392]  # the others lie between tables


def ranked(kind: Any, fraction: float = 0.25, weight: Any = None, **more: Any) -> Ranking:
    weight = np.zeros((ROWS, 4), np.float32) if weight is None else weight
    spec = Priority(kind=kind, fraction=fraction, **more)
    return ranking(spec, TABLES, rows=ROWS, bases_T=BASES, weight_RD=weight, pool=POOL)


def offsets(rows: Any) -> Any:
    return np.append(np.searchsorted(rows, BASES), rows.size)


def update(ranking: Ranking, rows: Any) -> None:
    rows = np.unique(np.asarray(rows, np.int64))
    half = rows.size // 2
    ranking.updating(rows, 0, half)
    ranking.updating(rows, half, rows.size)
    ranking.updated(rows, offsets(rows))


def is_ranked(row: int) -> bool:
    return any(table.base <= row < table.base + table.rows for table in TABLES)


histories = st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=60), max_size=12)


@settings(max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(history=histories, fraction=st.sampled_from([0.01, 0.1, 0.3, 0.5]))
def test_the_most_used_rows_are_those_with_the_largest_counts(
    history: list[list[int]], fraction: float
) -> None:
    it = ranked("mfu", fraction)
    counts: Counter[int] = Counter()
    for rows in history:
        update(it, rows)
        counts.update(row for row in set(rows) if is_ranked(row))
    chosen = it.select()
    assert (np.diff(chosen) > 0).all()
    assert chosen.size == min(it.limit, len(counts))
    left = [count for row, count in counts.items() if row not in set(chosen.tolist())]
    assert min((counts[row] for row in chosen.tolist()), default=0) >= max(left, default=0)


@settings(max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 10**6), largest=st.sampled_from([2, 6, 70_000, 2**32]))
def test_selection_is_exact_for_any_keys(seed: int, largest: int) -> None:
    keys = np.random.default_rng(seed).integers(0, largest, ROWS).tolist()
    it = ranked("mfu", 0.1)
    assert isinstance(it, MostUsed)
    it.counts[:] = keys
    eligible = [keys[row] for row in range(ROWS) if is_ranked(row)]
    chosen = sorted((keys[row] for row in it.select().tolist()), reverse=True)
    assert chosen == [key for key in sorted(eligible, reverse=True)[: it.limit] if key]


def test_keys_that_grow_while_they_are_read_list_no_more_than_fits() -> None:
    keys = np.full(1000, 7, np.uint32)  # all of them above the threshold of an earlier look
    out = np.full(20, -1, np.int64)
    taken, _ = kernels.collect(keys, 0, 1000, 3, 0, 0, 0, 0, out[:10])
    assert taken == 10
    np.testing.assert_array_equal(out, [*range(10), *[-1] * 10])
    taken, _ = kernels.collect(keys, 0, 1000, 7, 0, 0, 5, 0, out[:10])
    assert taken == 10


def test_equal_rows_are_chosen_from_all_tables() -> None:
    it = ranked("mfu", 0.1)
    update(it, np.arange(ROWS))
    chosen = it.select()
    assert it.limit == chosen.size == 30
    assert (chosen < 100).sum() == 10  # as many of each table as it has of all rows


@pytest.mark.parametrize("kind", ["mfu", "ssu", "scar"])
def test_what_is_saved_is_forgotten_and_comes_back_if_that_fails(kind: str) -> None:
    weight = np.zeros((ROWS, 4), np.float32)
    it = ranked(kind, 0.5, weight, period=1)
    update(it, [3, 4, 200, 201])
    weight[[3, 4, 200, 201]] += 1
    assert it.select().tolist() == [3, 4, 200, 201]
    taken = it.take(np.array([4, 201]))
    assert it.select().tolist() == [3, 200]
    everything = it.take_all()
    assert it.select().size == 0
    it.put_back(everything)
    assert it.select().tolist() == [3, 200]
    it.put_back(taken)
    assert it.select().tolist() == [3, 4, 200, 201]
    it.removed(np.array([200, 3]))
    assert it.select().tolist() == [4, 201]


def test_counters_of_a_failed_save_are_added_to_newer_ones() -> None:
    it = ranked("mfu")
    assert isinstance(it, MostUsed)
    update(it, [5])
    update(it, [5])
    taken, everything = it.take(np.array([5])), it.take_all()
    update(it, [5])
    it.put_back(taken)
    it.put_back(everything)
    assert it.counts[5] == 3
    it.counts[5] = 2**32 - 1
    update(it, [5])
    assert it.counts[5] == 2**32 - 1
    it.put_back((np.array([5]), np.array([7], np.uint32)))
    assert it.counts[5] == 2**32 - 1


def test_the_list_takes_every_second_push_and_stays_within_its_bound() -> None:
    it = ranked("ssu", 0.25)
    assert isinstance(it, SubSampled)
    update(it, [1, 2])
    assert it.select().size == 0
    update(it, [3, 150, 250])
    assert it.select().tolist() == [3, 250]  # 150 is of a table that is not ranked
    random = np.random.default_rng(0)
    for _ in range(200):
        update(it, random.choice(REAL, 100, replace=False))
    chosen = it.select()
    assert it.limit * 0.9 < chosen.size <= it.limit
    assert all(is_ranked(row) for row in chosen.tolist())
    assert it.nbytes <= 0.25 * 300 * 4


def test_rows_beyond_the_reach_of_an_int32_are_listed_too() -> None:
    """They were never chosen, without a word."""
    count = 2**32 - 2
    ranking = SubSampled(
        Priority(kind="ssu", fraction=1e-7, period=1), [Span(0, 0, count)], POOL,
        np.zeros(1, np.int64), count,
    )  # fmt: skip
    rows = np.array([5, 2**31 - 2, 2**31 - 1, 2**31 + 9, count - 1])
    ranking.updated(rows, np.array([0, rows.size]))
    # As `select` has them, without a bitmap of so many rows.
    assert sorted(ranking._listed(ranking.entries, ranking.tables[0]).tolist()) == rows.tolist()
    ranking.take(rows[1:])
    assert ranking._listed(ranking.entries, ranking.tables[0]).tolist() == [5]


def test_rows_that_are_used_often_are_likely_to_stay_on_the_list() -> None:
    it = ranked("ssu", 0.1)
    random = np.random.default_rng(1)
    hot = np.arange(192, 202)
    kept = 0
    for _ in range(50):
        for _ in range(20):
            update(it, np.concatenate([hot, random.choice(REAL, 20, replace=False)]))
        kept += np.isin(hot, it.select()).sum()
        it.take(it.select())
    assert kept > 0.35 * 50 * hot.size  # of rows used as seldom as the others it is below 0.1


@settings(max_examples=examples(40), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(history=histories, seed=st.integers(0, 1000))
def test_the_farthest_rows_are_those_that_moved_most_since_they_were_saved(
    history: list[list[int]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((ROWS, 4)).astype(np.float32)
    saved = weight.copy()
    it = ranked("scar", 0.1, weight)
    assert isinstance(it, Farthest)
    for number, given_rows in enumerate(history):
        rows = np.unique(given_rows)
        update(it, rows)
        weight[rows] += random.standard_normal((rows.size, 4)).astype(np.float32)
        if number % 4 == 3:
            chosen = it.select()
            it.take(chosen)
            saved[chosen] = weight[chosen]
    moved = np.linalg.norm((weight - saved).astype(np.float64), axis=1)
    moved[[row for row in range(ROWS) if not is_ranked(row)]] = 0
    chosen = it.select()
    assert chosen.size == min(it.limit, int((moved > 0).sum()))
    left = np.setdiff1d(np.arange(ROWS), chosen)
    assert moved[chosen].min(initial=np.inf) >= moved[left].max() * (1 - 1e-5)


@pytest.mark.parametrize("kind", ["mfu", "ssu", "scar"])
def test_threads_do_not_change_what_is_chosen(kind: str) -> None:
    chosen = []
    for threads in (1, 3):
        tables = [Table(f"t{i}", rows=3000, dim=4) for i in range(5)]
        cluster = local(threads=threads).open(tables, SGD(lr=0.1), seed=0)
        cluster.track(Priority(kind=kind, fraction=0.1))  # type: ignore[arg-type]
        random = np.random.default_rng(0)
        for _ in range(8):
            push(cluster, {t.name: random.choice(3000, 900, replace=False) for t in tables})
        found = cluster.shards[0].slabs[0].ranking
        assert found is not None
        chosen.append(found.select().tolist())
    assert chosen[0] == chosen[1]
    assert chosen[0]


def test_the_largest_tables_are_prioritised_until_they_hold_99_percent() -> None:
    assert prioritised([100, 5, 900, 4]) == {0, 2}
    assert prioritised([10, 10, 10]) == {0, 1, 2}
    assert prioritised([1, 0, 1000]) == {2}
    assert prioritised([]) == set()


@pytest.mark.parametrize(
    ("given", "words"),
    [({"kind": "lru"}, "lru"), ({"fraction": 0.0}, "fraction"), ({"fraction": 0.6}, "fraction"),
     ({"period": 0}, "period")],
)  # fmt: skip
def test_impossible_priorities_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Priority(**given)


# -- beside training -------------------------------------------------------------------------------

LARGE, SMALL = Table("large", rows=2000, dim=4), Table("small", rows=12, dim=4)
DYNAMIC = Table("dynamic", rows=None, capacity=900, dim=4)


def opened(kind: Any = "mfu") -> LocalCluster:
    cluster = local(threads=1).open([LARGE, SMALL, DYNAMIC], SGD(lr=0.1), seed=0)
    cluster.track(Priority(kind=kind, fraction=0.1, period=1))
    return cluster


def push(cluster: LocalCluster, batch: dict[str, Any]) -> None:
    lists = {name: np.asarray(ids).tolist() for name, ids in batch.items()}
    wanted = wanted_of(cluster, lists)
    cluster.push(wanted, [np.ones((wanted[0].ids.size, 4), np.float32)], lr=0.1)


def rows_of(frozen: Any) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for chunk in frozen.chunks(64):
        if chunk.planes is not None:
            values = chunk.planes["weight"][:, 0].tolist()
            found.setdefault(chunk.table, {}).update(zip(chunk.ids.tolist(), values, strict=True))
    return found


@pytest.mark.parametrize("kind", ["mfu", "ssu", "scar"])
def test_prioritised_rows_are_the_chosen_ones_and_all_of_small_tables(kind: str) -> None:
    cluster = opened(kind)
    push(cluster, {"large": [1, 2], "small": [0, 5], "dynamic": [77]})
    push(cluster, {"large": range(100, 150), "small": [7]})
    ((frozen,),) = cluster.freeze(PRIORITISED, 1 << 20)
    found = rows_of(frozen)
    assert set(found["large"]) == {1, 2, *range(100, 150)}
    assert set(found["small"]) == {0, 5, 7}
    assert set(found["dynamic"]) == {77}
    now = cluster.read("large", np.array([1, 120]))["weight"][:, 0]
    assert [found["large"][1], found["large"][120]] == now.tolist()
    frozen.close([PRIORITISED])
    # What was saved has lost its turn; whole versions still hold it.
    push(cluster, {"large": [9]})
    ((again,),) = cluster.freeze(PRIORITISED, 1 << 20)
    assert set(rows_of(again)["large"]) == {9}
    again.close(())
    ((retried,),) = cluster.freeze(PRIORITISED, 1 << 20)
    assert set(rows_of(retried)["large"]) == {9}
    retried.close([PRIORITISED])
    ((whole,),) = cluster.freeze(SINCE_VERSION, 1 << 20)
    assert set(rows_of(whole)["large"]) == {1, 2, 9, *range(100, 150)}
    whole.close([SINCE_VERSION, SINCE_BASELINE])


@pytest.mark.parametrize("committed", [True, False])
def test_a_whole_version_takes_every_turn_and_gives_it_back_if_it_fails(committed: bool) -> None:
    cluster = opened()
    push(cluster, {"large": [1, 2]})
    ((whole,),) = cluster.freeze(SINCE_VERSION, 1 << 20)
    rows_of(whole)
    push(cluster, {"large": [2, 3]})
    whole.close([SINCE_VERSION, SINCE_BASELINE] if committed else [])
    ((frozen,),) = cluster.freeze(PRIORITISED, 1 << 20)
    assert set(rows_of(frozen)["large"]) == ({2, 3} if committed else {1, 2, 3})
    frozen.close([PRIORITISED])


def test_deleted_rows_are_no_longer_chosen() -> None:
    cluster = opened()
    push(cluster, {"large": [1, 2], "dynamic": [5, 6]})
    cluster.delete("dynamic", np.array([5]))
    push(cluster, {"dynamic": [8]})  # in the place of 5
    ((frozen,),) = cluster.freeze(PRIORITISED, 1 << 20)
    gone = [chunk for chunk in frozen.chunks(64) if chunk.planes is None]
    assert [(chunk.table, chunk.ids.tolist()) for chunk in gone] == [("dynamic", [5])]
    frozen.close([PRIORITISED])


def test_a_shard_that_dies_before_its_rows_were_chosen_says_so() -> None:
    cluster = opened()
    push(cluster, {"large": [1, 2]})
    ((frozen,),) = cluster.freeze(PRIORITISED, 1 << 20)
    cluster.kill(0)
    with pytest.raises(ShardLostError):
        rows_of(frozen)
    frozen.close(())
