"""What a keeper is given and cannot use is warned of, or refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import ConfigError
from emberkeep.strategies import Strategy
from emberkeep.tables import Optimizer

QUANTIZED = ek.incremental(quantize_optimizer=True)


def bags(optimizer: Optimizer, tier: ek.Tier | None = None) -> ek.EmbeddingBags:
    return ek.EmbeddingBags([ek.Table("t", rows=10, dim=4, tier=tier)], optimizer=optimizer)


def made(optimizer: Optimizer, strategy: Strategy) -> list[str]:
    """What is warned of when a keeper is made."""
    model = bags(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keeper = ek.Keeper(MemoryStore(), model, model.optimizer, strategy=strategy)
    assert all(Path(each.filename) == Path(__file__) for each in caught)
    keeper.close()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("optimizer", [ek.SGD(lr=0.1), ek.Momentum(lr=0.1)])
def test_an_optimizer_without_such_planes_is_warned_of(optimizer: Optimizer) -> None:
    (message,) = made(optimizer, QUANTIZED)
    assert "quantize_optimizer has no effect" in message
    assert "accumulator and second_moment" in message
    assert "leave it out" in message


@pytest.mark.parametrize(
    "optimizer", [ek.Adagrad(lr=0.1), ek.RowWiseAdagrad(lr=0.1), ek.Adam(lr=0.1)]
)
def test_an_optimizer_with_such_planes_is_not(optimizer: Optimizer) -> None:
    assert made(optimizer, QUANTIZED) == []


def test_nothing_is_warned_of_where_nothing_is_asked_for() -> None:
    assert made(ek.SGD(lr=0.1), ek.incremental(bits=4)) == []


def test_a_run_that_its_tier_keeps_has_no_mirror(tmp_path: Path) -> None:
    model = bags(ek.SGD(lr=0.1), ek.Tier(tmp_path, memory="1MB"))
    with pytest.raises(ConfigError, match="as is mirror_every=, and the run is kept in its tier"):
        ek.Keeper(None, model, model.optimizer, mirror_every="2h")
    assert isinstance(model.cluster, LocalCluster)
    model.cluster.close()
