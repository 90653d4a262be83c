"""Processes that have loaded everything, of which each run of the tests has one of a kind.

Loading torch and the kernels takes ten seconds of a core. `Foreman` talks to a process that was
forked from one that has done so, which all processes of a run of pytest share: the first that needs
it starts it. A foreman forks what its own process asks for, so nothing else is shared.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_RUN = "EMBERKEEP_TEST_RUN"


def run_directory() -> tuple[Path, bool]:
    """What the processes of a run of pytest share, and whether this one has made it."""
    made = _RUN not in os.environ
    if made:
        os.environ[_RUN] = tempfile.mkdtemp(prefix="ek-")
    return Path(os.environ[_RUN]), made


class Foreman:
    """Questions to a process that has loaded `module`, and its answers."""

    def __init__(self, module: str, **environment: str) -> None:
        self._started: subprocess.Popen[bytes] | None = None
        self._connection = self._connect(module, {**os.environ, **environment})
        self._file = self._connection.makefile("rw")
        # Another process of the run has started it, maybe: it gets to know this one's environment.
        self.ask(**{**os.environ, **environment})

    def _connect(self, module: str, environment: dict[str, str]) -> socket.socket:
        directory, _ = run_directory()
        path = directory / module.rpartition(".")[2]
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
            except OSError:  # nobody has started it, or who did has ended
                path.unlink(missing_ok=True)
                self._started = subprocess.Popen(
                    [sys.executable, "-m", module, str(path)],
                    cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )  # fmt: skip
                assert self._started.stdout is not None
                assert self._started.stdout.readline() == b"ready\n", f"{module} did not start"
                connection.connect(str(path))
        return connection

    def ask(self, **question: Any) -> Any:
        self._file.write(json.dumps(question) + "\n")
        self._file.flush()
        answer = self._file.readline()
        assert answer, "the process that starts others has ended"
        return json.loads(answer)

    def close(self) -> None:
        """Who has started the loaded process ends it; the foremen of others go on."""
        self._connection.shutdown(socket.SHUT_WR)
        self._file.read()  # until it has ended
        self._file.close()
        self._connection.close()
        if self._started is not None:
            assert self._started.stdin is not None
            assert self._started.stdout is not None
            self._started.stdin.close()
            self._started.wait()
            self._started.stdout.close()


class Questions:
    """What a foreman is asked, in the order of its lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rw")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, self._file)

    def answer(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def fork(self) -> int:
        """As `os.fork`; the child has no part in the questions."""
        pid = os.fork()
        if pid == 0:
            _to_nowhere(self._connection.fileno())
        return pid


def serve(path: str, work: Callable[[Questions], None]) -> None:
    """The loaded process: forks a foreman for each that connects, which works on its questions."""
    gc.freeze()  # who collects garbage need not copy all that was loaded
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _to_nowhere(0, 1)
            questions = Questions(connection)
            os.environ.clear()
            os.environ.update(next(iter(questions)))
            questions.answer(None)
            work(questions)
            os._exit(0)
        connection.close()


def _to_nowhere(*files: int) -> None:
    devnull = os.open(os.devnull, os.O_RDWR)
    for file in files:
        os.dup2(devnull, file)
    os.close(devnull)


def _reap() -> None:
    """Foremen that have ended."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return
