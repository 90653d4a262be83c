"""Servers that Ray places: killed ones come back, and workers of Ray Train share them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from typer.testing import CliRunner

from emberkeep.cli import app
from emberkeep.cluster.ray import NAMESPACE, clusters, find, ray_cluster
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, ShardLostError
from emberkeep.slab import RowIds
from emberkeep.tables import SGD, Table


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, logging_level="error",
        log_to_driver=False, namespace=NAMESPACE,
    )  # fmt: skip
    yield
    ray.shutdown()


def test_a_server_that_is_killed_is_made_again_by_ray() -> None:
    cluster = ray_cluster(shards=2, name="two").open(
        [Table("t", rows=40, dim=2)], SGD(lr=1.0), seed=0
    )
    assert clusters() == ["two"]
    assert len(find("two")) == 2
    ids = [RowIds(np.arange(40), np.array([0, 40]))]
    before = cluster.pull(ids)[0]
    cluster.push(ids, [np.ones((40, 2), np.float32)], lr=1.0)
    os.kill(cluster.hosts.pid(0), signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(ShardLostError):
        cluster.pull(ids)
    cluster.renew(0)
    cluster.serve(0)
    moved = (before - cluster.pull(ids)[0])[:, 0]
    assert np.allclose(moved, np.arange(40) % 2)  # the replacement is empty, the other went on
    cluster.close()
    assert clusters() == []


def test_parity_brings_a_server_of_ray_back() -> None:
    with pytest.warns(UserWarning, match="share 1 node: a node that dies takes 3"):
        cluster = ray_cluster(shards=3, parity=Parity(k=2, r=1)).open(
            [Table("t", rows=40, dim=2)], SGD(lr=1.0), seed=0
        )
    ids = [RowIds(np.arange(40), np.array([0, 40]))]
    before = cluster.pull(ids)[0]
    cluster.push(ids, [np.ones((40, 2), np.float32)], lr=1.0)
    os.kill(cluster.hosts.pid(1), signal.SIGKILL)  # type: ignore[attr-defined]
    assert np.array_equal(cluster.pull(ids)[0], before - 1)
    assert cluster.parity is not None
    assert cluster.parity.recoveries == 1
    cluster.close()


def test_clusters_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="shards="):
        ray_cluster()
    with pytest.raises(ConfigError, match="no cluster 'nowhere'"):
        ray_cluster(name="nowhere").open([Table("t", rows=4, dim=2)], SGD(lr=1.0), seed=0)


def test_the_command_brings_servers_up_shows_them_and_takes_them_down() -> None:
    run = CliRunner()
    at = ["--name", "shown", "--address", "here"]  # Ray is connected already
    made = run.invoke(app, ["cluster", "up", "--shards", "2", *at, "--json"])
    assert made.exit_code == 0, made.output
    assert len(json.loads(made.stdout)["addresses"]) == 2
    again = run.invoke(app, ["cluster", "up", "--shards", "2", *at])
    assert again.exit_code == ConfigError.exit_code
    assert "is up already" in again.output
    shown = run.invoke(app, ["cluster", "status", *at])
    assert shown.stdout.count("empty") == 2
    assert run.invoke(app, ["cluster", "down", *at]).exit_code == 0
    twice = run.invoke(app, ["cluster", "down", *at])
    assert twice.exit_code == ConfigError.exit_code
    assert "no cluster 'shown'" in twice.output
