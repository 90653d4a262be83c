"""Rows that exceed what any of the servers may have: they train with tiers, and come back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_tiers import RemoteTiers
from emberkeep.errors import EmberkeepError
from emberkeep.repository import Repository
from emberkeep.runtime import pool
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.tables import Adagrad, Table, Tier
from tests.servers import Farm, FarmLauncher

SHARDS, LIMIT, ROWS, DIM, PUSHED = 4, 460 * 2**20, 4_000_000, 64, 20_000
TABLE = Table("t", rows=ROWS, dim=DIM)
OPTIMIZER = Adagrad(lr=0.1)


def train(cluster: FlightCluster, first: int, last: int) -> None:
    for start in range(first, last, PUSHED):
        ids = np.arange(start, min(start + PUSHED, last))
        grads = np.full((ids.size, DIM), 1 + start / ROWS, np.float32)
        cluster.push([RowIds(ids, np.array([0, ids.size]))], [grads], lr=0.1)


def make_durable(tiers: RemoteTiers, batch: int) -> None:
    tiers.prepare(batch)()
    tiers.commit()


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts so on Linux")
def test_rows_beyond_the_memory_of_every_server(farm: Farm, tmp_path: Path) -> None:
    assert ROWS // SHARDS * DIM * 4 * 2 > LIMIT
    store = LocalStore(tmp_path / "r")
    launcher = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory="32MB"), limit=LIMIT)
    cluster = FlightCluster([TABLE], OPTIMIZER, launcher, pool=pool.Pool(2))
    run = Repository.create(store, schema=cluster.schema()).id
    tiers = RemoteTiers([cluster], store, run, SYSTEM_CLOCK)
    train(cluster, 0, ROWS // 2)
    make_durable(tiers, 1)
    train(cluster, ROWS // 2, ROWS)
    make_durable(tiers, 2)
    digest = cluster.digest("t")
    assert digest.rows == ROWS
    for shard in range(SHARDS):
        launcher.kill(shard)
    with pytest.raises(EmberkeepError):
        cluster.touched_ids("t")
    cluster.renew(*range(SHARDS))
    assert tiers.at_batch()
    cluster.serve(*range(SHARDS))
    assert cluster.digest("t") == digest
    train(cluster, 0, PUSHED)  # and is lost with the trainer
    cluster.close()
    again = FlightCluster([TABLE], OPTIMIZER, launcher, pool=pool.Pool(2))
    assert RemoteTiers([again], store, run, SYSTEM_CLOCK).batch() == 2
    assert again.digest("t") == digest
    again.close()
    launcher.end()
    plain = FarmLauncher(farm, SHARDS, limit=LIMIT)
    with pytest.raises(EmberkeepError, match="allocate memory"):
        FlightCluster([TABLE], OPTIMIZER, plain, pool=pool.Pool(2))
    plain.end()
