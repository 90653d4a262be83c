"""A Ray of this machine that outlives the command which started it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from emberkeep.errors import ServerError

_START_SECONDS = 60.0


def start_local() -> bool:
    """Starts Ray on this machine unless one is up that was started here; whether it did."""
    if _running() is not None:
        return False
    program = Path(sys.executable).parent / "ray"
    command = [str(program) if program.exists() else (shutil.which("ray") or "ray")]
    command += ["start", "--head", "--block", "--port=0", "--include-dashboard=false"]
    command += ["--disable-usage-stats"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    _note().parent.mkdir(parents=True, exist_ok=True)
    _note().write_text(json.dumps({"pid": process.pid}))
    until = time.monotonic() + _START_SECONDS
    current = Path("/tmp/ray/ray_current_cluster")
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ServerError("Ray could not be started on this machine: try ray start --head")
        if current.exists() and current.stat().st_mtime > time.time() - _START_SECONDS:
            return True
        time.sleep(0.1)
    raise ServerError(f"Ray did not start within {_START_SECONDS:g} s: try ray start --head")


def stop_local() -> bool:
    """Ends the Ray that `start_local` has started; whether there was one."""
    pid = _running()
    _note().unlink(missing_ok=True)
    if pid is None:
        return False
    os.killpg(pid, signal.SIGTERM)
    until = time.monotonic() + 10
    while time.monotonic() < until and _alive(pid):
        time.sleep(0.1)
    return True


def _running() -> int | None:
    try:
        pid = int(json.loads(_note().read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None
    return pid if _alive(pid) else None


def _alive(pid: int) -> bool:
    """Whether that process is the Ray that was noted: numbers of processes are used again."""
    try:
        return b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _note() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "emberkeep" / "ray.json"
