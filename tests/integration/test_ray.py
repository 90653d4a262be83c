"""Servers that Ray places: killed ones come back, and workers share them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import trustme
from typer.testing import CliRunner

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.cli import app
from emberkeep.cluster.remote.remote_tiers import RemoteTiers
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, IdError, SecurityError, ShardLostError
from emberkeep.repository import Repository
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.server.ray import local_ray
from emberkeep.server.ray.ray_cluster import RayLauncher, clusters, find, ray_cluster
from emberkeep.server.ray.ray_session import NAMESPACE
from emberkeep.server.ray.ray_workers import Mailbox, Place, WorkerGroup
from emberkeep.tables import SGD, Table, Tier
from emberkeep.train.distributed import run_on_ray
from emberkeep.train.run_config import demo
from emberkeep.wire.connection import Connection
from emberkeep.wire.security import Security
from tests.waiting import until

TOKEN = "a token of enough characters"


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, logging_level="error",
        log_to_driver=False, namespace=NAMESPACE,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.soak  # the next one is made again, too, and finds its files
def test_a_server_that_is_killed_is_made_again_by_ray() -> None:
    cluster = ray_cluster(shards=2, name="two").open(
        [Table("t", rows=40, dim=2)], SGD(lr=1.0), seed=0
    )
    assert clusters() == ["two"]
    assert len(find("two")) == 2
    ids = [RowIds(np.arange(40), np.array([0, 40]))]
    before = cluster.pull(ids)[0]
    cluster.push(ids, [np.ones((40, 2), np.float32)], lr=1.0)
    os.kill(cluster.launcher.pid(0), signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(ShardLostError):
        cluster.pull(ids)
    cluster.renew(0)
    cluster.serve(0)
    moved = (before - cluster.pull(ids)[0])[:, 0]
    assert np.allclose(moved, np.arange(40) % 2)  # the replacement is empty, the other went on
    cluster.close()
    assert clusters() == []


@pytest.mark.soak  # so do those of `cluster up`
def test_a_server_of_ray_comes_back_with_its_files(tmp_path: Path) -> None:
    table, optimizer = Table("t", rows=40, dim=2), SGD(lr=1.0)
    kept = ray_cluster(shards=2, tier=Tier(tmp_path / "t", memory="1MB"))
    cluster = kept.open([table], optimizer, seed=0)
    store = LocalStore(tmp_path / "r")
    run = Repository.create(store, schema=cluster.schema()).id
    tiers = RemoteTiers([cluster], store, run, SYSTEM_CLOCK)
    ids = [RowIds(np.arange(40), np.array([0, 40]))]
    cluster.push(ids, [np.ones((40, 2), np.float32)], lr=1.0)
    tiers.prepare(1)()
    tiers.commit()
    after = cluster.pull(ids)[0]
    os.kill(cluster.launcher.pid(0), signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(ShardLostError):
        cluster.pull(ids)
    assert tiers.renew(cluster, [0]) == ([0], [])
    tiers.serve(cluster, [0])
    assert np.array_equal(cluster.pull(ids)[0], after)
    cluster.close()


@pytest.mark.soak  # Ray's part is in the other tests, that of servers in test_cluster_flight
def test_rows_from_outside_go_to_servers_of_ray() -> None:
    bags = ek.EmbeddingBags(
        [Table("item", capacity=50, dim=2), Table("user", rows=40, dim=2)],
        optimizer=ek.Adagrad(lr=1.0), cluster=ek.ray_cluster(shards=2, name="upserted"),
    )  # fmt: skip
    assert clusters() == ["upserted"]
    assert len(find("upserted")) == 2
    ids = torch.tensor([7, -2, 2**40, 10])  # on both shards
    weights = torch.arange(8.0).reshape(4, 2)
    bags.upsert("item", ids, {"weight": weights, "accumulator": weights + 1})
    bags.upsert("user", [39, 0], torch.ones(2, 2))
    found = bags.rows("item", ids)
    assert torch.equal(found["weight"], weights)
    assert torch.equal(found["accumulator"], weights + 1)
    assert bags.touched_ids("item").tolist() == sorted(ids.tolist())
    with pytest.raises(IdError, match="id 40 is outside"):
        bags.upsert("user", [1, 40], torch.ones(2, 2))
    assert bags.touched_ids("user").tolist() == [0, 39]
    bags({"item": ids, "user": torch.tensor([1, 2, 3, 4])}).sum().backward()
    bags.optimizer.step()
    assert torch.allclose(bags.rows("item", ids)["accumulator"], weights + 2)
    assert bags.delete("item", [7, 8]) == 1
    assert bags.touched_ids("item").tolist() == [-2, 10, 2**40]
    bags.cluster.close()
    assert clusters() == []


@pytest.mark.soak  # Ray's part is the test before, that of parity is in test_parity_servers
def test_parity_brings_a_server_of_ray_back() -> None:
    with pytest.warns(UserWarning, match="share 1 node: a node that dies takes 3"):
        cluster = ray_cluster(shards=3, parity=Parity(k=2, r=1)).open(
            [Table("t", rows=40, dim=2)], SGD(lr=1.0), seed=0
        )
    ids = [RowIds(np.arange(40), np.array([0, 40]))]
    before = cluster.pull(ids)[0]
    cluster.push(ids, [np.ones((40, 2), np.float32)], lr=1.0)
    os.kill(cluster.launcher.pid(1), signal.SIGKILL)  # type: ignore[attr-defined]
    assert np.array_equal(cluster.pull(ids)[0], before - 1)
    assert cluster.parity is not None
    assert cluster.parity.recoveries == 1
    cluster.close()


def test_clusters_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="shards="):
        ray_cluster()
    with pytest.raises(ConfigError, match="no cluster 'nowhere'"):
        ray_cluster(name="nowhere").open([Table("t", rows=4, dim=2)], SGD(lr=1.0), seed=0)


@pytest.mark.soak  # a minute, nearly all of it Ray's own; two workers alone: see test_workers
def test_workers_on_ray_end_with_one_model_though_a_server_is_killed(tmp_path: Path) -> None:
    given = demo([
        "data.samples=4000", "data.rows_total=1000", "run.batch_size=100", "run.compare=false",
        "model.bottom=[8]", "model.top=[8]", "tables.dim=4", "cluster.kind=ray", "cluster.shards=2",
        "cluster.workers=2", "cluster.name=trained", f"checkpoint.path={tmp_path / 'r'}",
        "checkpoint.every=10 steps", "checkpoint.recovery=partial",
    ])  # fmt: skip
    killed = threading.Thread(target=_kill_once_a_version_is_there, args=(tmp_path / "r",))
    killed.start()
    result = run_on_ray(given)
    killed.join()
    assert result.steps == 36
    assert result.recoveries is not None
    assert (result.recoveries.failures, result.recoveries.partial) == (1, 1)
    assert 0 < result.recoveries.pls <= 0.5
    assert 0 < result.auc < 1
    assert clusters() == []


def _kill_once_a_version_is_there(where: Path) -> None:
    until(lambda: len(list(where.glob("versions/*"))) >= 2, "two versions", seconds=120)
    os.kill(RayLauncher(find("trained")).pid(0), signal.SIGKILL)


def test_the_command_brings_servers_up_shows_them_and_takes_them_down(tmp_path: Path) -> None:
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
    statuses = json.loads(run.invoke(app, ["cluster", "status", *at, "--json"]).stdout)["shards"]
    assert all('"listening"' in Path(status["log"]).read_text() for status in statuses)
    assert all(status["metrics_url"].startswith("http://127.0.0.1:") for status in statuses)
    assert clusters() == ["shown"]
    assert len(find("shown")) == 2
    wants = ["cluster.kind=ray", "cluster.name=shown", f"tier.path={tmp_path}"]
    with pytest.raises(ConfigError, match="'shown' is up without a tier, and this run wants one"):
        run_on_ray(demo([*wants, "cluster.workers=2", "cluster.shards=2"]))
    # Not from under a run, and it says whose.
    cluster = ray_cluster(name="shown").open([Table("t", rows=4, dim=2)], SGD(lr=1.0), seed=0)
    refused = run.invoke(app, ["cluster", "down", *at])
    assert refused.exit_code == ConfigError.exit_code
    assert f"serves a run (process {os.getpid()} on " in refused.output
    cluster.close()
    assert run.invoke(app, ["cluster", "down", *at]).exit_code == 0
    assert clusters() == []
    twice = run.invoke(app, ["cluster", "down", *at])
    assert twice.exit_code == ConfigError.exit_code
    assert "no cluster 'shown'" in twice.output


def test_servers_that_are_up_keep_their_tier_show_it_and_refuse_another(tmp_path: Path) -> None:
    run = CliRunner()
    at = ["--name", "kept", "--address", "here"]  # Ray is connected already
    path = str(tmp_path / "t")
    tier = ["--tier", path, "--tier-memory", "1MB"]
    made = run.invoke(app, ["cluster", "up", "--shards", "2", *at, *tier])
    assert made.exit_code == 0, made.output
    table, optimizer = Table("t", rows=40, dim=2), SGD(lr=1.0)
    with pytest.raises(ConfigError, match=f"'kept' has its tier in {path}, and this run wants"):
        ray_cluster(name="kept", tier=Tier(tmp_path / "u", memory="1MB")).open(
            [table], optimizer, seed=0
        )
    pids = [RayLauncher(find("kept")).pid(shard) for shard in range(2)]
    with pytest.warns(UserWarning, match="for the hot rows of its tier, not 0.002"):
        cluster = ray_cluster(name="kept", tier=Tier(path, memory="2MB")).open(
            [table], optimizer, seed=0
        )
    store = LocalStore(tmp_path / "r")
    repository = Repository.create(store, schema=cluster.schema()).id
    tiers = RemoteTiers([cluster], store, repository, SYSTEM_CLOCK)
    ids = [RowIds(np.arange(40), np.array([0, 40]))]
    for _ in range(2):
        cluster.pull(ids)
        cluster.push(ids, [np.ones((40, 2), np.float32)], lr=1.0)
    tiers.prepare(1)()
    tiers.commit()
    after = cluster.pull(ids)[0]
    use = json.loads(run.invoke(app, ["cluster", "status", *at, "--json"]).stdout)["shards"]
    assert [status["tier"]["path"] for status in use] == [path, path]
    rates = [f"{status['tier']['use']['hit_rate']:.1%}" for status in use]
    shown = run.invoke(app, ["cluster", "status", *at]).stdout
    assert all(f"tier {rate}" in shown for rate in rates), shown
    assert shown.count("batch 1 is durable") == 2

    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(ShardLostError):
        cluster.pull(ids)
    assert tiers.renew(cluster, [0]) == ([0], [])
    tiers.serve(cluster, [0])
    assert np.array_equal(cluster.pull(ids)[0], after)
    shown = run.invoke(app, ["cluster", "status", *at]).stdout
    assert shown.count("batch 1 is durable") == 2
    assert shown.count(f"keeps its rows in {path}, 1MB of them in memory") == 2
    cluster.close()
    assert run.invoke(app, ["cluster", "down", *at]).exit_code == 0


def test_workers_are_heard_asked_to_stop_and_their_death_is_reported() -> None:
    def work(given: dict[str, Any], place: Place, mailbox: Mailbox) -> dict[str, Any]:
        """Sends word, and ends as it was asked to."""
        asked = threading.Event()
        mailbox.on_ask(lambda _: asked.set())
        mailbox.send(("rank", place.rank))
        if given["fails"] == place.rank:
            raise ShardLostError([3])
        assert place.rank or asked.wait(120)
        return {"world": place.world}

    group = WorkerGroup(work, {"fails": None}, workers=2, cpus=0.1)
    messages = heard(group, 1)
    assert messages == [("rank", 0)]
    group.ask_to_stop(15)
    heard(group)
    assert group.result == {"world": 2}
    assert not group.failures

    group = WorkerGroup(work, {"fails": 1}, workers=2, cpus=0.1)
    heard(group)  # rank 0 does not end by itself: it is ended
    assert [(one.rank, type(one.error)) for one in group.failures] == [(1, ShardLostError)]
    assert "shard 3 lost" in group.failures[0].reason

    group = WorkerGroup(work, {"fails": None}, workers=1, cpus=0.1)
    heard(group, 1)
    os.kill(group._pids[0], signal.SIGKILL)
    heard(group)
    assert [one.died for one in group.failures] == [True]
    assert str(group._pids[0]) in group.failures[0].reason


def heard(group: WorkerGroup, least: int | None = None) -> list[Any]:
    """So many messages, or all until the group has ended."""
    messages: list[Any] = []
    until = time.monotonic() + 120
    while not group.ended and (least is None or len(messages) < least):
        assert time.monotonic() < until
        messages += group.poll(0.1)
    return messages


def test_with_a_certificate_and_a_token_servers_listen_on_their_node() -> None:
    authority = trustme.CA()
    own = authority.issue_cert(ray.util.get_node_ip_address())
    security = Security(
        token=TOKEN, certificate=own.cert_chain_pems[0].bytes(),
        key=own.private_key_pem.bytes(), authority=authority.cert_pem.bytes(),
    )  # fmt: skip
    cluster = ray_cluster(shards=1, name="safe", security=security).open(
        [Table("t", rows=4, dim=2)], SGD(lr=1.0), seed=0
    )
    address = cluster.handles[0].address
    assert address.startswith(f"grpc+tls://{ray.util.get_node_ip_address()}:")
    assert cluster.pull([RowIds(np.arange(4), np.array([0, 4]))])[0].shape == (4, 2)
    assert RayLauncher(find("safe")).security().token == TOKEN  # who finds them may talk to them
    for known, refusal in (
        (replace(security, token="another of enough characters"), SecurityError),
        (Security(token=TOKEN), SecurityError),  # knows nobody who vouches for the certificate
    ):
        stranger = Connection(address, known.of_client())
        with pytest.raises(refusal):
            stranger.act("status", deadline=timedelta(seconds=60))
        stranger.close()
    cluster.close()


def test_several_nodes_demand_tls_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}])
    with pytest.raises(SecurityError, match="2 nodes"):
        ray_cluster(shards=1).open([Table("t", rows=4, dim=2)], SGD(lr=1.0), seed=0)


def test_a_ray_that_is_started_here_has_a_token_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (tmp_path / "emberkeep").mkdir()
    assert local_ray._new_token() == {}  # its user has decided
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")
    token = Path(local_ray._new_token()["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(local_ray, "local_address", lambda: "127.0.0.1:6379")
    local_ray.bring_token("127.0.0.1:1")
    assert "RAY_AUTH_MODE" not in os.environ
    local_ray.bring_token("127.0.0.1:6379")
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token)


@pytest.mark.soak
def test_commands_share_a_ray_that_one_of_them_has_started(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    environment = {k: v for k, v in environment.items() if not k.startswith("RAY_")}

    def emberkeep(*words: str) -> str:
        made = subprocess.run(
            [sys.executable, "-m", "emberkeep.cli", "cluster", *words],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        return made.stdout

    emberkeep("up", "--shards", "2")
    try:
        assert emberkeep("status").count("empty") == 2
    finally:
        emberkeep("down")
    left = [path.name for path in (tmp_path / "emberkeep").iterdir()]
    assert left == ["logs"]  # neither address nor token
