"""A warm start of several ranks: rows on servers are loaded once, all else by every rank."""

from __future__ import annotations

import faulthandler
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.cluster.remote.processes import Connect
from tests.faults.lives import Nursery
from tests.servers import Farm, FarmLauncher

ROWS = 12


class Net(nn.Module):
    def __init__(self, bags: ek.EmbeddingBags, names: tuple[str, str]) -> None:
        super().__init__()
        self.bags = bags
        for name in names:
            layer = nn.Embedding(ROWS, 2, sparse=True) if name[0] == "t" else nn.Linear(2, 2)
            self.add_module(name, layer)


def keeper_of(where: str, net: Net, network: nn.Module | None = None) -> ek.Keeper:
    tables = [p for name, p in net.named_parameters() if name.startswith("t")]
    dense = [p for name, p in net.named_parameters() if name[0] not in "tb"]
    optimizers = [net.bags.optimizer, torch.optim.SGD(tables, 0.1), torch.optim.Adam(dense, 0.1)]
    return ek.Keeper(where, network or net, optimizers)


def save_old(where: Path) -> Net:
    """A run of one process."""
    tables = [ek.Table("user", rows=ROWS, dim=2), ek.Table("gone", rows=ROWS, dim=2)]
    net = Net(ek.EmbeddingBags(tables, optimizer=ek.Adagrad(lr=0.1)), ("table", "head"))
    with keeper_of(str(where), net) as keeper:
        keeper.resume()
        ids = {"user": torch.arange(ROWS - 2), "gone": torch.arange(ROWS - 2)}
        net.bags(ids).square().sum().backward()
        net.bags.optimizer.step()
        keeper.step()
        keeper.save()
    return net


def start(given: str) -> None:
    """One rank of the new run."""
    faulthandler.dump_traceback_later(300, exit=True)
    import torch.distributed as dist

    rank, addresses, where, renamed = json.loads(given)
    dist.init_process_group("gloo", init_method=f"file://{where}.meeting", rank=rank, world_size=2)
    bags = ek.EmbeddingBags(
        [ek.Table("member", rows=ROWS, dim=3), ek.Table("new", rows=4, dim=3)],
        optimizer=ek.Adagrad(lr=0.1),
        cluster=Connect(addresses=tuple(addresses), rank=rank, world=2),
    )
    torch.manual_seed(rank)
    net = Net(bags, ("towers", "head"))
    network = nn.parallel.DistributedDataParallel(net)
    with keeper_of(f"{where}/new", net, network) as keeper:
        resumed = keeper.resume(source=f"{where}/old", partial=True, map=renamed)
        assert resumed is not None
        found = {
            "rows": bags.rows("member", range(ROWS))["weight"].tolist(),
            "towers": net.towers.weight.tolist(),  # type: ignore[union-attr,operator]
            "head": net.head.weight.tolist(),  # type: ignore[union-attr,operator]
            "step": keeper.steps,
            "skipped": getattr(resumed, "skipped", ()),
        }
        Path(f"{where}.{rank}").write_text(json.dumps(found))
        dist.barrier()


def lives(
    nursery: Nursery, hosts: FarmLauncher, where: Path, maps: list[dict[str, str]]
) -> tuple[list[int], list[str]]:
    """The ends of two ranks, and what they said."""
    addresses = [hosts.address(shard) for shard in range(hosts.count)]
    logs = [Path(f"{where}.{rank}.log") for rank in range(2)]
    ranks = [
        nursery.start(
            *("call", "tests.integration.test_warm_start_ranks:start"),
            json.dumps([rank, addresses, str(where), maps[rank]]), log=logs[rank],
        )
        for rank in range(2)
    ]  # fmt: skip
    return [nursery.wait(rank) for rank in ranks], [log.read_text() for log in logs]


@pytest.mark.soak
def test_two_ranks_start_from_a_run_of_one(nursery: Nursery, farm: Farm, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    old = save_old(tmp_path / "job" / "old")
    renamed = {"user": "member", "table": "towers"}
    hosts = FarmLauncher(farm, 2)
    codes, logs = lives(nursery, hosts, tmp_path / "job", [renamed, renamed])
    hosts.end()
    assert codes == [0, 0], logs
    found: list[Any] = [json.loads(Path(f"{tmp_path}/job.{rank}").read_text()) for rank in (0, 1)]
    assert found[0]["rows"] == found[1]["rows"]
    trained = old.bags.rows("user", range(ROWS - 2))["weight"]
    assert np.array_equal(np.array(found[0]["rows"], np.float32)[: ROWS - 2, :2], trained)
    for one in found:
        assert one["towers"] == old.table.weight.tolist()  # type: ignore[union-attr,operator]
        assert one["head"] == old.head.weight.tolist()  # type: ignore[union-attr,operator]
        assert one["step"] == 1
        assert "table 'gone' of the version is not in the model" in one["skipped"]
        assert "table 'new' is not in the version: it starts as it is" in one["skipped"]


@pytest.mark.soak
def test_what_one_rank_refuses_ends_all(nursery: Nursery, farm: Farm, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    save_old(tmp_path / "job" / "old")
    hosts = FarmLauncher(farm, 2)
    maps = [{"user": "member"}, {"usr": "member"}]
    codes, logs = lives(nursery, hosts, tmp_path / "job", maps)
    hosts.end()
    assert 0 not in codes
    assert "another rank could not start from the version" in logs[0]
    assert "map names 'usr'" in logs[1]
