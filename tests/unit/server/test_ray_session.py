"""One door to Ray: the token is there before it is loaded. Ray itself is played."""

from __future__ import annotations

import fcntl
import importlib.abc
import importlib.machinery
import os
import re
import signal
import sys
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import emberkeep
from emberkeep.errors import ServerError, StateError
from emberkeep.server.ray import local_ray, ray_session
from emberkeep.testing.virtual_clock import VirtualClock

ADDRESS = "127.0.0.1:6379"


class PlayedRay(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a Ray that notes what it found in the environment, as the true one does."""

    def __init__(self) -> None:
        self.token_path: str | None = None
        self.on_init: Any = lambda: None

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "ray" else None

    def exec_module(self, module: types.ModuleType) -> None:
        self.token_path = os.environ.get("RAY_AUTH_TOKEN_PATH")
        self.connected = False
        module.is_initialized = lambda: self.connected  # type: ignore[attr-defined]
        module.init = self.init  # type: ignore[attr-defined]
        module.shutdown = self.shutdown  # type: ignore[attr-defined]

    def init(self, **_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as ray.init does
        self.on_init()
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PlayedRay]:
    played = PlayedRay()
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [played, *sys.meta_path])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    (tmp_path / "emberkeep").mkdir()
    (tmp_path / "emberkeep" / "ray.token").write_text("a token")
    monkeypatch.setattr(local_ray, "local_address", lambda: ADDRESS)
    monkeypatch.setattr(local_ray, "_answers", lambda _: True)
    yield played
    sys.modules.pop("ray", None)


@pytest.mark.parametrize("address", [ADDRESS, "auto"])
def test_the_token_is_there_before_ray_is_loaded(ray: PlayedRay, address: str) -> None:
    with ray_session.connected(address):
        assert ray.token_path is not None
        assert Path(ray.token_path).read_text() == "a token"
    assert not ray_session.is_connected()


def test_another_ray_is_not_brought_the_token(ray: PlayedRay) -> None:
    with ray_session.connected("127.0.0.1:1"):
        assert ray.token_path is None
    with pytest.raises(StateError, match="not connected"):
        ray_session.connected_ray()


def test_a_ray_that_was_loaded_without_the_token_reads_it_or_is_refused(ray: PlayedRay) -> None:
    import ray as _  # noqa: F401

    with pytest.raises(ServerError, match="before you import ray"), ray_session.connected(ADDRESS):
        pass  # the played one has no way to read it again


def test_sigterm_acts_as_it_did_before(ray: PlayedRay) -> None:
    def own(number: int, frame: Any) -> None:
        raise SystemExit(75)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with ray_session.connected(None):
            assert signal.getsignal(signal.SIGTERM) is own
        ray.on_init = lambda: os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit, match="75"), ray_session.connected(None):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_else_loads_ray() -> None:
    package = Path(emberkeep.__file__).parent
    loads = re.compile(r"^ *(import|from) ray\b", re.MULTILINE)
    found = {path.name for path in package.rglob("*.py") if loads.search(path.read_text("utf-8"))}
    assert found == {"ray_session.py"}


def test_one_command_at_a_time_starts_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    clock, waited = VirtualClock(), list[str]()
    with local_ray.exclusive(lambda: waited.append("first")):
        pass
    (directory,) = tmp_path.iterdir()
    assert not list(directory.iterdir())  # no file is left
    other = os.open(directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with (
        pytest.raises(ServerError, match="another emberkeep cluster command is at work"),
        local_ray.exclusive(
            lambda: waited.append("second"), patience=timedelta(seconds=1), clock=clock
        ),
    ):
        pass
    with local_ray.exclusive(lambda: os.close(other)):  # the other command ends meanwhile
        pass
    assert waited == ["second"]
