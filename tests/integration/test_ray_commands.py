"""Commands on one Ray, as a user gives them: servers that stay up, and runs of several workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import emberkeep

pytestmark = pytest.mark.soak  # minutes, nearly all of them Ray's own

SETTINGS = """
[data]
source = "synthetic"
samples = 200000
rows_total = 2000
[tables]
dim = 4
[model]
bottom = [8]
top = [8]
[run]
batch_size = 100
[checkpoint]
path = "runs/1"
every = "50 steps"
"""


class Emberkeep:
    """A command in a process group of its own, and what it says."""

    def __init__(self, *words: str, state: Path, at: Path) -> None:
        sources = str(Path(emberkeep.__file__).parent.parent)
        environment = {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": sources}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "emberkeep.cli", *words],
            cwd=at, env={k: v for k, v in environment.items() if not k.startswith("RAY_")},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.said = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.said += line
                self._changed.notify_all()

    def until(self, pattern: str, seconds: float = 300) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: re.search(pattern, self.said), seconds), self.said

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> int:
        code = self.process.wait(300)
        self._reader.join(10)
        return code


class Shell:
    """Gives commands in one directory, with one Ray."""

    def __init__(self, state: Path, at: Path) -> None:
        self.state, self.at = state, at
        self.given: list[Emberkeep] = []

    def __call__(self, *words: str) -> Emberkeep:
        self.given.append(Emberkeep(*words, state=self.state, at=self.at))
        return self.given[-1]

    def train(self, *words: str) -> Emberkeep:
        on = ["--cluster", "ray", "--shards", "2", "--workers", "2", "--set", "cluster.name=there"]
        return self("train", "run.toml", *on, *words)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    state = tmp_path_factory.mktemp("state")
    shell = Shell(state, state)
    both = [shell("cluster", "up", "--shards", "2", "--name", "there") for _ in range(2)]
    codes = [one.end() for one in both]
    try:
        assert sorted(codes) == [0, 2], [one.said for one in both]
        assert "is up already" in both[codes.index(2)].said
        yield state
    finally:
        assert shell("cluster", "down", "--name", "there", "--force").end() == 0
    assert not list((state / "emberkeep").iterdir())


@pytest.fixture
def shell(ray: Path, tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "run.toml").write_text(SETTINGS)
    given = Shell(ray, tmp_path)
    yield given
    for one in given.given:
        if one.process.poll() is None:
            one.process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_every_process_of_the_command_saves_and_ends_it(
    shell: Shell, number: signal.Signals, code: int
) -> None:
    run = shell.train()
    run.until(r"training: step \d+ of 1800")
    if number == signal.SIGINT:
        down = shell("cluster", "down", "--name", "there")
        assert down.end() == 2
        assert f"serves a run (process {run.process.pid} on " in down.said
    run.signal(number)
    assert run.end() == code, run.said
    (step,) = re.findall(rf"{number.name}: stopped after step (\d+); version of step \1", run.said)
    again = shell.train("--set", "data.samples=200000")
    again.until(f"resumed from version .*, after step {step}")
    again.signal(signal.SIGTERM)
    assert again.end() == 75
    assert list((shell.at / "runs" / "1" / "versions").iterdir())


def test_a_fresh_run_whose_workers_are_killed_goes_on(shell: Shell) -> None:
    short = ("--set", "data.samples=60000")
    first = shell.train(*short, "--json", "--tensorboard", "events")
    assert first.end() == 0, first.said
    assert first.process.stdout is not None
    whole = json.loads(first.process.stdout.read())
    assert list((shell.at / "events").iterdir())

    run = shell.train(*short, "--json", "--fresh")
    run.until(r"training: step \d+ of 540")
    os.kill(_worker_of(run), signal.SIGKILL)
    run.until(r"worker \d \(process \d+\) died; all workers are started again, attempt 2 of 4")
    run.until(r"resumed from version \d+, after step [1-9]")
    assert run.end() == 0, run.said
    assert run.process.stdout is not None
    again = json.loads(run.process.stdout.read())  # and nothing else
    assert again["digest"] == whole["digest"]


def _worker_of(run: Emberkeep) -> int:
    """A worker that trains; there is one run at a time."""
    names = {int(path.parent.name): path for path in Path("/proc").glob("[0-9]*/cmdline")}
    found = [pid for pid, path in names.items() if b"_TrainWorker" in _bytes(path)]
    assert found, run.said
    return found[-1]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
