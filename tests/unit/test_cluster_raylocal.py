"""Which Ray is meant, and that one which is not there is told at once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from emberkeep.cluster import raylocal
from emberkeep.errors import ServerError


def test_a_ray_that_is_not_there_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        assert raylocal.reachable(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
    with pytest.raises(ServerError, match="no Ray answers"):
        raylocal.reachable(f"127.0.0.1:{port}")
    with pytest.raises(ServerError, match="host:port"):
        raylocal.reachable("nonsense")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(raylocal, "_NOTED_BY_RAY", tmp_path / "nothing")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ServerError, match="emberkeep cluster up"):
        raylocal.reachable("auto")
    assert not raylocal.stop_local()
