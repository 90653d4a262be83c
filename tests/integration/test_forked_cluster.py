"""A cluster in a forked child."""

from __future__ import annotations

import multiprocessing

import numpy as np

from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.runtime.pool import Pool
from emberkeep.tables import SGD, Table
from tests.contracts.engine import wanted_of


def _in_child(cluster: LocalCluster, results: multiprocessing.Queue[bytes]) -> None:
    ids = wanted_of(cluster, {"t": list(range(3000))})
    cluster.push(ids, [np.ones((3000, 8), np.float32)], lr=0.5)
    results.put(cluster.pull(ids)[0].tobytes())


def test_a_forked_child_works_on_its_own_copy() -> None:
    cluster = LocalCluster([Table("t", rows=3000, dim=8)], SGD(lr=1.0), pool=Pool(2))
    ids = wanted_of(cluster, {"t": list(range(3000))})
    cluster.push(ids, [np.ones((3000, 8), np.float32)], lr=0.5)  # the pool's threads are running
    before = cluster.pull(ids)[0]
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[bytes] = context.Queue()
    child = context.Process(target=_in_child, args=(cluster, results))
    child.start()
    seen = results.get(timeout=60)
    child.join()
    assert seen == (before - np.float32(0.5)).tobytes()
    assert cluster.pull(ids)[0].tobytes() == before.tobytes()
