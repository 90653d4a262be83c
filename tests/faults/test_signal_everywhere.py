"""A signal that reaches every process of a run at once: trainer, servers and spares."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emberkeep.blobs import open_store
from emberkeep.repository import Repository

SETTINGS = """
[data]
source = "synthetic"
samples = 2_000_000
test_fraction = 0.001
rows_total = 26_000
[tables]
dim = 4
[model]
bottom = [8]
top = [8]
[run]
batch_size = 64
[cluster]
kind = "servers"
shards = 2
[checkpoint]
path = "{path}"
every = "20 steps"
"""


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for listed in found for child in listed.read_text().split()]


def saved_step(where: Path) -> int | None:
    store = open_store(str(where))
    if not Repository.exists(store):
        return None
    repository = Repository.open(store)
    newest = repository.latest()
    return None if newest is None else repository.manifest(newest).step


@pytest.mark.skipif(not Path("/proc").exists(), reason="children are found in /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak)],
)
def test_the_last_step_is_saved_although_all_hear_the_signal(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    versions, settings = tmp_path / "versions", tmp_path / "run.toml"
    settings.write_text(SETTINGS.format(path=versions))
    with subprocess.Popen(
        [sys.executable, "-m", "emberkeep.cli", "train", str(settings)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "EMBERKEEP_THREADS": "1"},
    ) as trainer:  # fmt: skip
        try:
            until = time.monotonic() + 90
            while not saved_step(versions):  # the first version is of step 0
                assert time.monotonic() < until
                assert trainer.poll() is None
                time.sleep(0.05)
            servers = children(trainer.pid)
            assert len(servers) >= 3  # one of them a spare
            for pid in (*servers, trainer.pid):
                os.kill(pid, number)
            _, err = trainer.communicate(timeout=60)
        finally:
            trainer.kill()
    assert trainer.returncode == code, err
    (stopped,) = re.findall(r"stopped after step (\d+); version of step (\d+) was saved", err)
    assert stopped[0] == stopped[1]
    assert saved_step(versions) == int(stopped[0])
    assert "lost" not in err
    for pid in servers:
        assert not Path(f"/proc/{pid}").exists()
