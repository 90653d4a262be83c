"""Servers of this machine that do not start, or do not end. No process is started here."""

from __future__ import annotations

import ast
import errno
import fcntl
import gc
import logging
import os
import re
import resource
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emberkeep.cluster.remote import processes
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.processes import ProcessLauncher
from emberkeep.errors import DeadlineError, ServerError
from emberkeep.nn import EmbeddingBags
from emberkeep.tables import SGD, Table
from emberkeep.testing.local_transport import LocalNetwork
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.security import Security
from tests.sources import nodes, parsed
from tests.test_clocks import full_name, imported, sources
from tests.waiting import passing

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/emberkeep-x")


class Machine:
    """Where servers are started: none while it is `full`, no more than it has `room` for."""

    def __init__(self) -> None:
        self.full = False
        self.room = 100
        self.started = 0
        self.killed: list[tuple[str, float]] = []
        self.ended: list[str] = []
        self.stuck: set[str] = set()
        self.wait: Callable[[], object] = lambda: None

    def start(self, *_: Any) -> Any:
        if self.full or self.started == self.room:
            raise FULL
        self.started += 1
        name = f"server-{self.started}"
        return SimpleNamespace(
            address=name, pid=self.started, ended=False, wait=self.wait,
            kill=lambda seconds=5.0: self._kill(name, seconds), ask_to_end=lambda: None,
            end=lambda _: self.ended.append(name),
        )  # fmt: skip

    def _kill(self, name: str, seconds: float) -> None:
        self.killed.append((name, seconds))
        if name in self.stuck:
            raise DeadlineError(f"{name} has not ended within {seconds:g} s")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = Machine()
    monkeypatch.setattr(processes, "_Process", found.start)
    return found


def test_a_spare_that_cannot_be_started_ends_nothing_and_comes_later(machine: Machine) -> None:
    clock = VirtualClock()
    launcher = ProcessLauncher(2, spares=1, threads=1, clock=clock)
    machine.full = True
    with pytest.warns(RuntimeWarning, match="a spare is missing, and is tried again: .*No space"):
        assert launcher.replace(1, "life") == "server-3"
    assert launcher.address(1) == "server-3"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        clock.advance(timedelta(minutes=5))
    assert machine.started == 3
    machine.full = False
    passing(clock, lambda: machine.started == 4, "the spare", timedelta(minutes=1))
    machine.full = True
    with pytest.warns(RuntimeWarning, match="a spare is missing"):
        assert launcher.replace(0, "life") == "server-4"
    launcher.close()


def test_a_run_starts_without_the_spares_that_it_cannot_have(machine: Machine) -> None:
    machine.room = 2
    with pytest.warns(RuntimeWarning, match="a spare is missing"):
        launcher = ProcessLauncher(2, spares=2, threads=1, clock=VirtualClock())
    assert launcher.count == 2
    launcher.close()
    assert machine.ended == ["server-1", "server-2"]


def test_the_servers_of_a_dropped_module_are_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = LocalNetwork(VirtualClock())
    for number in (1, 2, 3):
        network.start(f"server-{number}")
    on_network = partial(FlightCluster, transport=network.transport(), clock=network.clock)
    monkeypatch.setattr(processes, "FlightCluster", on_network)
    tables = [Table("a", rows=100, dim=4)]
    bags = EmbeddingBags(tables, optimizer=SGD(lr=0.1), cluster=processes.servers(shards=2))
    assert machine.started == 3
    assert machine.ended == []
    del bags
    gc.collect()
    assert machine.ended == ["server-1", "server-2", "server-3"]


def test_a_start_says_how_far_it_is(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    machine.wait = lambda: clock.sleep(6)
    with caplog.at_level(logging.INFO, "emberkeep"):
        ProcessLauncher(2, spares=1, threads=1, clock=clock).close()
    assert caplog.messages == [
        "starting 2 shard servers and 1 to spare",
        "1 of 2 shard servers are ready",
        "2 of 2 shard servers are ready",
        "2 shard servers ready after 12.0 s",
    ]


def test_a_server_that_is_needed_and_cannot_be_started_says_why_and_what_helps(
    machine: Machine,
) -> None:
    machine.full = True
    remedy = r"cannot be started: .*No space left.*/full/emberkeep-x.*space and inodes.*ulimit -n"
    with pytest.raises(ServerError, match=remedy):
        ProcessLauncher(1, spares=0, threads=1)
    machine.full = False
    launcher = ProcessLauncher(1, spares=0, threads=1)
    machine.full = True
    # Who recovers takes the error for one more loss, and tries again.
    with (
        pytest.warns(RuntimeWarning, match="shard 0 has no server yet: .*No space"),
        pytest.raises(ServerError, match=remedy),
    ):
        launcher.replace(0, "life")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ServerError, match=remedy):
            launcher.replace(0, "life")
    machine.full = False
    assert launcher.replace(0, "life") == "server-2"
    launcher.close()


def test_a_token_that_cannot_be_kept_ends_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise FULL

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(UserWarning, match="servers keep no logs: .*No space"):
        launcher = ProcessLauncher(1, spares=0, threads=1)
    assert launcher.token_file is None
    launcher.close()


