"""Servers on a Ray of several nodes, which are simulated on this machine: where they go, where
they return to, and what is left when a node, a driver or a server dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import trustme

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.cluster.remote.remote_tiers import RemoteTiers
from emberkeep.errors import ConfigError, ShardLostError
from emberkeep.repository import Repository
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.server.ray.ray_cluster import RayLauncher, clusters, find, ray_cluster, start, stop
from emberkeep.server.ray.ray_session import NAMESPACE
from emberkeep.server.ray.server_resources import DISK, ServerResources
from emberkeep.tables import SGD, Table, Tier
from emberkeep.wire.security import Security
from tests.integration.test_tiered_keeper import SHARDS, TABLES, TOTAL, Run, rows_at
from tests.servers import ROOT
from tests.waiting import until

pytestmark = pytest.mark.soak
MB, GB = 10**6, 10**9
TABLE, OPTIMIZER = Table("t", rows=40, dim=2), SGD(lr=1.0)
IDS = [RowIds(np.arange(40), np.array([0, 40]))]
SMALL_STORE = 80 * 2**20


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without room, and two nodes for two servers each."""
    from ray.cluster_utils import Cluster

    given = {"object_store_memory": SMALL_STORE, "include_dashboard": False}
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "memory": 100 * MB, **given}
    )
    for _ in range(2):
        made.add_node(
            num_cpus=2, memory=1500 * MB, resources={DISK: 100}, object_store_memory=SMALL_STORE
        )
    ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def security(nodes: Any) -> Security:
    authority = trustme.CA()
    own = authority.issue_cert(ray.util.get_node_ip_address())
    return Security(
        token="a token of enough characters", certificate=own.cert_chain_pems[0].bytes(),
        key=own.private_key_pem.bytes(), authority=authority.cert_pem.bytes(),
    )  # fmt: skip


def node_of(launcher: RayLauncher, shard: int) -> str:
    return str(launcher._ask("node", shard, 60.0))


def test_servers_go_where_memory_is_and_no_further(nodes: Any, security: Security) -> None:
    with pytest.raises(ConfigError, match=r"room for 4 of 5 servers that take 0\.1 cpus, 0\.7 GB"):
        ray_cluster(shards=5, memory="700MB", security=security).open([TABLE], OPTIMIZER, seed=0)
    large = Table("large", rows=8_000_000, dim=64)  # 0.7 GB of rows on each, beside the process
    with pytest.raises(ConfigError, match="room for 2 of 3 servers"):
        ray_cluster(shards=3, security=security).open([large], OPTIMIZER, seed=0)
    cluster = ray_cluster(shards=4, memory="700MB", security=security).open(
        [TABLE], OPTIMIZER, seed=0
    )
    held = Counter(node_of(cluster.launcher, shard) for shard in range(4))  # type: ignore[arg-type]
    assert sorted(held.values()) == [2, 2]
    cluster.close()
    assert clusters() == []


def test_a_server_returns_to_the_node_of_its_files_and_elsewhere_if_that_is_gone(
    nodes: Any, security: Security, tmp_path: Path
) -> None:
    extra = nodes.add_node(
        num_cpus=2, memory=1500 * MB, resources={DISK: 300}, object_store_memory=SMALL_STORE
    )
    nodes.wait_for_nodes()
    kept = ray_cluster(
        shards=3, tier=Tier(tmp_path / "t", memory="1MB"), memory="300MB", disk="90GB",
        security=security,
    )  # fmt: skip
    cluster = kept.open([TABLE], OPTIMIZER, seed=0)
    launcher: Any = cluster.launcher
    places = [node_of(launcher, shard) for shard in range(3)]
    assert len({*places}) == 3
    store = LocalStore(tmp_path / "r")
    run = Repository.create(store, schema=cluster.schema()).id
    tiers = RemoteTiers([cluster], store, run, SYSTEM_CLOCK)
    cluster.push(IDS, [np.ones((40, 2), np.float32)], lr=1.0)
    tiers.prepare(1)()
    tiers.commit()
    after = cluster.pull(IDS)[0]
    shard = places.index(extra.node_id)
    os.kill(launcher.pid(shard), signal.SIGKILL)
    with pytest.raises(ShardLostError):
        cluster.pull(IDS)
    assert tiers.renew(cluster, [shard]) == ([shard], [])
    tiers.serve(cluster, [shard])
    assert node_of(launcher, shard) == places[shard]
    assert np.array_equal(cluster.pull(IDS)[0], after)
    # The node goes, its raylet without a word.
    pid = launcher.pid(shard)
    nodes.remove_node(extra, allow_graceful=False)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the server of a dead raylet to end", 60)
    with pytest.raises(ShardLostError):
        cluster.pull(IDS)
    # Here all nodes share a disk, so that its files are there all the same; it is a node's room
    # that is missing: 90 GB of disk are left nowhere, so Ray waits until there is a node again.
    fresh = nodes.add_node(
        num_cpus=2, memory=1500 * MB, resources={DISK: 300}, object_store_memory=SMALL_STORE
    )
    tiers.renew(cluster, [shard])
    tiers.serve(cluster, [shard])
    assert node_of(launcher, shard) == fresh.node_id
    assert np.array_equal(cluster.pull(IDS)[0], after)
    cluster.close()
    nodes.remove_node(fresh)


@pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")
def test_what_a_node_has_taken_with_it_comes_from_the_repository(
    nodes: Any, security: Security, tmp_path: Path
) -> None:
    room = {
        "num_cpus": 2, "memory": 1500 * MB, "resources": {DISK: 300},
        "object_store_memory": SMALL_STORE,
    }  # fmt: skip
    extra = nodes.add_node(**room)
    nodes.wait_for_nodes()
    kept = ray_cluster(
        shards=SHARDS, tier=Tier(tmp_path / "t", memory="1MB"), memory="300MB", disk="90GB",
        security=security,
    )  # fmt: skip
    run = Run(kept, tmp_path / "r", ek.tiered(every=2, remote=4, recovery="partial"))
    run.keeper.resume()
    run.train(7)  # batch 6, and a version of step 4
    launcher = run.cluster.launcher
    shard = [node_of(launcher, shard) for shard in range(SHARDS)].index(extra.node_id)
    pid = launcher.pid(shard)
    nodes.remove_node(extra, allow_graceful=False)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the server of a dead raylet to end", 60)
    shutil.rmtree(tmp_path / "t" / f"shard-{shard}")
    fresh = nodes.add_node(**room)
    with pytest.raises(ShardLostError):
        run.cluster.handles[shard].digest("a")
    made = run.keeper.recover(None)
    assert made is not None
    assert (made.scope, made.shards) == ("partial", (shard,))
    assert node_of(launcher, shard) == fresh.node_id
    handle = run.cluster.handles[shard]
    assert {t.name: str(handle.digest(t.name)) for t in TABLES} == rows_at(shard, 4)
    assert run.keeper.recoveries().pls == pytest.approx((7 - 4) / (TOTAL * SHARDS))
    run.train(1)
    assert run.keeper.steps == 8
    run.end()
    nodes.remove_node(fresh)


DRIVER = """
import sys, time
import numpy as np
import ray
from emberkeep.server.ray.ray_cluster import ray_cluster
from tests.integration.test_ray_nodes import IDS, OPTIMIZER, TABLE
ray.init(address=sys.argv[1], namespace="emberkeep", log_to_driver=False, logging_level="error")
security = __import__("pickle").load(open(sys.argv[3], "rb"))
cluster = ray_cluster(shards=2, name=sys.argv[2], memory="300MB", security=security,
                      on_restart="adopt").open([TABLE], OPTIMIZER, seed=0)
cluster.tell(repository="r")
cluster.push(IDS, [np.ones((40, 2), np.float32)], lr=1.0)
while not all(shard.status()["run"]["repository"] for shard in cluster.handles):
    time.sleep(0.01)  # a renewal of the leases carries it
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("up", [False, True], ids=["its own servers", "servers that are up"])
def test_a_driver_that_ends_leaves_its_own_servers_to_nobody_and_others_to_the_next(
    nodes: Any, security: Security, tmp_path: Path, ends: signal.Signals, up: bool
) -> None:
    import pickle

    (tmp_path / "s").write_bytes(pickle.dumps(security))
    name = f"driven-{ends.name.lower()}-{up}"
    resources = ServerResources(cpus=0.1, memory=300 * MB)
    if up:
        start(2, name=name, resources=resources, threads=None, security=security, detached=True)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, nodes.address, name, str(tmp_path / "s")],
        stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == b"ready"
    pids = [RayLauncher(find(name)).pid(shard) for shard in range(2)]
    driver.send_signal(ends)
    driver.wait(60)
    driver.stdout.close()
    if not up:
        until(lambda: not find(name), "Ray to end the servers of a dead driver", 60)
        until(lambda: not any(os.path.exists(f"/proc/{p}") for p in pids), "their processes", 60)
        return
    assert [RayLauncher(find(name)).pid(shard) for shard in range(2)] == pids
    found = ray_cluster(name=name, on_restart="adopt").open([TABLE], OPTIMIZER, seed=0)
    assert found.adopted == "r"
    assert found.touched_ids("t").size == 40
    found.close()
    stop(name)
    until(lambda: not any(os.path.exists(f"/proc/{p}") for p in pids), "servers to end", 60)
