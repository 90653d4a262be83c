"""How many calls a resume from an object store makes one after another; see `critical_path`."""

from __future__ import annotations

import numpy as np
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.repository.policies import Grid
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.strategies import Every, Strategy
from tests.contracts.engine import state
from tests.contracts.layout import opened, started, train
from tests.critical_path import CountedCalls

VERSIONS = 6


def saver(store: CountedCalls, cluster: LocalCluster) -> RepositorySaver:
    strategy = Strategy(spec=VersionSpec(), schedule=Every(steps=10**9))
    return RepositorySaver(
        store, cluster, strategy, about={}, settings=SaveSettings(), exclusive=False,
        must_exist=True, on_event=lambda *_: None, clock=SYSTEM_CLOCK, beside=True,
    )  # fmt: skip


@pytest.mark.parametrize("number", [None, VERSIONS, 3])
def test_few_calls_of_a_resume_wait_for_each_other(number: int | None) -> None:
    inner, cluster, random = MemoryStore(), opened(), np.random.default_rng(0)
    keeper = started(cluster, inner, spec=VersionSpec(layout="grid", grid=Grid(resets=False)))
    states = {}
    for step in range(1, VERSIONS + 1):
        train(cluster, random, steps=2)
        states[step] = state(cluster)
        keeper.save(step)
        keeper.wait()
    keeper.settle()
    keeper.close()
    store, fresh = CountedCalls(inner), opened()
    with store.counting():
        resumed = saver(store, fresh)
        # repository.json and listings; claim.
        assert store.time == 2
        resumed.restore(number)
        first_row = min(time for time, _, name in store.calls if name.endswith(".grid"))
        # The manifest, then rows.
        assert first_row == 4
        # Beside them: the seal, listings, a claim of its own; and the count of restores.
        assert store.time <= 6
    resumed.close()
    assert state(fresh) == states[number or VERSIONS]
