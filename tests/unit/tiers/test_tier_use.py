"""Hit rate and waits of a tier: in its status, the keeper's metrics, and a run's result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import emberkeep as ek
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.tiers import durable_open
from emberkeep.tiers.tier_use import TierStatus, TierUse
from emberkeep.train.loop import run
from tests.integration.test_train import small

FRAMES = 40


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 32 * 1024)


def bags_in(path: Path) -> ek.EmbeddingBags:
    tier = ek.Tier(path, memory=FRAMES * (4 * 8 + 48))
    table = ek.Table("a", rows=1000, dim=4, tier=tier)
    return ek.EmbeddingBags([table], optimizer=ek.Adagrad(lr=0.1))


def train(bags: ek.EmbeddingBags, first: int, count: int) -> None:
    bags({"a": torch.arange(first, first + count)}).sum().backward()
    bags.optimizer.step()
    bags.optimizer.zero_grad()


def status(bags: ek.EmbeddingBags) -> TierStatus:
    assert isinstance(bags.cluster, LocalCluster)
    (file,) = bags.cluster.tier_status()
    return file


def test_rows_that_had_to_be_read_are_misses(tmp_path: Path) -> None:
    bags = bags_in(tmp_path)
    for first in (0, 20, 40, 60):  # never seen before: there is nothing to read
        train(bags, first, 20)
    assert (status(bags).pulled, status(bags).missed, status(bags).hit_rate) == (80, 0, 1.0)
    train(bags, 60, 20)  # still in memory
    assert status(bags).missed == 0
    assert status(bags).wait_seconds >= 0.0
    train(bags, 0, 20)  # evicted since
    assert status(bags).missed == 20
    assert status(bags).hit_rate == pytest.approx(1 - 20 / 120)
    assert status(bags).wait_seconds > 0.0
    bags.cluster.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_miss_that_was_read_ahead_counts_once(tmp_path: Path, ahead: bool) -> None:
    bags = bags_in(tmp_path)
    for first in (0, 20, 40, 60):
        train(bags, first, 20)
    if ahead:
        bags.prefetch({"a": torch.arange(10)})
    train(bags, 0, 10)
    assert (status(bags).pulled, status(bags).missed) == (90, 10)
    bags.cluster.close()


def test_evaluation_counts_what_it_reads(tmp_path: Path) -> None:
    bags = bags_in(tmp_path)
    for first in (0, 20, 40, 60):
        train(bags, first, 20)
    with torch.no_grad():
        bags({"a": torch.arange(20)})
    assert (status(bags).pulled, status(bags).missed) == (100, 20)
    bags.cluster.close()


def test_the_use_of_a_run_is_the_sum_over_its_files(tmp_path: Path) -> None:
    one = status(bags := bags_in(tmp_path))
    bags.cluster.close()
    assert TierUse.of([]) is None
    files = [
        replace(one, pulled=100, missed=10, waits=1, wait_seconds=0.5),
        replace(one, pulled=300, missed=10, waits=2, wait_seconds=0.25),
    ]
    use = TierUse.of(files)
    assert use == TierUse(pulled=400, missed=20, hit_rate=0.95, waits=3, wait_seconds=0.75)


def test_a_keeper_has_it_as_metrics(tmp_path: Path) -> None:
    bags = bags_in(tmp_path)
    with ek.Keeper(None, bags, bags.optimizer, strategy=ek.incremental(every=100)) as keeper:
        for first in (0, 20, 40, 60, 0):
            train(bags, first, 20)
            keeper.step()
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(keeper.metrics())
            for sample in family.samples
        }
        use = keeper.tier_use()
        assert use is not None
        assert 0 < use.missed <= 20  # of those pulled again, some are perhaps there still
        assert found["emberkeep_tier_pulled_rows_total"] == 100
        assert found["emberkeep_tier_missed_rows_total"] == use.missed
        assert found["emberkeep_tier_hit_rate"] == pytest.approx(1 - use.missed / 100)
        assert found["emberkeep_tier_waits_total"] == use.waits
        assert found["emberkeep_tier_wait_seconds_total"] == use.wait_seconds > 0
    bags.cluster.close()


def test_a_result_has_it(tmp_path: Path) -> None:
    result = run(small(f'tier.path="{tmp_path / "t"}"', 'tier.memory="80KB"'))
    assert result.tier is not None
    assert result.tier.pulled > 0
    assert 0 < result.tier.hit_rate < 1
    document = result.to_dict()["tier"]
    assert document == {
        "pulled": result.tier.pulled, "missed": result.tier.missed,
        "hit_rate": result.tier.hit_rate, "waits": result.tier.waits,
        "wait_seconds": result.tier.wait_seconds,
    }  # fmt: skip


def test_a_run_without_a_tier_has_none() -> None:
    assert run(small()).tier is None
