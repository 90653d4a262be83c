"""Rows that exceed what a process may have: they train with a tier, and do not without.

The limit is RLIMIT_DATA, which any user may set and which counts every private page;
the files are read and written directly, so the page cache is no second memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import resource, sys
import numpy as np
from emberkeep.cluster.local import local
from emberkeep.slab import RowIds
from emberkeep.tables import Adagrad, Table, Tier

LIMIT, ROWS, DIM = 900 * 2**20, 2_400_000, 64
resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
assert ROWS * DIM * 4 * 2 > LIMIT
tier = Tier(sys.argv[1], memory="48MB") if len(sys.argv) > 1 else None
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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TRAIN, *arguments],
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
