"""Events of one process as lines of JSON: on stderr, or in a file of bounded size.

Every line has `time` (UTC) and `event`; what else it has depends on the event.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from emberkeep._types import Json
from emberkeep.errors import ConfigError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.system_calls import lives

MOST_NBYTES = 4 * 2**20
"""A file that is larger becomes FILE.1, in the place of the one before: a log never takes more than
twice this."""
MOST_DIRECTORIES = 20

# Of each event so many lines in so many seconds; the next line says how many were left out.
_MOST_LINES, _SECONDS = 20, 10.0
_STDERR = 2


class EventLog:
    """Writes a line for each event it is called with. Safe from several threads.

    Once it is open it raises nothing and holds up nobody for long: a full disk must not end a
    server. Lines that could not be written are counted in `failed`; a flood of one event is cut to
    20 lines in 10 seconds, and the next of them has `left_out`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        most_nbytes: int = MOST_NBYTES,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.path = None if path is None else str(Path(path).absolute())
        self.failed = 0
        self._most_nbytes = most_nbytes
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[float, int]] = {}
        self._left_out: dict[str, int] = {}
        self._file = _STDERR
        self._torn = False  # the last line on stderr has no end
        if self.path is not None:
            try:
                self._file = _open(self.path)
            except OSError as error:
                raise ConfigError(
                    f"the log {self.path} cannot be written: {error.strerror}; name another file"
                ) from None

    def __call__(self, event: str, details: Json) -> None:
        with self._lock:
            if not self._lets_through(event):
                self._left_out[event] = self._left_out.get(event, 0) + 1
                return
            time = self._clock.now().isoformat(timespec="milliseconds")
            line: dict[str, Any] = {"time": time, "event": event, **details}
            if left_out := self._left_out.pop(event, 0):
                line["left_out"] = left_out
            try:
                self._write(json.dumps(line, default=str).encode() + b"\n")
            except (OSError, ValueError):
                self.failed += 1

    def bound_stderr(self) -> None:
        """Keeps what this process prints beside its events within the bounds of the log itself:
        libraries write to stderr what they like, for as long as the process lives. To be called
        now and then; does nothing where stderr is not the file beside the log."""
        if self.path is None:
            return
        path = str(stderr_beside(self.path))
        try:
            if os.fstat(_STDERR).st_size <= self._most_nbytes:
                return
            if not (_is_at(_STDERR, path) or _is_at(_STDERR, f"{path}.1")):
                return
            file = _new_file(path, _STDERR)
            try:
                os.dup2(file, _STDERR)
            finally:
                os.close(file)
        except OSError:
            self.failed += 1

    def show_warnings(self) -> None:
        """From here on warnings of this process are events: Python would write them to stderr, and
        wait for who reads it."""
        warnings.showwarning = lambda message, *_: self("warning", {"message": str(message)})

    def close(self) -> None:
        with self._lock:
            if self._file != _STDERR:
                os.close(self._file)
                self._file = _STDERR

    def _lets_through(self, event: str) -> bool:
        now = self._clock.monotonic()
        since, lines = self._windows.get(event, (now, 0))
        if now - since >= _SECONDS:
            since, lines = now, 0
        self._windows[event] = (since, lines + 1)
        return lines < _MOST_LINES

    def _write(self, line: bytes) -> None:
        if self._file == _STDERR:
            self._print(line)
            return
        if os.fstat(self._file).st_size + len(line) > self._most_nbytes:
            self._rotate()
        os.write(self._file, line)

    def _print(self, line: bytes) -> None:
        """Writes as much to stderr as it takes at once. A line that is left half-way is ended by
        the next one."""
        if self._torn:
            line = b"\n" + line
        done = 0
        try:
            with _stderr() as put:
                while done < len(line):
                    done += put(line[done : done + select.PIPE_BUF])
        finally:
            if done:
                self._torn = done < len(line)

    def _rotate(self) -> None:
        """Starts the file again; the one before keeps the lines until the next time."""
        assert self.path is not None
        full = self._file
        self._file = _new_file(self.path, full)
        os.close(full)


@contextmanager
def _stderr() -> Iterator[Callable[[bytes], int]]:
    """What writes up to PIPE_BUF bytes to stderr, or some of them, and never waits: for who reads
    a pipe or a terminal and has stopped, or a terminal that is stopped."""
    terminal = _opened_again(_STDERR) if sys.stderr is sys.__stderr__ else None
    try:
        yield _put if terminal is None else partial(os.write, terminal)
    finally:
        if terminal is not None:
            os.close(terminal)


def _opened_again(file: int) -> int | None:
    """A terminal under a number of its own, so that not to wait is no business of the others who
    have it. One that takes a byte says that it is ready, and waits with the next: it cannot be
    asked. None if it is none, or belongs to somebody else."""
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(os.ttyname(file), flags)
    except OSError:
        return None


def _put(some: bytes) -> int:
    ready = select.poll()
    ready.register(_STDERR, select.POLLOUT)
    if not ready.poll(0):
        raise BlockingIOError("nobody reads stderr")
    sys.stderr.write(some.decode())
    sys.stderr.flush()
    return len(some)


def _new_file(path: str, full: int) -> int:
    """A new file at `path`; the `full` one that is there becomes FILE.1. A call that fails in
    between is made up for by the next, and by then FILE.1 is not replaced once more."""
    if _is_at(full, path):
        os.replace(path, f"{path}.1")
    return _open(path)


def _is_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def stderr_beside(log: str | os.PathLike[str]) -> Path:
    """Where a process with that log has what it prints otherwise."""
    return Path(log).with_suffix(".stderr")


# -- where logs are ------------------------------------------------------------------------------


def state_directory() -> Path:
    """Where this user's emberkeep notes what outlives a process."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "emberkeep"


def new_log_directory(clock: Clock = SYSTEM_CLOCK) -> Path:
    """A directory for the logs of servers that this process starts, below `state_directory`.

    The newest 20 are kept, and all whose process lives. `OSError` if it cannot be made.
    """
    logs = state_directory() / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = logs / f"{clock.now():%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(2)}"
    made.mkdir(mode=0o700)
    for old in sorted(logs.iterdir())[:-MOST_DIRECTORIES]:
        if not _of_a_living_process(old):
            shutil.rmtree(old, ignore_errors=True)
    return made


def _of_a_living_process(directory: Path) -> bool:
    parts = directory.name.split("-")
    if len(parts) != 3 or not parts[1].isdigit():
        return True  # not one of these
    return lives(int(parts[1]))


def last_line(path: str | os.PathLike[str]) -> str:
    """The last line of a file; empty if there is none."""
    try:
        content = Path(path).read_bytes()[-4096:]
    except OSError:
        return ""
    lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
