"""Batches in the files of servers, often, and versions in a repository, seldom: one run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import ShardLostError
from emberkeep.keeper.run_saver import DurableStep
from emberkeep.repository import Manifest
from emberkeep.runtime import pool
from emberkeep.strategies import Strategy
from emberkeep.tables import Optimizer, Table, Tier
from tests.contracts.engine import state as rows
from tests.servers import Farm, FarmLauncher

pytestmark = pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")
TABLES = [
    Table("a", rows=60, dim=4),
    Table("b", rows=None, capacity=40, dim=4, on_full="evict_oldest"),
    Table("c", rows=20, dim=3),
]
SHARDS = 3
TOTAL = 100


@pytest.fixture
def root() -> Iterator[Path]:
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=where, prefix="emberkeep-") as path:
        yield Path(path)


@pytest.fixture
def launcher(farm: Farm, root: Path) -> Iterator[FarmLauncher]:
    started = FarmLauncher(farm, SHARDS, tier=Tier(root / "t", memory=40_000))
    yield started
    started.end()


class OnServers:
    """Where rows live: the servers of a test."""

    def __init__(self, launcher: FarmLauncher) -> None:
        self.launcher = launcher

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        return FlightCluster(tables, optimizer, self.launcher, seed=seed, pool=pool.Pool(1))


class Model(nn.Module):
    def __init__(self, tables: Sequence[Table], cluster: Any) -> None:
        super().__init__()
        self.bags = ek.EmbeddingBags(
            tables, optimizer=ek.Adagrad(lr=0.1), cluster=cluster, output="dict"
        )
        self.top = nn.Linear(11, 1)

    def forward(self, step: int) -> torch.Tensor:
        ids = {
            "a": (torch.arange(8) * 7 + step * 5) % 60,
            "b": (torch.arange(8) * 3 + step * 2) % 90,
            "c": (torch.arange(8) + step) % 20,
        }
        bags = self.bags({name: given.reshape(4, 2) for name, given in ids.items()})
        out: torch.Tensor = self.top(torch.cat([bags["a"], bags["b"], bags["c"]], 1))
        return out


class Run:
    """A model trained step by step, on ids that follow from the step."""

    def __init__(
        self, cluster: Any, where: Path | None, strategy: Strategy, *,
        tables: Sequence[Table] = TABLES, **options: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.model = Model(tables, cluster)
        self.optimizers = [
            self.model.bags.optimizer,
            torch.optim.Adam(self.model.top.parameters(), lr=0.01),
        ]
        self.events: list[tuple[str, Any]] = []
        try:
            self.keeper = ek.Keeper(
                where, self.model, self.optimizers, strategy=strategy, total_steps=TOTAL,
                on_event=lambda name, details: self.events.append((name, details)), **options,
            )  # fmt: skip
        except BaseException:
            self.end()
            raise

    @property
    def cluster(self) -> Any:
        return self.model.bags.cluster

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.model(self.keeper.steps).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.keeper.step()
            self.keeper.wait()
        return self

    def bits(self) -> list[Any]:
        dense = [parameter.detach().tolist() for parameter in self.model.top.parameters()]
        return [rows(self.cluster), dense]

    def heard(self, event: str) -> list[Any]:
        return [details for name, details in self.events if name == event]

    def end(self) -> None:
        """As if the process were gone: nothing more is saved."""
        self.cluster.close()


def plain(steps: int) -> list[Any]:
    """The bits of a run in memory, after so many steps."""
    torch.manual_seed(0)
    model = Model(TABLES, local(shards=SHARDS))
    optimizers = [model.bags.optimizer, torch.optim.Adam(model.top.parameters(), lr=0.01)]
    for step in range(steps):
        model(step).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dense = [parameter.detach().tolist() for parameter in model.top.parameters()]
    return [rows(model.bags.cluster), dense]


OFTEN = ek.tiered(every=2, remote=6)


def test_a_run_goes_on_from_the_batch_that_servers_have(launcher: FarmLauncher, root: Path) -> None:
    first = Run(OnServers(launcher), root / "r", OFTEN)
    assert first.keeper.resume() is None
    first.train(9)
    saved = [(s["step"], s["version"]) for s in first.heard("saved")]
    assert [step for step, version in saved if version is None] == [2, 4, 6, 8]
    assert [step for step, version in saved if version is not None] == [0, 6]
    first.end()
    again = Run(OnServers(launcher), root / "r", OFTEN)
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.train(5)
    assert again.bits() == plain(13)
    last = again.keeper.close()
    assert isinstance(last, Manifest)
    assert last.step == 13
    again.end()
    ended = Run(OnServers(launcher), root / "r", OFTEN)
    kept = ended.keeper.resume()
    assert kept is not None
    assert kept.step == 13
    assert ended.bits() == plain(13)
    ended.end()
    # One batch, its state; the decision about it went when every server had recorded it.
    left = sorted(path.name for path in (root / "r" / "tiers").iterdir())
    assert [name.rpartition("-")[0] for name in left if name.startswith("step")] == []


@pytest.mark.parametrize("gone", ["one", "all"])
def test_files_that_are_gone_come_from_the_repository(
    launcher: FarmLauncher, root: Path, gone: str
) -> None:
    first = Run(OnServers(launcher), root / "r", OFTEN)
    first.keeper.resume()
    first.train(8)
    first.end()
    shutil.rmtree(root / "t" / "shard-1" if gone == "one" else root / "t")
    again = Run(OnServers(launcher), root / "r", OFTEN)
    kept = again.keeper.resume()
    assert isinstance(kept, Manifest)
    assert kept.step == 6
    assert again.bits() == plain(6)
    again.train(1).end()  # nothing is durable at 8 any more, for anybody
    third = Run(OnServers(launcher), root / "r", OFTEN)
    kept = third.keeper.resume()
    assert kept is not None
    assert kept.step == 6
    third.train(4)
    assert third.bits() == plain(10)
    third.end()


@pytest.mark.parametrize("after", [0, 1])
def test_a_server_that_is_killed_takes_all_back_to_the_batch(
    launcher: FarmLauncher, root: Path, after: int
) -> None:
    run = Run(OnServers(launcher), root / "r", OFTEN)
    run.keeper.resume()
    run.train(8 + after)
    launcher.kill(1)
    with run.keeper.surviving():
        run.train(1)
    assert run.keeper.steps == 8
    (made,) = run.heard("recovered")
    assert (made["scope"], made["step"], made["repeated_steps"]) == ("full", 8, after)
    assert run.bits() == plain(8)
    run.train(4)
    assert run.bits() == plain(12)
    run.end()


def test_a_server_that_is_killed_comes_back_alone_from_its_files(
    launcher: FarmLauncher, root: Path
) -> None:
    run = Run(OnServers(launcher), root / "r", ek.tiered(every=4, remote=50, recovery="partial"))
    run.keeper.resume()
    run.train(6)
    before = [run.cluster.handles[s].digest(t.name) for s in (0, 2) for t in TABLES]
    launcher.kill(1)
    shard = run.cluster.handles[1]
    with pytest.raises(ShardLostError):
        shard.digest("a")
    assert run.keeper.recover() is not None
    (made,) = run.heard("recovered")
    assert (made["scope"], made["shards"], made["version"]) == ("partial", (1,), None)
    assert made["pls"] == pytest.approx(2 / (TOTAL * SHARDS))
    assert before == [run.cluster.handles[s].digest(t.name) for s in (0, 2) for t in TABLES]
    run.train(2)
    assert run.keeper.steps == 8
    run.end()
