"""Events as lines of JSON, in files that stay small and directories that stay few."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import ConfigError
from emberkeep.runtime import event_log
from emberkeep.runtime.event_log import EventLog, last_line, new_log_directory, stderr_beside
from emberkeep.testing.virtual_clock import VirtualClock


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_one_line_with_its_time(tmp_path: Path) -> None:
    clock = VirtualClock()
    log = EventLog(tmp_path / "a.log", clock=clock)
    log("serving", {"shard": 1, "at": Path("x")})
    clock.sleep(61)
    log("lost", {"error": "a\nb"})
    log.close()
    assert lines_of(tmp_path / "a.log") == [
        {"time": "2026-01-01T00:00:00.000+00:00", "event": "serving", "shard": 1, "at": "x"},
        {"time": "2026-01-01T00:01:01.000+00:00", "event": "lost", "error": "a\nb"},
    ]
    assert json.loads(last_line(tmp_path / "a.log"))["event"] == "lost"


def test_a_file_never_takes_more_than_twice_its_size(tmp_path: Path) -> None:
    clock = VirtualClock()
    log = EventLog(tmp_path / "a.log", most_nbytes=1000, clock=clock)
    for number in range(100):
        clock.sleep(1)
        log("event", {"number": number})
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert len(sizes) <= 2
        assert max(sizes) <= 1000
    found = [*lines_of(tmp_path / "a.log.1"), *lines_of(tmp_path / "a.log")]
    numbers = [line["number"] for line in found]
    assert numbers == list(range(100))[-len(numbers) :]  # the newest, none of them missing
    log.close()


def test_what_else_a_process_prints_is_bounded_as_well(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "server-1.log", most_nbytes=1000)
    beside = stderr_beside(tmp_path / "server-1.log")
    stderr = os.dup(2)
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        log.bound_stderr()  # which is not that file: nothing happens
        os.dup2(file, 2)
        for line in range(100):
            os.write(2, f"a library says {line:4}\n".encode())
            log.bound_stderr()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(file)
    log.close()
    assert last_line(beside) == "a library says   99"
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"server-1.log", "server-1.stderr", "server-1.stderr.1"}
    assert all(size < 1100 for size in sizes.values())
    assert log.failed == 0


class Failing:
    """Calls of `os` that fail so many times, as where there are no descriptors or no space."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
        self._left = times
        self._real = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *given: Any) -> Any:
        if self._left:
            self._left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._real(*given)


@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_log_that_could_not_begin_again_does_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    clock = VirtualClock()
    log = EventLog(tmp_path / "a.log", most_nbytes=1000, clock=clock)
    Failing(monkeypatch, call, times=3)
    for number in range(25):
        clock.sleep(1)
        log("event", {"number": number})
    log.close()
    assert log.failed == 3
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 1000
    found = [*lines_of(tmp_path / "a.log.1"), *lines_of(tmp_path / "a.log")]
    assert len(found) == 25 - 3
    assert found[-1]["number"] == 24


@pytest.mark.parametrize("gone", ["removed", "moved"])
def test_a_log_whose_file_somebody_has_taken_away_begins_again(tmp_path: Path, gone: str) -> None:
    clock = VirtualClock()
    log = EventLog(tmp_path / "a.log", most_nbytes=1000, clock=clock)
    log("event", {"number": -1})
    (tmp_path / "a.log").rename(tmp_path / "elsewhere")
    if gone == "removed":
        (tmp_path / "elsewhere").unlink()
    for number in range(15):
        clock.sleep(1)
        log("event", {"number": number})
    log.close()
    assert lines_of(tmp_path / "a.log")[-1]["number"] == 14
    assert log.failed == 0


