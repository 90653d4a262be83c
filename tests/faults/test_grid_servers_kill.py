"""A server, a process of its own, is killed in the middle of a round of extraction."""

from __future__ import annotations

import signal
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec, load
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.repository import KeepAll, Repository, verify
from emberkeep.repository.grid.catalog import grid_of, newest_catalog
from emberkeep.repository.policies import Grid
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adagrad
from tests.contracts.cluster import push
from tests.contracts.engine import state, tables
from tests.servers import Farm, FarmLauncher
from tests.waiting import until

SHARDS = 2


def covered(repository: Repository) -> int:
    again = Repository.open(repository.store)
    grid = grid_of(again.manifest(again.versions()[-1]))
    assert grid is not None
    return newest_catalog(again, grid).covered


def moved(path: Path) -> set[str]:
    return {file.name for file in path.rglob("moved/*/*")}


@pytest.mark.parametrize("first", [False, True], ids=["alone", "after the other has prepared"])
def test_a_server_killed_in_a_round_takes_no_version_with_it(
    farm: Farm, tmp_path: Path, first: bool
) -> None:
    """The server stands still from before it hears of the round; the other prepares its part."""
    launcher = FarmLauncher(farm, SHARDS)
    cluster = FlightCluster(tables(), Adagrad(lr=0.1), launcher, seed=3, pool=Pool(1))
    repository = Repository.create(LocalStore(tmp_path / "r"), schema=cluster.schema())
    random, states, events = np.random.default_rng(1), dict[int, Any](), list[str]()
    stops = False

    def hear(name: str, _: Any) -> None:
        events.append(name)
        if name == "saved" and stops:  # the round begins after this
            launcher.signal(SHARDS - 1, signal.SIGSTOP)

    keeper = Checkpointer(
        repository, cluster, spec=VersionSpec(layout="grid", grid=Grid(ratio=0.1, resets=False)),
        settings=SaveSettings(retention=KeepAll(), grace=timedelta(0), nice=0), on_event=hear,
    )  # fmt: skip

    def save() -> None:
        push(cluster, random)
        keeper.save(1)
        manifest = keeper.wait()
        assert manifest is not None
        states[manifest.version.number] = None if stops else state(cluster)

    for _ in range(5):
        save()
        keeper.settle()
    before, files = covered(repository), moved(tmp_path / "r")
    assert before == 5
    stops = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save()
        if first:
            until(lambda: bool(moved(tmp_path / "r") - files), "the other server's part", 30)
        launcher.kill(SHARDS - 1)
        keeper.settle()
    assert "extraction_failed" in events
    assert covered(repository) == before
    stops = False
    # All go back to the newest version on what there is now, and the grid goes on.
    cluster.renew(*range(SHARDS))
    keeper.restore()
    cluster.serve(*range(SHARDS))
    states[6] = state(cluster)
    save()
    keeper.settle()
    assert covered(repository) == 7
    keeper.close()
    cluster.close()
    launcher.end()
    again = Repository.open(repository.store)
    assert verify(again).ok
    for version in again.versions():
        fresh = local(shards=1, threads=1).open(tables(), Adagrad(lr=0.1), seed=3)
        load(again, version, fresh, Pool(1))
        assert state(fresh) == states[version.number], version
