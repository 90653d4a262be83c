"""A night of a job: see `night`."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.faults.night import STRATEGIES, night
from tests.threads import started_since


def sockets() -> set[str]:
    """What sockets this process has open."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{handle}")
        except FileNotFoundError:  # the one of the list itself
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def descendants() -> set[int]:
    """Processes of this one and of those that it started."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(name)] = int(fields[1])
    found, before = {os.getpid()}, 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_night_in_minutes(strategy: str, tmp_path: Path) -> None:
    """`EMBERKEEP_NIGHT_SECONDS` says how long, for all strategies together; `EMBERKEEP_SEED`
    starts elsewhere."""
    seconds = float(os.environ.get("EMBERKEEP_NIGHT_SECONDS", 600)) / len(STRATEGIES)
    seed = int(os.environ.get("EMBERKEEP_SEED", 1))
    print(f"seed {seed}, {strategy}")
    before = sockets(), descendants()
    threads = set(threading.enumerate())
    print(dict(night(tmp_path, seed, strategy, seconds)))
    assert sockets() <= before[0]
    assert descendants() <= before[1]
    assert not started_since(threads)
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert not left  # drafts of processes that were killed would be overwritten by the next
