"""Servers of `ek.servers` and `emberkeep serve`: their logs, metrics and status, as an operator
finds them."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.cli import app
from emberkeep.cluster.remote import processes
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import ConfigError, SecurityError, ServerError
from emberkeep.runtime.event_log import EventLog
from emberkeep.server.flight_server import ShardServer
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import SGD, Table
from emberkeep.wire.connection import Connection
from emberkeep.wire.security import Security

IDS = [RowIds(np.arange(30), np.array([0, 30]))]


def events_of(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlightCluster]:
    """One server, a process of its own."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    opened = ek.servers(shards=1, spares=0).open([Table("t", rows=30, dim=2)], SGD(lr=1.0), seed=0)
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before
    opened.pull(IDS)
    opened.push(IDS, [np.ones((30, 2), np.float32)], lr=1.0)
    yield opened
    opened.close()


def test_a_child_logs_to_the_file_that_its_status_names(cluster: FlightCluster) -> None:
    status = cluster.handles[0].status()
    log = status["log"]
    assert "/emberkeep/logs/" in log
    events = events_of(log)
    names = [event["event"] for event in events[:4]]
    assert "connected" in names  # said by another thread: its place among the others is open
    assert [name for name in names if name != "connected"] == ["listening", "admitted", "serving"]
    admitted = events[names.index("admitted")]
    assert events[0]["log"] == log
    assert admitted["trainer"].endswith(f"/{os.getpid()}")
    assert status["pid"] == events[0]["pid"] != os.getpid()
    assert (status["rows"], status["run"]["step"]) == (30, 1)


def test_a_child_has_metrics_health_and_readiness(cluster: FlightCluster) -> None:
    page = cluster.handles[0].status()["metrics_url"]
    with urllib.request.urlopen(page, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert found["emberkeep_rows"] == 30
    assert found["emberkeep_streams"] >= 1
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(page.replace("metrics", path), timeout=60) as answer:
            assert answer.status == 200


def test_cluster_status_needs_no_ray(cluster: FlightCluster) -> None:
    address = cluster.launcher.address(0)
    token = ["--token-file", str(cluster.launcher.token_file)]  # type: ignore[attr-defined]
    shown = CliRunner().invoke(app, ["cluster", "status", "--connect", address, *token])
    assert shown.exit_code == 0, shown.output
    header, line, *below = shown.stdout.splitlines()
    assert header.split()[:5] == ["shard", "state", "node", "pid", "memory"]
    assert "serving" in line
    assert str(cluster.launcher.pid(0)) in line  # type: ignore[attr-defined]
    assert below[0].startswith(f"run {cluster._coordinator[:8]}; trained by")
    assert below[1].startswith("logs on ")
    asked = f"{address}, grpc+tcp://127.0.0.1:1"
    both = CliRunner().invoke(app, ["cluster", "status", "--connect", asked, *token, "--json"])
    assert both.exit_code == ServerError.exit_code
    first, second = json.loads(both.stdout)["shards"]
    assert first["rows_per_second"] == 0
    assert first["run"]["step"] == 1
    assert second["state"] == "lost"
    assert "127.0.0.1:1" in second["error"]
    nothing = CliRunner().invoke(app, ["cluster", "status", "--connect", ","])
    assert nothing.exit_code == ConfigError.exit_code


def test_a_server_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    script = "import sys; sys.exit('emberkeep: the disk is on fire')"
    monkeypatch.setattr(processes.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec python3 -c "{script}"\n')
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ServerError, match="before it was ready: emberkeep: the disk is on fire"):
        processes.ProcessLauncher(1, spares=0)


def test_where_nothing_can_be_kept_servers_start_without_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "emberkeep").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="servers keep no logs: .*set XDG_STATE_HOME"):
        assert processes._log_directory(processes.SYSTEM_CLOCK, "token") is None


def test_refused_tokens_are_counted_and_logged(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "server.log")
    served = ShardService(threads=1, on_event=log)
    server = ShardServer(served, security=Security(token="one of enough characters"))
    stranger = Connection(server.address, Security(token="another of enough characters"))
    for _ in range(3):
        with pytest.raises(SecurityError):
            stranger.act("status", deadline=timedelta(seconds=60))
    stranger.close()
    assert served.events.refused_tokens == 3
    assert [event["refused"] for event in events_of(str(tmp_path / "server.log"))] == [1, 2, 3]
    server.shutdown()
    log.close()


def test_a_released_server_shows_no_negative_rate(cluster: FlightCluster) -> None:
    """Last: it ends the run. The counts of a server outlive it."""
    address = cluster.launcher.address(0)
    token = ["--token-file", str(cluster.launcher.token_file)]  # type: ignore[attr-defined]
    cluster._let_go()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        shown = CliRunner().invoke(
            app, ["cluster", "status", "--connect", address, *token, "--json"]
        )
        (status,) = json.loads(shown.stdout)["shards"]
        if status["state"] == "empty":
            break
    assert status["rows_per_second"] == 0
    assert status["metrics"]["rows_pulled"] == 30
    assert status["last_event"]["event"] == "released"
