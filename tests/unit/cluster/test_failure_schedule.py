"""Schedules of failures: checked when written, the same for the same seed, each happens once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emberkeep as ek
from emberkeep.checkpoint.target_view import shard_view
from emberkeep.cluster.failure_schedule import Failure
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import ConfigError, ShardLostError
from emberkeep.tables import SGD, Table
from tests.contracts.engine import wanted_of


def opened(*failures: Failure) -> LocalCluster:
    table = Table("t", rows=30, dim=2)
    return local(shards=3, threads=1, failures=failures).open([table], SGD(lr=0.1), seed=0)


def step(cluster: LocalCluster) -> str:
    """One training step; where a shard was lost in it."""
    ids = wanted_of(cluster, {"t": list(range(30))})
    try:
        cluster.pull(ids)
    except ShardLostError:
        return "pull"
    try:
        cluster.push(ids, [np.ones((30, 2), np.float32)], lr=0.1)
    except ShardLostError:
        return "push"
    return ""


def revive(cluster: LocalCluster) -> None:
    lost = cluster.lost()
    state = cluster.handles[next(s for s in range(3) if s not in lost)].table_state()
    cluster.renew(*lost)
    for shard in lost:
        shard_view(cluster, shard).load_table_state(state)
    cluster.serve(*lost)


def test_shards_fail_where_the_schedule_says_and_once() -> None:
    cluster = opened(
        ek.fail_at(1, step=2), ek.fail_at(0, 2, step=4, when="push"), ek.fail_at(0, step=4)
    )
    outcomes = []
    for _ in range(8):
        outcomes.append((step(cluster), cluster.lost()))
        revive(cluster)
    assert outcomes == [
        ("", ()), ("pull", (1,)), ("", ()), ("", ()), ("pull", (0,)), ("push", (0, 2)), ("", ()),
        ("", ()),
    ]  # fmt: skip
    assert cluster.failures == []
    cluster.load_table_state({"t": {"steps": 1, "tick": 0}})  # a recovery goes back
    assert [step(cluster) for _ in range(4)] == [""] * 4


def test_random_schedules_follow_their_seed_and_their_model() -> None:
    given: dict[str, Any] = {"shards": 8, "steps": 50_000}
    one = ek.random_failures(**given, seed=3, mean_steps=100, together=2)
    assert one == ek.random_failures(**given, seed=3, mean_steps=100, together=2)
    assert one != ek.random_failures(**given, seed=4, mean_steps=100, together=2)
    assert 400 < len(one) < 600
    assert all(len(failure.shards) == 2 and 1 <= failure.step <= 50_000 for failure in one)
    assert {failure.when for failure in one} == {"pull", "push"}
    assert {shard for failure in one for shard in failure.shards} == set(range(8))
    gaps = np.diff([failure.step for failure in one])
    assert 0.8 < gaps.std() / gaps.mean() < 1.2  # exponential
    bursts = np.diff(
        [f.step for f in ek.random_failures(**given, seed=3, mean_steps=100, shape=0.25)]
    )
    assert bursts.std() / bursts.mean() > 1.6
    counted = ek.random_failures(**given, seed=0, count=7)
    assert len(counted) == 7
    assert [f.step for f in counted] == sorted(f.step for f in counted)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ek.fail_at(step=3), "names shards"),
        (lambda: ek.fail_at(-1, step=3), "names shards"),
        (lambda: ek.fail_at(1, step=0), "count from 1"),
        (lambda: ek.fail_at(1, step=3, when="never"), "never"),
        (lambda: ek.local(shards=2, failures=[ek.fail_at(2, step=1)]), "shard 2 cannot fail"),
        (lambda: ek.random_failures(shards=2, steps=9, seed=0), "give one"),
        (lambda: ek.random_failures(shards=2, steps=9, seed=0, count=1, mean_steps=3), "give one"),
        (lambda: ek.random_failures(shards=2, steps=9, seed=0, count=1, together=3), "together"),
        (lambda: ek.random_failures(shards=2, steps=9, seed=0, mean_steps=0), "above 0"),
        (lambda: ek.random_failures(shards=2, steps=9, seed=0, count=1, shape=0), "shape"),
    ],
)
def test_schedules_that_cannot_be_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
