"""A trainer's metrics, health and readiness, and what it says of itself to its servers."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import emberkeep as ek
from emberkeep.errors import ConfigError
from emberkeep.runtime.metrics import MetricsServer
from tests.integration.test_recovery_events import Servers, bags_on, train


def test_recoveries_are_metrics_and_readiness_knows_lost_shards(tmp_path: Path) -> None:
    bags = bags_on(ek.local(shards=4, failures=[ek.fail_at(1, step=3)]))
    strategy = ek.parity(k=3, every=6)
    keeper = ek.Keeper(tmp_path, bags, bags.optimizer, strategy=strategy, metrics_port=0)
    with keeper:
        train(bags, keeper, 5)
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(keeper.metrics())
            for sample in family.samples
        }
        assert found["emberkeep_failures_total"] == 1
        assert found["emberkeep_recoveries_from_parity_total"] == 1
        assert found["emberkeep_recovery_seconds_total"] > 0
        page = f"http://127.0.0.1:{keeper.metrics_port}/readyz"
        assert urllib.request.urlopen(page, timeout=60).read() == b"ready\n"
        bags.cluster.kill(2)  # type: ignore[attr-defined]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(page, timeout=60)
        assert refused.value.read() == b"shards 2 are lost\n"
        train(bags, keeper, 6)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    taken = MetricsServer(lambda: "", 0)
    bags = bags_on(ek.local(shards=1))
    with pytest.raises(ConfigError, match=f"port {taken.port}: Address already in use"):
        ek.Keeper(tmp_path, bags, bags.optimizer, metrics_port=taken.port)
    taken.close()


def test_servers_know_the_name_of_the_run(tmp_path: Path) -> None:
    servers = Servers()
    bags = bags_on(servers)
    keeper = ek.Keeper(tmp_path / "nightly", bags, bags.optimizer, clock=servers.clock)
    servers.clock.sleep(10)  # it comes with the next renewal of the lease
    assert bags.cluster.handles[0].status()["run"]["name"] == "nightly"  # type: ignore[attr-defined]
    keeper.close(save=False)
    bags.cluster.close()
