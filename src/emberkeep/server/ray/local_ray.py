"""Which Ray is meant, whether it answers, and a Ray of this machine that outlives the command
which started it. Ray itself is not loaded: its attempts to connect take minutes to fail."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from emberkeep.errors import ConfigError, ServerError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.event_log import state_directory
from emberkeep.runtime.system_calls import command_line
from emberkeep.runtime.waiting import LOGGER

NOT_INSTALLED = "Ray is not installed: run pip install 'emberkeep[ray]'"
_START_SECONDS = 60.0
_PROBE_SECONDS = 3.0
_AUTH_MODE = "RAY_AUTH_MODE"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_NOTED_BY_RAY = Path("/tmp/ray/ray_current_cluster")
# A command that starts Ray and servers on it takes three minutes before it gives up.
_PATIENCE = timedelta(minutes=5)


@contextmanager
def exclusive(
    waiting: Callable[[], object], *, patience: timedelta = _PATIENCE, clock: Clock = SYSTEM_CLOCK
) -> Iterator[None]:
    """One process at a time starts or ends the Ray of this machine, and servers on it.

    Two that looked at the same time would both find none, and start two. The lock is on the
    directory of the note, so that no file is left; it ends with its process. `waiting` is called
    if another process has it.
    """
    directory = _note().parent
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _locked(handle, directory):
            waiting()
            until = clock.monotonic() + patience.total_seconds()
            while not _locked(handle, directory):
                if clock.monotonic() > until:
                    raise ServerError(
                        f"another emberkeep cluster command is at work since "
                        f"{patience.total_seconds():g} s, and nothing was started or ended: look "
                        f"at what it waits for, or end it (fuser {directory})"
                    )
                clock.sleep(0.1)
        yield
    finally:
        os.close(handle)


def _locked(handle: int, directory: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ServerError(
            f"{directory} cannot be locked ({error.strerror}), so that another command might start "
            "a second Ray beside this one; nothing was started or ended: set XDG_STATE_HOME to a "
            "directory on a disk of this machine"
        ) from error
    return True


def start_local(clock: Clock = SYSTEM_CLOCK) -> bool:
    """Starts Ray on this machine unless the one that was started here is up; whether it did.
    `ConfigError` where Ray is not installed for this interpreter: it could use none."""
    if local_address() is not None:
        return False
    if find_spec("ray") is None:
        raise ConfigError(NOT_INSTALLED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*_program(), "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    _note().parent.mkdir(parents=True, exist_ok=True)
    LOGGER.info("starting Ray on this machine")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **_new_token()},
    )
    address = f"127.0.0.1:{port}"
    _note().write_text(json.dumps({"pid": process.pid, "address": address}))
    try:
        until = clock.monotonic() + _START_SECONDS
        while process.poll() is None and clock.monotonic() < until:
            if _answers(address):
                return True
            clock.sleep(0.1)
    except BaseException:
        stop_local(clock)
        raise
    stop_local(clock)
    shown = " ".join(command[: command.index("--block")])
    raise ServerError(f"Ray did not start on this machine: try {shown}")


def _program() -> list[str]:
    """What starts Ray: its command, else its module."""
    beside = Path(sys.executable).parent / "ray"
    found = str(beside) if beside.exists() else shutil.which("ray")
    return [sys.executable, "-m", "ray.scripts.scripts"] if found is None else [found]


def stop_local(clock: Clock = SYSTEM_CLOCK) -> bool:
    """Ends the Ray that `start_local` has started; whether there was one."""
    found = _running()
    _note().unlink(missing_ok=True)
    _token().unlink(missing_ok=True)
    if found is None:
        return False
    pid, _ = found
    os.killpg(pid, signal.SIGTERM)
    until = clock.monotonic() + 10
    while clock.monotonic() < until and _alive(pid):
        clock.sleep(0.1)
    if _alive(pid):
        os.killpg(pid, signal.SIGKILL)
    return True


def local_address() -> str | None:
    """Where the Ray is that `start_local` has started; None if it is not up."""
    found = _running()
    return None if found is None else found[1]


def bring_token(address: str) -> bool:
    """Has this process bring the token of the Ray that `start_local` has started, if that is the
    one at `address`, and its user has not decided otherwise; whether it does. To be called before
    Ray is loaded, which looks once."""
    if address != local_address() or not _token().exists():
        return False
    if _AUTH_MODE in os.environ:
        return os.environ.get(_TOKEN_PATH) == str(_token())  # brought before
    os.environ.update(_with_token())
    return True


def reachable(address: str) -> str:
    """The address of a Ray that answers; "auto" is the one of this machine, and stays "auto" where
    Ray itself knows which: it then finds the token too. `ServerError` within seconds if there is
    none."""
    if address != "auto":
        if not _answers(address):
            raise ServerError(f"no Ray answers at {address}: start one there with ray start --head")
        return address
    named = os.environ.get("RAY_ADDRESS")
    for found in (named, local_address()):
        if found and _answers(found):
            return found
    with suppress(OSError):
        noted = _NOTED_BY_RAY.read_text().strip()
        if noted and _answers(noted):
            return noted if named else "auto"
    raise ServerError(
        "no Ray runs on this machine: start servers with emberkeep cluster up, or name "
        "the --address of a Ray"
    )


def _answers(address: str) -> bool:
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        raise ServerError(f"{address!r} is not the address of a Ray: write host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _running() -> tuple[int, str] | None:
    text = _read(_note())
    try:
        noted = json.loads(text or b"")
        pid, address = int(noted["pid"]), str(noted["address"])
    except (ValueError, KeyError, TypeError):
        return None
    return (pid, address) if _alive(pid) else None


def _read(path: Path) -> bytes | None:
    """The content of a file; None only where there is none."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise ServerError(
            f"{path} cannot be read ({error.strerror}), so whether a Ray runs here is not known; "
            "nothing was started or stopped: make it readable, or remove it if it is a note of "
            "emberkeep's and no Ray runs"
        ) from error


def _alive(pid: int) -> bool:
    """Whether that process is the Ray that was noted: numbers of processes are used again."""
    try:
        return b"ray" in command_line(pid)
    except OSError as error:
        raise ServerError(
            f"process {pid} cannot be looked at ({error.strerror}), so whether a Ray runs here is "
            "not known; nothing was started or stopped"
        ) from error


def _new_token() -> dict[str, str]:
    """A token of its own for a Ray that is about to start, unless its user has decided already:
    a process that may speak to it can run code on this machine."""
    if _AUTH_MODE in os.environ:
        return {}
    _token().unlink(missing_ok=True)
    with os.fdopen(os.open(_token(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return _with_token()


def _with_token() -> dict[str, str]:
    return {_AUTH_MODE: "token", _TOKEN_PATH: str(_token())}


def _token() -> Path:
    return _note().with_suffix(".token")


def _note() -> Path:
    return state_directory() / "ray.json"
