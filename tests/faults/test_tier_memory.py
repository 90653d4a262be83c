"""Rows that exceed what a process may have: they train with a tier, and do not without.

The limit is RLIMIT_DATA, which any user may set and which counts every private page;
the files are read and written directly, so the page cache is no second memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TRAIN = """
import resource, sys
import numpy as np
from emberkeep.cluster.local.local_cluster import local
from emberkeep._types import RowIds
from emberkeep.tables import Adagrad, Table, Tier

LIMIT, ROWS, DIM = 600 * 2**20, 1_300_000, 64
if not len(sys.argv) > 2:  # who is in a group with a limit needs no other
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
assert ROWS * DIM * 4 * 2 > LIMIT
tier = Tier(sys.argv[1], memory="48MB") if sys.argv[1:] and sys.argv[1] else None
tables = [Table("t", rows=ROWS, dim=DIM, tier=tier)]
cluster = local(threads=2).open(tables, Adagrad(lr=0.1), seed=0)
grads = np.ones((20_000, DIM), np.float32)
for start in range(0, ROWS, 20_000):
    ids = np.arange(start, start + 20_000)
    wanted = [RowIds(ids, np.array([0, ids.size]))]
    cluster.push(wanted, [grads], lr=0.1)
assert cluster.touched_ids("t").size == ROWS
print("trained")
"""


def run(*arguments: str, within: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAIN, *arguments]
    if within is not None:
        command = ["sh", "-c", f'echo $$ > {within}/cgroup.procs && exec "$0" "$@"', *command]
    return subprocess.run(
        command,
        env={**os.environ, "EMBERKEEP_THREADS": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts so on Linux")
def test_rows_beyond_the_memory_of_the_process_train_with_a_tier(tmp_path: Path) -> None:
    ended = run(str(tmp_path / "tier"))
    assert ended.stdout.strip() == "trained", ended.stderr
    assert run().returncode != 0


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup with the limit, of either version, where this user may make one."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        path = root / f"emberkeep-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            (path / limit).write_text(str(600 * 2**20))
        except OSError:
            path.rmdir()
            continue
        yield path
        path.rmdir()
        return
    pytest.skip("this user may make no memory cgroup")


@pytest.mark.soak
def test_rows_beyond_a_memory_cgroup_train_with_a_tier(tmp_path: Path, group: Path) -> None:
    ended = run(str(tmp_path / "tier"), "grouped", within=group)
    assert ended.stdout.strip() == "trained", ended.stderr
    assert run("", "grouped", within=group).returncode != 0
