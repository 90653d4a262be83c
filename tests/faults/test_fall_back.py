"""Damage of one version is no reason to lose another: what is intact is found and comes back."""

from __future__ import annotations

from typing import Any

import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import DamageError, NoVersionError
from emberkeep.repository import Repository, newest_undamaged
from emberkeep.repository.policies import LAYOUTS
from emberkeep.tables import Adam
from tests.nightly import checkered
from tests.unit.repositories import KEEP, TABLES, Run


def saved(layout: Any, *, settled: bool) -> Run:
    run = Run(layout=layout)
    for _ in range(4):
        run.save()
        if settled:
            run.keeper.settle()
    run.keeper.close()
    return run


def opened(store: MemoryStore) -> tuple[LocalCluster, Checkpointer]:
    cluster = local(shards=2, threads=1).open(TABLES, Adam(lr=0.05, step="row"), seed=3)
    return cluster, Checkpointer(Repository.open(store), cluster, settings=KEEP)


def check(run: Run, cluster: LocalCluster, number: int) -> None:
    for name, (ids, planes) in run.states[number].items():
        found, values = cluster.read_all(name)
        assert found.tobytes() == ids.tobytes()
        assert {n: v.tobytes() for n, v in values.items()} == {
            n: v.tobytes() for n, v in planes.items()
        }


@pytest.mark.parametrize(("layout", "how"), checkered(LAYOUTS, ["damaged", "deleted"]))
def test_the_newest_intact_version_comes_back(layout: Any, how: str) -> None:
    """Whichever manifest is gone, those who do not build on it are as they were."""
    for gone in (4, 3, 2, 1):
        run = saved(layout, settled=gone % 2 == 0)
        store = run.store
        name = run.repository.version(gone).manifest_name
        if how == "damaged":
            store.put(name, b"garbage")
        else:
            store.delete([name])
        repository = Repository.open(store)
        intact = newest_undamaged(repository)[0]
        assert intact is not None or (gone == 1 and layout not in ("full", "grid"))
        cluster, keeper = opened(store)
        if intact is None:
            with pytest.raises((DamageError, NoVersionError)):
                keeper.restore(fall_back=True)
            keeper.close()
            continue
        assert intact.number >= gone - 1
        restored = keeper.restore(fall_back=True)
        assert restored is not None
        assert restored.manifest.version == intact
        check(run, cluster, intact.number)
        keeper.close()
        # Asked for by its number it comes back as well.
        cluster, keeper = opened(store)
        assert keeper.restore(intact.number) is not None
        check(run, cluster, intact.number)
        keeper.close()
