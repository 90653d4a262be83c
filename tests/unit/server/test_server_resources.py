"""What servers take of the nodes that Ray places them on."""

from __future__ import annotations

from typing import Any

import pytest

from emberkeep.config import parse
from emberkeep.errors import ConfigError
from emberkeep.server.ray.ray_cluster import ray_cluster
from emberkeep.server.ray.server_resources import (
    DISK,
    ServerResources,
    check_tier_of,
    needed_memory,
)
from emberkeep.tables import Adagrad, Table, Tier
from emberkeep.train.distributed import _resources
from emberkeep.train.run_config import RunConfig, demo

GB = 10**9


def node(name: str, memory: float, disk: float = 0.0, *, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 8.0, "memory": memory * GB, **({DISK: disk} if disk else {})}
    return {"NodeID": name, "Alive": alive, "Resources": resources}


def test_memory_is_that_of_all_rows_of_the_largest_server() -> None:
    table = Table("t", rows=10_000_001, dim=64)
    rows = 2_500_001 * 2 * 4 * 64  # weight and accumulator
    memory = needed_memory([table], Adagrad(lr=0.1), 4, None)
    assert rows < memory < rows + 0.3 * GB
    tier = Tier("/nvme", memory="2GB")
    assert 2 * GB < needed_memory([table], Adagrad(lr=0.1), 4, tier) < 2.4 * GB
    dynamic = Table("d", capacity=10_000_000, dim=64)
    assert needed_memory([dynamic], Adagrad(lr=0.1), 4, None) > memory


def test_a_run_of_several_workers_sets_aside_what_its_settings_know() -> None:
    given = ["cluster.kind=ray", "cluster.workers=2", "cluster.shards=2", "tables.dim=64"]
    synthetic = [*given, "data.rows_total=40_000_000"]
    rows = 20_000_000 * 2 * 4 * 64  # weight and accumulator
    memory = _resources(demo([*synthetic, "optimizer.kind=adagrad"])).memory
    assert rows < memory < rows + 0.4 * GB
    tiered = _resources(demo([*synthetic, "tier.path=/nvme", "tier.memory=2GB"])).memory
    assert 2 * GB + 20_000_000 * 8 < tiered < 2.8 * GB
    of_files = parse(RunConfig, "", source="a test", overrides=[
        *given, "data.source=criteo", "data.paths=['day_0']", "tables.kind=dynamic",
        "tables.capacity=1_000_000",
    ])  # fmt: skip
    assert _resources(of_files).memory > 26 * 500_000 * 4 * 64
    assert _resources(demo([*synthetic, "cluster.memory=3GB"])).memory == 3 * GB


@pytest.mark.parametrize(
    ("has", "complaint"),
    [
        (None, r"'c' is up without a tier, .* in /nvme/run; nothing was changed: end it"),
        (
            Tier("/data/run", memory="2GB"),
            r"'c' has its tier in /data/run, and this run wants one in /nvme/run; nothing was",
        ),
    ],
)
def test_a_tier_that_servers_do_not_have_is_refused(has: Tier | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_tier_of("c", has, Tier("/nvme/run", memory="2GB"))


def test_other_memory_of_a_tier_is_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    has = Tier("/nvme/run", memory="2GB")
    check_tier_of("c", has, has)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="'c' has 2 GB for the hot rows of its tier, not 48 GB"):
        check_tier_of("c", has, Tier("/nvme/run", memory="48GB"))


def test_servers_go_where_there_is_room() -> None:
    need = ServerResources(cpus=0.1, memory=10 * GB)
    nodes = [node("a", 64), node("b", 24), node("c", 64, alive=False)]
    assert need.homes(4, nodes) == ["a", "b", "a", "b"]
    assert sorted(need.homes(8, nodes)).count("b") == 2
    with pytest.raises(ConfigError, match=r"room for 8 of 9 servers that take 0.1 cpus, 10 GB of"):
        need.homes(9, nodes)
    assert ServerResources(cpus=0.1).homes(3, nodes) == ["a", "b", "a"]


def test_disk_is_counted_where_it_is_given() -> None:
    need = ServerResources(cpus=0.1, memory=GB, disk=500 * GB)
    assert need.homes(3, [node("a", 64, 900), node("b", 64, 1000)]) == ["a", "b", "b"]
    assert need.options() == {"num_cpus": 0.1, "memory": GB, "resources": {DISK: 500.0}}
    with pytest.raises(ConfigError, match="ray start --resources"):
        need.homes(1, [node("a", 64)])


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory takes bytes or a text"):
        ray_cluster(shards=2, memory="much")
    with pytest.raises(ConfigError, match="disk= is for servers with a tier"):
        ray_cluster(shards=2, disk="1TB")
