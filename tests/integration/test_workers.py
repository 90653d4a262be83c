"""Several processes train one model: rows on shard servers, the dense network under DDP."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
from pathlib import Path
from typing import Any

from emberkeep.cluster.servers import Connect
from tests.servers import Farm, FarmHosts

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


def work(rank: int, addresses: list[str], where: str, more: list[str]) -> None:
    faulthandler.dump_traceback_later(45, exit=True)
    import torch.distributed as dist

    from emberkeep.train import build
    from emberkeep.train.loop import run
    from emberkeep.train.settings import demo

    dist.init_process_group("gloo", init_method=f"file://{where}.meeting", rank=rank, world_size=2)
    build._cluster = lambda *_: Connect(addresses=tuple(addresses), rank=rank, world=2)
    result = run(demo([*SMALL, *more]), rank=rank)
    Path(f"{where}.{rank}").write_text(json.dumps(result.to_dict()))
    dist.barrier()


def trained(hosts: FarmHosts, where: Path, *more: str) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    addresses = [hosts.address(shard) for shard in range(hosts.count)]
    processes = [
        context.Process(target=work, args=(rank, addresses, str(where), list(more)))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [0, 0]
    return [json.loads(Path(f"{where}.{rank}").read_text()) for rank in range(2)]


def test_workers_train_together_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    farm = Farm()
    hosts = FarmHosts(farm, 2)
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
    farm.close()