@pytest.mark.parametrize("call", ["open", "replace", "dup2"])
def test_stderr_that_could_not_begin_again_does_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    log = EventLog(tmp_path / "server-1.log", most_nbytes=1000)
    beside = stderr_beside(tmp_path / "server-1.log")
    stderr = os.dup(2)
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.dup2(file, 2)
        with monkeypatch.context() as full:
            Failing(full, call, times=2)
            for line in range(100):
                os.write(2, f"a library says {line:4}\n".encode())
                log.bound_stderr()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(file)
    log.close()
    assert log.failed == 2
    assert last_line(beside) == "a library says   99"
    assert all(path.stat().st_size < 1100 for path in tmp_path.iterdir())
    kept = (Path(f"{beside}.1").read_text() + beside.read_text()).splitlines()
    assert kept == [f"a library says {line:4}" for line in range(100)][-len(kept) :]


def test_a_flood_of_one_event_is_cut_and_counted(tmp_path: Path) -> None:
    clock = VirtualClock()
    log = EventLog(tmp_path / "a.log", clock=clock)
    for _ in range(1000):
        log("refused_token", {})
    log("lost", {})
    clock.sleep(10)
    log("refused_token", {})
    log.close()
    lines = lines_of(tmp_path / "a.log")
    assert [line["event"] for line in lines] == ["refused_token"] * 20 + ["lost", "refused_token"]
    assert lines[-1]["left_out"] == 980


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.log cannot be written: No such file"):
        EventLog(tmp_path / "missing" / "a.log")
    log = EventLog("/dev/full")
    log("serving", {})
    assert log.failed == 1
    log.close()


def test_the_newest_directories_stay_and_those_of_living_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(event_log, "MOST_DIRECTORIES", 3)
    logs = tmp_path / "emberkeep" / "logs"
    clock, made = VirtualClock(), []
    dead = 2**22 + 1  # beyond what Linux hands out
    for name in (f"20250101T000000-{dead}-aaaa", f"20250102T000000-{os.getpid()}-bbbb", "notes"):
        (logs / name).mkdir(parents=True)
    for _ in range(3):
        clock.sleep(1)
        made.append(new_log_directory(clock))
    left = {path.name for path in logs.iterdir()}
    assert left == {
        f"20250102T000000-{os.getpid()}-bbbb", "notes", *(path.name for path in made)
    }  # fmt: skip
    assert made[0].stat().st_mode & 0o777 == 0o700


def test_warnings_are_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        log.show_warnings()
        warnings.warn("the disk is slow", RuntimeWarning, stacklevel=1)
    log.close()
    (line,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (line["event"], line["message"]) == ("warning", "the disk is slow")


# On its own: a write that waits for who reads it has no end.
STUCK = """
import json, os, pty, select
ends = {ends}
read, write = ends()
os.dup2(write, 2)
from emberkeep.runtime.event_log import EventLog
from emberkeep.testing.virtual_clock import VirtualClock
clock = VirtualClock()
log = EventLog(clock=clock)
def tell(number):
    clock.sleep(10)
    log("wrote", {{"version": number, "why": "x" * 500 * (number % 9)}})
for number in range(300):
    tell(number)
assert 100 < log.failed < 300, log.failed
os.set_blocking(read, False)
def taken():
    found = b""
    try:
        while more := os.read(read, 1 << 16):
            found += more
    except BlockingIOError:
        return found
before = taken()
tell(999)
last = taken()
# The system hands on what a terminal was sent in its own time.
while b": 999" not in last and select.select([read], [], [], 20)[0]:
    last += taken()
lines = (before + last).splitlines()
whole = []
for line in lines:
    try:
        whole.append(json.loads(line)["version"])
    except ValueError:
        pass
assert whole[0] == 0 and whole[-1] == 999, whole
assert len(whole) >= len(lines) - 1, (len(lines), whole)
"""


@pytest.mark.parametrize("ends", ["os.pipe", "pty.openpty"])
def test_nobody_waits_for_who_reads_stderr(ends: str) -> None:
    """A pipe that its supervisor does not read, or a terminal whose other side hangs."""
    subprocess.run([sys.executable, "-c", STUCK.format(ends=ends)], check=True, timeout=60)
