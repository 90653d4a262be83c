"""A trainer that can be stopped or cut off: pushes to servers, and writes down what it has come to.

`python -m tests.faults.stalls WHERE` is one with servers of its own, for a network of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from emberkeep._types import RowIds
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.runtime import pool
from emberkeep.tables import Adagrad, Table
from emberkeep.wire.security import Security
from tests.servers import Farm

TABLE = Table("t", rows=60, dim=4)
OPTIMIZER = Adagrad(lr=0.1)
SECOND = timedelta(seconds=1)
TIMING = Timing(deadline=SECOND, lease=SECOND, patience=60 * SECOND)


def push(cluster: Any, step: int) -> None:
    chance = np.random.default_rng(step)
    wanted = [RowIds(np.sort(chance.choice(60, 30, replace=False)), np.array([0, 30]))]
    cluster.pull(wanted)
    cluster.push(wanted, [chance.standard_normal((30, 4)).astype(np.float32)], lr=0.1)


def train(where: str, addresses: str) -> None:
    """Until a file `stop` is there; `result` then has the steps, and the epochs of before and
    after."""
    place, given = Path(where), json.loads(addresses)
    hosts = FixedAddresses(given, Security(), patience=TIMING.patience)
    cluster = FlightCluster([TABLE], OPTIMIZER, hosts, seed=3, pool=pool.Pool(1), timing=TIMING)
    epochs = [shard.epoch for shard in cluster.handles]
    step = 0
    while not (place / "stop").exists():
        step += 1
        push(cluster, step)
        (place / f"step-{step}").touch()
    _, planes = cluster.read_all("t")
    np.savez(place / "rows.npz", **planes)
    after = [shard.epoch for shard in cluster.handles]
    cluster.close()
    (place / "result").write_text(json.dumps({"steps": step, "epochs": [epochs, after]}))


def main() -> None:
    farm = Farm()
    servers = [farm.start() for _ in range(2)]
    try:
        train(sys.argv[1], json.dumps([address for _, address in servers]))
    finally:
        for pid, _ in servers:
            farm.kill(pid)
        farm.close()


# -- who watches it --------------------------------------------------------------------------------


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def steps_of(where: Path) -> int:
    """How many it has taken so far."""
    return len(list(where.glob("step-*")))


def judge(where: Path) -> None:
    """Its rows are those of a run that was never disturbed, and its servers those of before."""
    result = json.loads((where / "result").read_text())
    assert result["epochs"][0] == result["epochs"][1]
    twin = local(threads=1).open([TABLE], OPTIMIZER, seed=3)
    for step in range(1, result["steps"] + 1):
        push(twin, step)
    with np.load(where / "rows.npz") as rows:
        for plane, values in twin.read_all("t")[1].items():
            assert rows[plane].tobytes() == values.tobytes()


if __name__ == "__main__":
    main()