def test_a_server_that_the_system_does_not_let_go_is_replaced_after_its_lease(
    machine: Machine,
) -> None:
    launcher = ProcessLauncher(1, spares=1, threads=1, lease=timedelta(seconds=40))
    machine.stuck = {"server-1"}
    with pytest.warns(RuntimeWarning, match="shard 0 is replaced, as its lease has passed: .*40 s"):
        assert launcher.replace(0, "life") == "server-2"
    assert machine.killed == [("server-1", 40)]
    launcher.close()
    assert machine.ended == ["server-2", "server-3"]  # nobody waits for the other again


def test_a_server_that_is_stuck_is_waited_for_once(machine: Machine) -> None:
    launcher = ProcessLauncher(1, spares=0, threads=1)
    machine.stuck, machine.full = {"server-1"}, True
    with pytest.warns(RuntimeWarning), pytest.raises(ServerError):
        launcher.replace(0, "life")
    machine.full = False
    assert launcher.replace(0, "life") == "server-2"
    assert machine.killed == [("server-1", 15)]
    launcher.close()


def test_a_forked_child_that_ends_takes_no_servers_with_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs what its parent has registered for the end."""
    launcher = ProcessLauncher(1, spares=0, threads=1)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 2**22 + 1)
        launcher.close()
    assert machine.ended == []
    launcher.close()
    assert machine.ended == ["server-1"]


# -- one process -------------------------------------------------------------------------------


def process(stdout: Any, **more: Any) -> Any:
    """A child without its start."""
    made = processes._Process.__new__(processes._Process)
    made.log = None
    made._directory = "/nowhere/at-all"
    made._greeting = None
    made._process = SimpleNamespace(stdout=stdout, stdin=None, pid=7, **more)  # type: ignore
    return made


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip("this system has no descriptors above 1023")
    unlimited = soft == resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft if unlimited else max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_process_with_many_open_files_hears_its_servers() -> None:
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, 1500)
    os.close(reading)
    with open(high) as stdout:
        os.write(writing, b'{"address": "grpc+unix:///socket"}\n')
        os.close(writing)
        assert process(stdout).address == "grpc+unix:///socket"


def test_a_server_that_never_speaks_and_cannot_be_killed_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end of the pipe stays open: a line would be waited for without end."""
    monkeypatch.setattr(processes, "_START_SECONDS", 0.0)
    reading, writing = os.pipe()
    killed: list[bool] = []
    with open(reading) as stdout, open(writing, "w"):
        silent = process(stdout, kill=lambda: killed.append(True))
        with pytest.raises(ServerError, match="shard server 7 was not ready within 0 s"):
            silent.wait()
    assert killed == [True]


def test_a_kill_waits_as_long_as_it_is_asked_to() -> None:
    waited: list[float] = []

    def wait(seconds: float) -> int:
        waited.append(seconds)
        raise subprocess.TimeoutExpired("serve", seconds)

    with open(os.devnull) as stdout:
        stuck = process(stdout, wait=wait, send_signal=lambda _: None)
        with pytest.raises(DeadlineError, match="has not ended within 40 s"):
            stuck.kill(40)
    assert waited == [40]


def test_a_server_is_asked_to_end_also_where_a_forked_child_has_its_pipe() -> None:
    reading, writing = os.pipe()
    with open(os.dup(writing), "w"), open(reading, "rb", buffering=0) as server:
        os.set_blocking(reading, False)
        with open(os.devnull) as stdout, open(writing, "w") as stdin:
            asked = process(stdout)
            asked._process.stdin = stdin
            asked.ask_to_end()
            asked.ask_to_end()  # which is no error
        assert server.read(1)


def test_a_server_that_has_ended_is_asked_to_end_in_vain() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(os.devnull) as stdout, open(writing, "w") as stdin:
        ended = process(stdout)
        ended._process.stdin = stdin
        ended.ask_to_end()
        assert stdin.closed


def test_a_server_knows_whose_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    processes._Process(1, Security().with_token(), tmp_path)
    (command,) = commands
    assert command[command.index("--parent") + 1] == str(os.getpid())


def test_nothing_of_a_start_that_fails_is_left_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    opened: list[Any] = []

    def full(*_: Any, stderr: Any, **__: Any) -> None:
        opened.append(stderr)
        raise FULL

    monkeypatch.setattr(subprocess, "Popen", full)
    security = Security().with_token()
    with pytest.raises(OSError, match="No space"):
        processes._Process(1, security, tmp_path)
    assert opened[0].closed
    assert list((tmp_path / "tmp").iterdir()) == []


# -- everywhere --------------------------------------------------------------------------------


def selects(source: str) -> list[int]:
    """The lines on which descriptors are given to `select.select`, which takes none above 1023."""
    if not re.search(r"^\s*(import|from) select\b", source, re.MULTILINE):
        return []
    tree = parsed(source)
    names = imported(tree)
    return [
        node.lineno
        for node in nodes(tree)
        if isinstance(node, ast.Call) and full_name(node.func, names) == "select.select"
        if any(not isinstance(given, ast.Tuple) or given.elts for given in node.args[:3])
    ]


def test_nobody_waits_for_descriptors_with_select() -> None:
    assert {module: lines for module, text in sources("").items() if (lines := selects(text))} == {}
    assert selects("import select\nselect.select([1], (), (), 0)") == [2]
