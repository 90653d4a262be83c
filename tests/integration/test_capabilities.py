"""What a holder of rows can do beyond the plain way is done when `Keeper` asks for it.

A capability is optional: a target that lacks it is served the plain way, slower and right. So
one that gets lost between a keeper and its rows fails no other test. Here calls are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.checkpoint import targets
from emberkeep.checkpoint.targets import (
    ExtractsItself,
    InstallsScattered,
    LimitsRows,
    LoadsItself,
    NoticesEdits,
    WritesItself,
)
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_rows import RemoteRows
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.cluster.shard import Shard
from emberkeep.keeper.torch_tables import TorchTables
from emberkeep.runtime.pool import Pool
from emberkeep.strategies import Strategy
from emberkeep.tables import Optimizer, Table
from tests.servers import Farm, FarmLauncher

GRID, CHAIN = ek.all_versions(every=4), ek.incremental(every=4)

# Of each capability: its method, a strategy whose versions ask for it, and who must be asked, by
# what a model is made of. When single shards come back, it is the shards that are asked.
CAPABILITIES: dict[type, tuple[str, Strategy, dict[str, list[type]], dict[str, type]]] = {
    InstallsScattered: (
        "install_scattered",
        GRID,
        {"local": [LocalCluster], "servers": [], "mixed": [LocalCluster, TorchTables]},
        {"local": Shard, "mixed": Shard},
    ),
    LoadsItself: (
        "load_version",
        CHAIN,
        {"local": [], "servers": [FlightCluster], "mixed": [FlightCluster]},
        {"servers": RemoteShard, "mixed": RemoteShard},
    ),
    WritesItself: (
        "write",
        CHAIN,
        {"local": [], "servers": [RemoteRows], "mixed": [RemoteRows]},
        {},
    ),
    ExtractsItself: (
        "extract",
        GRID,
        {"local": [], "servers": [FlightCluster], "mixed": [FlightCluster]},
        {},
    ),
    LimitsRows: (
        "check_room",
        CHAIN,
        {
            "local": [LocalCluster],
            "servers": [FlightCluster],
            "mixed": [LocalCluster, FlightCluster],
        },
        {},
    ),
    NoticesEdits: (
        "check_edits",
        CHAIN,
        {"local": [], "servers": [], "mixed": [TorchTables]},
        {},
    ),
}
MODELS = ("local", "servers", "mixed")


class OnServers:
    """Where rows live: two servers, which serve one cluster after the other."""

    def __init__(self, farm: Farm) -> None:
        self.hosts = FarmLauncher(farm, 2)

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        return FlightCluster(tables, optimizer, self.hosts, seed=seed, pool=Pool(1))


@pytest.fixture(scope="module")
def on_servers(farm: Farm) -> Iterator[OnServers]:
    started = OnServers(farm)
    yield started
    started.hosts.end()


class Model(nn.Module):
    """Tables of one name in every place that was asked for, so that versions rename them."""

    def __init__(self, kind: str, on_servers: OnServers) -> None:
        super().__init__()
        torch.manual_seed(0)
        places = {"local": [ek.local(shards=2)], "servers": [on_servers]}
        places["mixed"] = [*places["local"], *places["servers"]]
        tables = [
            ek.Table("fixed", rows=60, dim=4),
            ek.Table("grown", rows=None, capacity=90, dim=4),
        ]
        self.bags = nn.ModuleList(
            ek.EmbeddingBags(tables, optimizer=ek.Adagrad(lr=0.1), cluster=place)
            for place in places[kind]
        )
        self.torch = nn.Embedding(60, 4, sparse=True) if kind == "mixed" else None
        self.dense = nn.Linear(4, 1)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        rows = [] if self.torch is None else [torch.optim.Adagrad(self.torch.parameters(), 0.1)]
        return [torch.optim.SGD(self.dense.parameters(), 0.1), *rows]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [bags({"fixed": ids, "grown": ids}).sum(1).reshape(-1, 4) for bags in self.bags]
        if self.torch is not None:
            parts.append(self.torch(ids))
        return self.dense(torch.cat(parts)).sum()

    def rows(self) -> list[Any]:
        found: list[Any] = [] if self.torch is None else [self.torch.weight.detach().numpy().copy()]
        for bags in self.bags:
            for table in ("fixed", "grown"):
                ids, planes = bags.cluster.read_all(table)
                found += [ids, *(planes[name] for name in sorted(planes))]
        return found

    def close(self) -> None:
        for bags in self.bags:
            if isinstance(bags.cluster, FlightCluster):
                bags.cluster.close()


def train(model: Model, keeper: ek.Keeper, optimizers: Any, steps: range) -> None:
    for step in steps:
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 60, 16))
        model(ids).backward()
        for optimizer in (*optimizers, *(bags.optimizer for bags in model.bags)):
            optimizer.step()
            optimizer.zero_grad()
        keeper.step()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[type, str]]:
    """How often each class did what only it can, or took rows the plain way."""
    counted: Counter[tuple[type, str]] = Counter()

    def count(cls: type, name: str) -> None:
        method = getattr(cls, name)

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            counted[cls, name] += 1
            return method(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, counting)

    for name, _, models, shards in CAPABILITIES.values():
        for cls in {cls for asked in models.values() for cls in asked} | set(shards.values()):
            count(cls, name)
    for cls in (LocalCluster, TorchTables, FlightCluster):
        count(cls, "install")
    return counted


def test_every_capability_is_in_the_list() -> None:
    optional = {
        value for value in vars(targets).values() if getattr(value, "_is_runtime_protocol", False)
    }
    assert optional == set(CAPABILITIES)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: capability.__name__)
def test_a_keeper_reaches_it(
    capability: type, kind: str, on_servers: OnServers, tmp_path: Path,
    calls: Counter[tuple[type, str]],
) -> None:  # fmt: skip
    method, strategy, asked, _ = CAPABILITIES[capability]
    model = Model(kind, on_servers)
    optimizers = model.optimizers()
    with ek.Keeper(tmp_path / "run", model, optimizers, strategy=strategy) as keeper:
        train(model, keeper, optimizers, range(10))
    expected = model.rows()
    model.close()

    again = Model(kind, on_servers)
    with ek.Keeper(tmp_path / "run", again, again.optimizers(), strategy=strategy) as keeper:
        keeper.resume()
        for found, wanted in zip(again.rows(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    again.close()
    for cls in asked[kind]:
        assert calls[cls, method], f"{cls.__name__}.{method} was never called"
        if capability not in (LimitsRows, NoticesEdits):  # asked whichever way rows come
            assert not calls[cls, "install"], f"{cls.__name__} was given rows the plain way"


@pytest.mark.parametrize(
    ("capability", "kind"),
    [(capability, kind) for capability, it in CAPABILITIES.items() for kind in it[3]],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_a_keeper_reaches_it_on_the_shard_that_comes_back(
    capability: type, kind: str, on_servers: OnServers, tmp_path: Path,
    calls: Counter[tuple[type, str]],
) -> None:  # fmt: skip
    method, strategy, _, shards = CAPABILITIES[capability]
    model = Model(kind, on_servers)
    optimizers = model.optimizers()
    with ek.Keeper(tmp_path / "run", model, optimizers, strategy=strategy) as keeper:
        train(model, keeper, optimizers, range(8))
        keeper.wait()
        expected = model.rows()
        for bags in model.bags:
            # Nothing was trained since the version: the shard alone is brought back.
            if shards[kind] is RemoteShard and isinstance(bags.cluster, FlightCluster):
                bags.cluster.launcher.kill(1)
            elif shards[kind] is Shard and isinstance(bags.cluster, LocalCluster):
                bags.cluster.kill(1)
        calls.clear()
        for found, wanted in zip(model.rows(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert keeper.recoveries().partial == 1
        assert calls[shards[kind], method]
    model.close()
