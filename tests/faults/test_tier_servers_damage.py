"""Files of a server's tier that are damaged: its rows come from the repository, and the run goes
on; the files are kept, to be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.recovery import Home, recover_partially
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import ShardLostError
from emberkeep.repository import Manifest, Repository
from emberkeep.runtime import pool
from emberkeep.tables import SGD, Adagrad, Table, Tier
from emberkeep.tiers.superblock import START
from tests.contracts.cluster import push
from tests.contracts.engine import tables, wanted_of
from tests.integration.test_tiered_keeper import OFTEN, SHARDS, OnServers, Run, plain
from tests.servers import Farm, FarmLauncher

pytestmark = pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")


@pytest.fixture
def launcher(farm: Farm, tmp_path: Path) -> Iterator[FarmLauncher]:
    started = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    yield started
    started.end()


def damage(directory: Path) -> None:
    """Every record of every file; heads stay."""
    for path in directory.glob("*.tier"):
        content = np.fromfile(path, np.uint8)
        content[START:] ^= 0x55
        with path.open("r+b") as file:
            file.write(content.tobytes())


@pytest.mark.parametrize("when", ["the trainer starts again", "a server does"])
def test_rows_come_from_the_repository(launcher: FarmLauncher, tmp_path: Path, when: str) -> None:
    run = Run(OnServers(launcher), tmp_path / "r", OFTEN)
    run.keeper.resume()
    run.train(9)  # version 6, batch 8
    if when == "a server does":
        launcher.kill(1)
        damage(tmp_path / "t" / "shard-1")
        with run.keeper.surviving():
            run.train(1)
        assert run.keeper.steps == 6
    else:
        run.end()
        damage(tmp_path / "t" / "shard-1")
        run = Run(OnServers(launcher), tmp_path / "r", OFTEN)
        kept = run.keeper.resume()
        assert isinstance(kept, Manifest)
        assert kept.step == 6
    assert run.bits() == plain(6)
    moved = sorted(p.name for p in (tmp_path / "t" / "shard-1" / "damaged").iterdir())
    assert moved == ["rows-1-0.tier", "rows-1-1.tier"]
    assert run.train(6).bits() == plain(12)
    run.end()
    again = Run(OnServers(launcher), tmp_path / "r", OFTEN)  # and batches are durable again
    assert again.keeper.resume().step == 12
    again.end()


def test_rows_that_a_pull_cannot_read_are_lost_and_nothing_else(farm: Farm, tmp_path: Path) -> None:
    launcher = FarmLauncher(farm, 1, tier=Tier(tmp_path / "t", memory=7_000))
    cluster = FlightCluster(tables(), Adagrad(lr=0.1), launcher, pool=pool.Pool(1))
    push(cluster, np.random.default_rng(0), 12)
    damage(tmp_path / "t" / "shard-0")
    with pytest.raises(ShardLostError):
        cluster.pull(wanted_of(cluster, {"fixed": list(range(40)), "wide": list(range(30))}))
    cluster.renew(0)
    cluster.serve(0)
    assert cluster.touched_ids("fixed").size == 0
    push(cluster, np.random.default_rng(0), 12)
    cluster.close()
    launcher.end()


def test_a_shard_of_this_process_comes_back_with_rows_of_the_version_alone(tmp_path: Path) -> None:
    """Its file has a batch of an earlier run of the same tables."""
    table = Table("t", rows=20, dim=2, tier=Tier(tmp_path / "t", memory="1MB"))
    cluster = local(shards=2).open([table], SGD(lr=1.0), seed=0)

    def train(first: int, last: int) -> None:
        ids = list(range(first, last))
        grads = [np.ones((len(ids), 2), np.float32)]
        cluster.push(wanted_of(cluster, {"t": ids}), grads, lr=1.0)

    train(0, 10)
    for prepared in cluster.prepare_tiers(1):
        prepared.result()
    cluster.commit_tiers()
    cluster.clear()
    train(10, 15)
    repository = Repository.create(MemoryStore(), schema=cluster.schema())
    saver = Checkpointer(repository, cluster)
    saver.save(1)
    assert saver.wait() is not None
    cluster.kill(0)
    recover_partially(saver, Home(cluster, {"t": "t"}), [0])
    assert cluster.touched_ids("t").tolist() == [10, 11, 12, 13, 14]
    saver.close()
    cluster.close()


def test_use_of_tiers_on_servers_is_known(launcher: FarmLauncher, tmp_path: Path) -> None:
    run = Run(OnServers(launcher), tmp_path / "r", OFTEN)
    run.keeper.resume()
    run.train(3)
    use = run.keeper.tier_use()
    assert use is not None
    assert use.pulled > 0
    assert "tier_hit_rate" in run.keeper.metrics()
    launcher.kill(1)
    left = run.keeper.tier_use()  # does not find the server lost, which training will
    assert left is not None
    assert 0 < left.pulled < use.pulled
    assert run.cluster.lost() == ()
    run.end()
