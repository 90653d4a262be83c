"""Parity under a keeper: the first of two levels, with rare versions behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep.checkpoint import Checkpointer
from emberkeep.repository import Repository
from tests.contracts.engine import state
from tests.unit.repositories import MemoryStore

TABLES = [
    ek.Table("fixed", rows=60, dim=4),
    ek.Table("dynamic", rows=None, capacity=90, dim=4),
]


def bags_on(**cluster: Any) -> ek.EmbeddingBags:
    return ek.EmbeddingBags(TABLES, optimizer=ek.Adagrad(lr=0.1), cluster=ek.local(**cluster))


def train(bags: ek.EmbeddingBags, steps: range, keeper: ek.Keeper | None = None) -> None:
    for step in steps:
        random = np.random.default_rng(step)
        ids = {name: torch.from_numpy(random.integers(0, 60, 16)) for name in ("fixed", "dynamic")}
        bags(ids).sum().backward()
        bags.optimizer.step()
        if keeper is not None:
            keeper.step()


def test_losses_within_parity_cost_no_step(tmp_path: Path) -> None:
    plain = bags_on(shards=4)
    train(plain, range(20))
    bags = bags_on(
        shards=4,
        failures=[
            ek.fail_at(1, step=5),
            ek.fail_at(3, step=9, when="push"),
            ek.fail_at(0, step=17),
        ],
    )
    with ek.Keeper(
        tmp_path / "run", bags, bags.optimizer, strategy=ek.parity(k=3, every=6)
    ) as keeper:
        train(bags, range(5), keeper)
        bags.cluster.rebuild()
        train(bags, range(5, 12), keeper)
        bags.cluster.rebuild()
        train(bags, range(12, 20), keeper)
        assert bags.cluster.parity.recoveries == 3
        assert keeper.recoveries().full == 0
        assert "emberkeep_parity_recoveries_total 3.0\n" in keeper.metrics()
    assert state(bags.cluster) == state(plain.cluster)
    again = bags_on(shards=4)
    with ek.Keeper(tmp_path / "run", again, again.optimizer) as keeper:
        keeper.resume()
    assert state(again.cluster) == state(plain.cluster)


def test_versions_after_a_loss_know_what_was_deleted() -> None:
    """A shard that comes back has forgotten deletions: the next version is a baseline."""
    bags = bags_on(shards=4, parity=ek.Parity(k=3, r=1))
    repository = Repository.create(MemoryStore(), schema=bags.cluster.schema())
    saver = Checkpointer(repository, bags.cluster, spec=ek.incremental().spec)
    train(bags, range(6))
    saver.save(6)
    assert saver.wait().layout["kind"] == "full"
    for table in ("fixed", "dynamic"):
        bags.delete(table, bags.touched_ids(table)[::3])
    bags.cluster.kill(2)
    train(bags, range(6, 8))
    saver.save(8)
    assert saver.wait().layout["kind"] == "full"
    expected = state(bags.cluster)
    train(bags, range(8, 10))
    saver.save(10)
    assert saver.wait().layout["kind"] != "full"
    saver.restore(2)
    assert state(bags.cluster) == expected
    bags.cluster.kill(1)
    assert state(bags.cluster) == expected


def read_or_recover(bags: ek.EmbeddingBags, keeper: ek.Keeper) -> None:
    try:
        bags.cluster.read_all("fixed")
    except ek.ShardLostError:
        keeper.recover()


@pytest.mark.parametrize("scope", ["full", "partial"])
def test_more_losses_than_parity_bears_fall_to_the_repository(tmp_path: Path, scope: Any) -> None:
    bags = bags_on(shards=4)
    strategy = ek.parity(k=3, every=4, recovery=scope)
    with ek.Keeper(
        tmp_path / "run", bags, bags.optimizer, strategy=strategy, total_steps=20
    ) as keeper:
        train(bags, range(8), keeper)
        keeper.wait()
        saved = state(bags.cluster)
        if scope == "full":  # else nothing was trained since, and the lost shards are enough
            train(bags, range(8, 9), keeper)
        bags.cluster.kill(0, 2)
        with pytest.warns(UserWarning, match="more than parity"):
            read_or_recover(bags, keeper)
        assert state(bags.cluster) == saved
        bags.cluster.rebuild()
        assert bags.cluster.parity.protected
        bags.cluster.kill(1)
        assert state(bags.cluster) == saved
        recoveries = keeper.recoveries()
        assert (recoveries.full, recoveries.partial) == ((1, 0) if scope == "full" else (0, 1))
        assert (recoveries.failures, recoveries.parity) == (3, 1)


@pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")
def test_up_to_r_losses_need_nothing_in_the_loop_and_more_need_surviving(tmp_path: Path) -> None:
    plain = bags_on(shards=4)
    train(plain, range(12))
    bags = bags_on(shards=4)
    strategy = ek.parity(k=3, r=1, every=4)
    with ek.Keeper(tmp_path / "run", bags, bags.optimizer, strategy=strategy) as keeper:
        train(bags, range(6), keeper)
        keeper.wait()
        bags.cluster.kill(2)
        train(bags, range(6, 7), keeper)
        bags.cluster.rebuild()
        bags.cluster.kill(0, 2)
        with (
            pytest.warns(UserWarning, match="more than parity"),
            pytest.raises(ek.ShardLostError),
        ):
            train(bags, range(7, 8), keeper)
        with keeper.surviving():
            train(bags, range(7, 8), keeper)
        assert keeper.steps == 4
        while keeper.steps < 12:
            with keeper.surviving():
                train(bags, range(keeper.steps, keeper.steps + 1), keeper)
        assert (keeper.recoveries().parity, keeper.recoveries().full) == (1, 1)
    assert state(bags.cluster) == state(plain.cluster)


def test_parity_without_shards_is_refused(tmp_path: Path) -> None:
    model = torch.nn.EmbeddingBag(10, 4, sparse=True)
    with pytest.raises(ek.EmberkeepError, match="tables on shards"):
        ek.Keeper(
            tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=ek.parity(),
        )  # fmt: skip
    bags = bags_on(shards=4)
    with pytest.raises(ek.EmberkeepError, match="needs 5 shards"):
        ek.Keeper(tmp_path / "other", bags, bags.optimizer, strategy=ek.parity())
