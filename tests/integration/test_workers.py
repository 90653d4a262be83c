"""Several processes train one model: rows on shard servers, the dense network under DDP."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import LocalStore
from emberkeep.cluster.remote.processes import Connect
from emberkeep.repository import Repository
from emberkeep.train.hooks import Hook, Step
from tests.servers import Farm, FarmLauncher

SMALL = [
    "data.samples=3000",
    "data.rows_total=1000",
    "run.batch_size=100",
    "run.compare=false",
    "model.bottom=[8]",
    "model.top=[8]",
    "tables.dim=4",
    "cluster.shards=2",
    "cluster.kind=ray",
    "cluster.workers=2",
]


class Signs(Hook):
    """Leaves a file when step 10 has ended, and one that tells of a recovery."""

    def __init__(self, where: str) -> None:
        self._where = where

    def on_step(self, step: Step) -> None:
        if step.number == 10:
            Path(f"{self._where}.ten").touch()

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        if event == "recovered":
            Path(f"{self._where}.recovered").write_text(json.dumps(details))


def work(rank: int, addresses: list[str], where: str, more: list[str]) -> None:
    faulthandler.dump_traceback_later(300, exit=True)
    import torch.distributed as dist

    from emberkeep.train import build
    from emberkeep.train.loop import run
    from emberkeep.train.run_config import demo

    dist.init_process_group("gloo", init_method=f"file://{where}.meeting", rank=rank, world_size=2)
    build._cluster = lambda *_: Connect(addresses=tuple(addresses), rank=rank, world=2)
    result = run(demo([*SMALL, *more]), rank=rank, hooks=[Signs(where)] if rank == 0 else [])
    Path(f"{where}.{rank}").write_text(json.dumps(result.to_dict()))
    dist.barrier()


def trained(
    hosts: FarmLauncher, where: Path, *more: str, beside: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    addresses = [hosts.address(shard) for shard in range(hosts.count)]
    processes = [
        context.Process(target=work, args=(rank, addresses, str(where), list(more)))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    beside()
    for process in processes:
        process.join(360)
    assert [process.exitcode for process in processes] == [0, 0]
    return [json.loads(Path(f"{where}.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    started = Farm()
    yield started
    started.close()


def test_workers_train_together_and_resume_with_the_same_bits(farm: Farm, tmp_path: Path) -> None:
    hosts = FarmLauncher(farm, 2)
    whole = trained(hosts, tmp_path / "whole")
    assert whole[0]["digest"] == whole[1]["digest"]  # one set of rows, one dense network
    path = tmp_path / "r"
    saved = ["checkpoint.every=7 steps", f"checkpoint.path={path}"]
    first = trained(hosts, tmp_path / "saved", *saved)
    assert first[0]["digest"] == whole[0]["digest"]
    again = trained(hosts, tmp_path / "again", *saved)
    assert again[0]["resumed_step"] == whole[0]["steps"]
    assert again[0]["digest"] == whole[0]["digest"]
    hosts.end()


@pytest.mark.soak
def test_workers_go_on_when_a_server_is_killed_and_partially_recovered(
    farm: Farm, tmp_path: Path
) -> None:
    hosts = FarmLauncher(farm, 2)

    def kill_after_ten() -> None:
        until = time.monotonic() + 60
        while not (tmp_path / "w.ten").exists() and time.monotonic() < until:
            time.sleep(0.005)
        hosts.kill(1)
        farm.start(port=int(hosts.address(1).rpartition(":")[2]))

    results = trained(
        hosts, tmp_path / "w", "checkpoint.every=7 steps", f"checkpoint.path={tmp_path / 'r'}",
        "checkpoint.recovery=partial", "checkpoint.keep=100", "data.samples=6000",
        beside=kill_after_ten,
    )  # fmt: skip
    assert results[0]["digest"] == results[1]["digest"]
    made = results[0]["recoveries"]
    assert (made["failures"], made["partial"], made["full"]) == (1, 1, 0)
    recovered = json.loads((tmp_path / "w.recovered").read_text())
    assert recovered["shards"] == [1]
    repository = Repository.open(LocalStore(tmp_path / "r"))
    saved = repository.manifest(repository.version(recovered["version"])).step
    assert made["pls"] == pytest.approx((recovered["step"] - saved) / results[0]["steps"] / 2)
    hosts.end()
