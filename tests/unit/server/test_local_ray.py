"""Which Ray is meant, and that a missing one is reported at once."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.cli import app
from emberkeep.errors import ConfigError, ServerError
from emberkeep.server.ray import local_ray


def test_a_ray_that_is_not_there_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        assert local_ray.reachable(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
    with pytest.raises(ServerError, match="no Ray answers"):
        local_ray.reachable(f"127.0.0.1:{port}")
    with pytest.raises(ServerError, match="host:port"):
        local_ray.reachable("nonsense")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(local_ray, "_NOTED_BY_RAY", tmp_path / "nothing")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ServerError, match="emberkeep cluster up"):
        local_ray.reachable("auto")
    assert not local_ray.stop_local()


def test_a_note_that_cannot_be_read_starts_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The Ray that it tells of may be running: a second one beside it, or none to be found any
    more, would be what an error was taken for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    note = tmp_path / "emberkeep" / "ray.json"
    note.mkdir(parents=True)
    started: list[object] = []
    monkeypatch.setattr(local_ray.subprocess, "Popen", lambda *args, **_: started.append(args))
    for call in (local_ray.start_local, local_ray.stop_local, local_ray.local_address):
        with pytest.raises(ServerError, match="cannot be read"):
            call()
    assert note.exists()
    assert not started


@pytest.mark.parametrize("elsewhere", [False, True])
def test_where_ray_is_not_installed_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, elsewhere: bool
) -> None:
    """A command of another environment is of no use: this interpreter could not speak to it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if elsewhere:
        (tmp_path / "ray").write_text("#!/bin/sh\n")
        (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    ended = CliRunner().invoke(app, ["cluster", "up", "--shards", "1"])
    assert ended.exit_code == ConfigError.exit_code == 2
    assert "Ray is not installed: run pip install 'emberkeep[ray]'" in ended.output
    assert not (tmp_path / "state" / "emberkeep" / "ray.json").exists()


def test_without_its_command_ray_is_started_as_a_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert local_ray._program() == [str(tmp_path / "python"), "-m", "ray.scripts.scripts"]
    (tmp_path / "ray").touch()
    assert local_ray._program() == [str(tmp_path / "ray")]
