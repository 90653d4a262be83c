"""`emberkeep cluster up` and `down`, with Ray played: what they refuse, and what they leave."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from emberkeep.cli import app
from emberkeep.erasure.codes import Parity
from emberkeep.server.ray import local_ray, ray_cluster, ray_session
from emberkeep.tables import Tier

GB = 10**9


class Played:
    """Notes what the command asks of Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.parity: Parity | None = None
        self.asked: dict[str, Any] = {}
        self.attached: str | None = None
        self.up = ["emberkeep"]
        note = self.done.append
        monkeypatch.setattr(local_ray, "start_local", lambda: note("start ray") or True)
        monkeypatch.setattr(local_ray, "stop_local", lambda: note("stop ray"))
        monkeypatch.setattr(ray_session, "disconnect", lambda: note("disconnect"))
        monkeypatch.setattr(ray_cluster, "ensure_ray", lambda _: None)
        monkeypatch.setattr(ray_cluster, "clusters", lambda: self.up)
        monkeypatch.setattr(ray_cluster, "find", lambda name: [name] if name in self.up else [])
        monkeypatch.setattr(ray_cluster, "start", self._start)
        monkeypatch.setattr(ray_cluster, "stop", self._stop)
        launcher = ray_cluster.RayLauncher
        monkeypatch.setattr(launcher, "address", lambda *_: "127.0.0.1:1")
        monkeypatch.setattr(launcher, "attached", lambda _: self.attached)
        monkeypatch.setattr(launcher, "_ask", lambda _, what, shard: f"node {shard // 2}")

    def _start(self, shards: int, *, parity: Parity | None, **more: Any) -> list[Any]:
        self.done.append("start")
        self.parity, self.asked = parity, more
        return [None] * shards

    def _stop(self, name: str) -> None:
        self.done.append("stop")
        self.up.remove(name)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Played:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return Played(monkeypatch)


def emberkeep(*words: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["cluster", *words])
    return ended.exit_code, ended.output


def test_down_is_refused_under_a_run(played: Played) -> None:
    played.attached = "process 7 on h"
    code, said = emberkeep("down")
    assert code == 2
    assert "serves a run (process 7 on h)" in said
    assert "--force" in said
    assert played.done == []
    code, said = emberkeep("down", "--force")
    assert code == 0
    assert "a run has lost it (process 7 on h)" in said
    assert played.done == ["stop", "disconnect", "stop ray"]


def test_up_places_servers_for_the_parity_that_runs_will_use(played: Played) -> None:
    code, said = emberkeep("up", "--shards", "6", "--parity", "4,2")
    assert code == 0
    assert played.parity == Parity(k=4, r=2)
    assert "warning" not in said
    code, said = emberkeep("up", "--shards", "6", "--parity", "4,1")
    assert code == 0
    assert "warning: 6 servers share 3 nodes: a node that dies takes 2 with it" in said
    for wrong in ("4", "a,1", "4,1,1", "0,1", "6,1"):
        code, said = emberkeep("up", "--shards", "6", "--parity", wrong)
        assert code == 2, said


def test_up_sets_aside_what_is_known_and_says_where_that_is_nothing(played: Played) -> None:
    tier = ["--tier", "/nvme/run", "--tier-memory", "2GB"]
    code, said = emberkeep("up", "--shards", "2")
    assert code == 0
    assert played.asked["resources"].memory == 0
    assert "no memory is set aside for the servers" in said
    assert "--memory SIZE says what each takes" in said
    for words, nbytes in (
        (["--memory", "3GB"], 3 * GB),
        (tier, 2 * GB + 256 * 10**6),  # and the process
        ([*tier, "--memory", "4GB"], 4 * GB),
    ):
        code, said = emberkeep("up", "--shards", "2", *words)
        assert code == 0
        assert played.asked["resources"].memory == nbytes
        assert "set aside" not in said


def test_up_gives_servers_their_tier(played: Played) -> None:
    assert emberkeep("up", "--shards", "2", "--tier", "/nvme/run", "--tier-exclusive")[0] == 0
    assert played.asked["tier"] == Tier("/nvme/run", memory="2GB", exclusive=True)
    for wrong in ("--tier-exclusive", "--tier-memory=1GB", "--disk=1GB"):
        code, said = emberkeep("up", "--shards", "2", wrong)
        assert code == 2
        assert "--tier" in said


def test_commands_wait_for_each_other(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "emberkeep").mkdir()
    other = os.open(tmp_path / "emberkeep", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def say(message: str) -> None:
        played.done.append(message)
        if "is at work" in message:
            os.close(other)

    # The name of the module is that of the command, too.
    monkeypatch.setattr(sys.modules["emberkeep.cli.cluster"], "say", say)
    assert emberkeep("up", "--shards", "1")[0] == 0
    waited, *rest = played.done
    assert waited == "another emberkeep cluster command is at work: waiting for it"
    assert rest[:2] == ["start ray", "start"]
