"""Sockets and tokens that are one user's alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.errors import SecurityError, ServerError
from emberkeep.wire import private_socket
from emberkeep.wire.private_socket import PrivateSocket, make_token, own_address, own_token
from emberkeep.wire.security import Security, split_address


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ek-", dir="/tmp") as where:
        monkeypatch.setenv("XDG_STATE_HOME", where)
        yield Path(where)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_once_and_only_its_user_can_read_it(state: Path) -> None:
    assert own_token() is None
    token = make_token()
    assert len(token) >= 32
    assert make_token() == own_token() == token
    assert mode(private_socket.token_file()) == 0o600
    assert mode(private_socket.token_file().parent) == 0o700
    assert os.listdir(private_socket.token_file().parent) == ["token"]


def test_a_token_that_others_can_read_is_refused(state: Path) -> None:
    make_token()
    private_socket.token_file().chmod(0o644)
    with pytest.raises(SecurityError, match="read by others"):
        own_token()


def test_one_process_listens_at_a_time(state: Path) -> None:
    path = private_socket.socket_of(7070)
    first = PrivateSocket(path)
    assert mode(path.parent) == 0o700
    with pytest.raises(ServerError, match="another server is there"):
        PrivateSocket(path)
    path.touch()
    first.remove()
    assert not path.parent.exists()
    PrivateSocket(path).remove()


def test_what_killed_servers_left_behind_is_removed(state: Path) -> None:
    first = private_socket.own_socket()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = first.path.parent.with_name(f"{os.uname().nodename}-pid-{gone.pid}")
    starting = left.with_name(f"{os.uname().nodename}-pid-{os.getppid()}")
    for directory in (left, starting):
        directory.mkdir(mode=0o700)
        (directory / "socket").touch()
    first.remove()
    second = private_socket.own_socket()
    assert not left.exists()
    assert starting.exists()
    second.remove()


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    with pytest.raises(SecurityError, match="others can enter"):
        PrivateSocket(open_to_all / "socket")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    planted.mkdir(mode=0o700)
    os.chown(planted, 65534, 65534)
    with pytest.raises(SecurityError, match="does not belong to this user"):
        PrivateSocket(planted / "socket")


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="103 characters"):
        PrivateSocket(tmp_path / ("x" * 100) / "socket")


def test_ports_of_this_machine_stand_for_sockets(state: Path) -> None:
    for name in ("127.0.0.1:7070", "localhost:7070"):
        assert own_address(name) == f"grpc+unix://{private_socket.socket_of(7070)}"
    for other in ("grpc+tcp://127.0.0.1:7070", "grpc+tls://10.0.0.1:7070"):
        assert own_address(other) == other


def test_any_path_can_be_an_address(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", f"{state}/a b%c")
    address = own_address("127.0.0.1:7070")
    assert " " not in address
    assert split_address(address) == ("grpc+unix", str(private_socket.socket_of(7070)), 0)


def test_clients_bring_a_certificate_where_servers_demand_one() -> None:
    server = Security(token="a token of some length", certificate=b"c", key=b"k")
    assert server.of_client() == Security(token=server.token)
    demanding = Security(token=server.token, certificate=b"c", key=b"k", authority=b"a")
    assert demanding.of_client() == demanding


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "--tls-certificate and --tls-key and --authority.* and a token"),
        ({"token": "a token of some length", "certificate": b"c", "key": b"k"}, "--authority"),
    ],
)
def test_a_network_needs_the_certificates_of_clients(given: dict[str, bytes], missing: str) -> None:
    with pytest.raises(SecurityError, match=missing):
        Security(**given).check_listening("10.0.0.1")  # type: ignore[arg-type]
    Security(**given, authority=b"a").check_listening("127.0.0.1")  # type: ignore[arg-type]
