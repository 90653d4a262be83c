"""Several processes train one model: rows on shard servers, the dense network under DDP."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import LocalStore
from emberkeep.cluster.remote.processes import Connect
from emberkeep.repository import Repository
from emberkeep.train.hooks import Hook, Step
from tests.faults.lives import Nursery
from tests.servers import Farm, FarmLauncher
from tests.waiting import until

SMALL = [
    "data.samples=1500",
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
    """If asked to `pause`, leaves a file when step 10 has ended, and goes on once that is gone.
    Leaves one that tells of a recovery."""

    def __init__(self, where: str, pause: bool) -> None:
        self._where, self._pause = where, pause

    def on_step(self, step: Step) -> None:
        if step.number == 10 and self._pause:
            ten = Path(f"{self._where}.ten")
            ten.touch()
            until(lambda: not ten.exists(), "the parent, which saw step 10")

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        if event == "recovered":
            Path(f"{self._where}.recovered").write_text(json.dumps(details))


def work(given: str, *more: str) -> None:
    """What one worker does, in a process of its own."""
    faulthandler.dump_traceback_later(300, exit=True)
    import torch.distributed as dist

    from emberkeep.train import build
    from emberkeep.train.loop import run
    from emberkeep.train.run_config import demo

    rank, addresses, where, pause = json.loads(given)
    dist.init_process_group("gloo", init_method=f"file://{where}.meeting", rank=rank, world_size=2)
    build._cluster = lambda *_: Connect(addresses=tuple(addresses), rank=rank, world=2)
    hooks = [Signs(where, pause)] if rank == 0 else []
    result = run(demo([*SMALL, *more]), rank=rank, hooks=hooks)
    Path(f"{where}.{rank}").write_text(json.dumps(result.to_dict()))
    dist.barrier()


def trained(
    nursery: Nursery, hosts: FarmLauncher, where: Path, *more: str,
    beside: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The results of two workers; `beside` is called when both have made ten steps."""
    addresses = [hosts.address(shard) for shard in range(hosts.count)]
    logs = [Path(f"{where}.{rank}.log") for rank in range(2)]
    workers = [
        nursery.start(
            "call",
            "tests.integration.test_workers:work",
            json.dumps([rank, addresses, str(where), beside is not None]),
            *more,
            log=logs[rank],
        )
        for rank in range(2)
    ]
    if beside is not None:
        ten = Path(f"{where}.ten")
        until(ten.exists, "step 10")
        beside()
        ten.unlink()
    codes = [nursery.wait(worker) for worker in workers]
    assert codes == [0, 0], "".join(log.read_text() for log in logs)
    return [json.loads(Path(f"{where}.{rank}").read_text()) for rank in range(2)]


def test_workers_train_together_and_resume_with_the_same_bits(
    farm: Farm, nursery: Nursery, tmp_path: Path
) -> None:
    hosts = FarmLauncher(farm, 2)
    whole = trained(nursery, hosts, tmp_path / "whole")
    assert whole[0]["digest"] == whole[1]["digest"]  # one set of rows, one dense network
    path = tmp_path / "r"
    saved = ["checkpoint.every=7 steps", f"checkpoint.path={path}"]
    first = trained(nursery, hosts, tmp_path / "saved", *saved)
    assert first[0]["digest"] == whole[0]["digest"]
    again = trained(nursery, hosts, tmp_path / "again", *saved)
    assert again[0]["resumed_step"] == whole[0]["steps"]
    assert again[0]["digest"] == whole[0]["digest"]
    hosts.end()


@pytest.mark.soak
def test_workers_go_on_when_a_server_is_killed_and_partially_recovered(
    farm: Farm, nursery: Nursery, tmp_path: Path
) -> None:
    hosts = FarmLauncher(farm, 2)

    def kill() -> None:
        hosts.kill(1)
        farm.start(port=int(hosts.address(1).rpartition(":")[2]))

    results = trained(
        nursery, hosts, tmp_path / "w",
        "checkpoint.every=7 steps", f"checkpoint.path={tmp_path / 'r'}",
        "checkpoint.recovery=partial", "checkpoint.keep=100", "data.samples=6000",
        beside=kill,
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
