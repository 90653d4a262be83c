"""Pushes that the tier of one server refuses: no shard has applied them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import ConfigError
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adagrad, Table, Tier
from tests.contracts.engine import state, wanted_of
from tests.servers import Farm, FarmLauncher

TABLE = Table("t", rows=40_000, dim=8)


def test_a_push_that_one_tier_has_no_memory_for_changes_no_row_of_another(
    farm: Farm, tmp_path: Path
) -> None:
    """Of a fixed table: without a tier nobody could refuse it."""
    servers = FarmLauncher(farm, 2, tier=Tier(tmp_path / "t", memory=100_000))
    cluster = FlightCluster([TABLE], Adagrad(lr=0.1), servers, seed=1, pool=Pool(1))
    owned = cluster.positions("t", np.arange(TABLE.rows))

    def push(*counts: int) -> None:
        ids = np.sort(np.concatenate([owned[s][:count] for s, count in enumerate(counts)]))
        wanted = wanted_of(cluster, {"t": ids.tolist()})
        cluster.push(wanted, [np.ones((ids.size, 8), np.float32)], lr=0.1)

    push(9, 9)
    before = state(cluster)
    with pytest.raises(ConfigError, match="no row was changed"):
        push(9, 15_000)
    assert state(cluster) == before
    push(9, 9)
    assert cluster.table_state()["t"]["steps"] == 2
    assert set(cluster.read("t", np.array([0]))["accumulator"].ravel().tolist()) == {2.0}
    cluster.close()
    servers.end()
