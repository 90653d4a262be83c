"""Widths that were measured, wherever a run goes on from; and restores that are counted once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.blobs.local_store import LocalStore
from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import ShardLostError
from emberkeep.keeper import tiered_saver
from emberkeep.keeper.calibration import is_calibrated
from emberkeep.keeper.run_saver import DurableStep
from emberkeep.repository import Repository
from emberkeep.strategies import Strategy
from emberkeep.tables import Tier
from tests.integration.test_tiered_keeper import (
    OFTEN,
    SHARDS,
    TABLES,
    OnServers,
    Run,
    lose_with_files,
)
from tests.servers import Farm, FarmLauncher
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")
BUDGET = 0.5


def in_tiers(strategy: Strategy) -> Strategy:
    return replace(strategy, spec=replace(strategy.spec, accuracy_budget=BUDGET))


def calibrated(run: Run) -> Run:
    """A run of nine steps, with the version of step 6 as measured after step 5."""

    def validate() -> float:
        with torch.no_grad():
            return float(run.model(2).square().mean())

    run.keeper.resume()
    run.train(5)
    ek.calibrate(run.keeper, validate)
    return run.train(4)


def codecs_of(run: Run) -> list[Any]:
    repository = run.keeper._saver.repository  # type: ignore[union-attr]
    return [repository.manifest(version).layout["codecs"] for version in repository.versions()]


def goes_on(run: Run, expected: Any) -> None:
    """The next version is as the last one of the process before."""
    assert expected
    assert is_calibrated(run.keeper)
    run.train(12 - run.keeper.steps)
    assert codecs_of(run)[-1] == expected
    run.end()


@pytest.mark.parametrize("where", ["memory", "batches"])
def test_a_run_that_adopts_its_rows_takes_its_widths(
    farm: Farm, tmp_path: Path, where: str
) -> None:
    tier = Tier(tmp_path / "t", memory=40_000) if where == "batches" else None
    strategy = ek.incremental(every=6, accuracy_budget=BUDGET) if tier is None else in_tiers(OFTEN)
    servers = FarmLauncher(farm, SHARDS, tier=tier)
    try:
        first = calibrated(Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", strategy))

        def known() -> bool:  # with the next renewal of their leases
            return all(shard.status()["run"]["repository"] for shard in first.cluster.handles)

        until(known, "servers to know their run")
        expected = codecs_of(first)[-1]
        first.end()
        again = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", strategy)
        assert again.cluster.adopted is not None
        kept = again.keeper.resume()
        assert kept is not None
        assert kept.step == (6 if tier is None else 8)
        goes_on(again, expected)
    finally:
        servers.end()


def test_a_run_that_goes_on_from_a_batch_takes_its_widths(tmp_path: Path) -> None:
    def start() -> Run:
        tables = [replace(t, tier=Tier(tmp_path / "t", memory=60_000)) for t in TABLES]
        return Run(local(shards=SHARDS), tmp_path / "r", in_tiers(OFTEN), tables=tables)

    first = calibrated(start())
    expected = codecs_of(first)[-1]
    first.end()
    again = start()
    assert again.keeper.resume() == DurableStep(8)
    goes_on(again, expected)


# -- restores that are counted -------------------------------------------------------------------


def restores(path: Path) -> int:
    return Repository.open(LocalStore(path)).restores(exact=False)


def test_shards_without_files_that_come_from_a_rounded_version_are_one_restore(
    farm: Farm, tmp_path: Path
) -> None:
    servers = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    strategy = ek.tiered(every=4, remote=4, recovery="partial", bits=4)
    run = Run(OnServers(servers), tmp_path / "r", strategy)
    run.keeper.resume()
    run.train(4)
    lose_with_files(run, servers, tmp_path / "t", 1, 2)
    made = run.keeper.recover(None)
    assert made is not None
    assert (made.scope, made.shards) == ("partial", (1, 2))
    assert restores(tmp_path / "r") == 1
    run.end()
    servers.end()


def test_shards_that_come_from_their_files_are_none(farm: Farm, tmp_path: Path) -> None:
    servers = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    strategy = ek.tiered(every=4, remote=4, recovery="partial", bits=4)
    run = Run(OnServers(servers), tmp_path / "r", strategy)
    run.keeper.resume()
    run.train(4)
    servers.kill(1)
    with pytest.raises(ShardLostError):
        run.cluster.handles[1].digest("a")
    assert run.keeper.recover(None) is not None
    assert restores(tmp_path / "r") == 0
    run.end()
    servers.end()


class TwoClusters(nn.Module):
    """Two modules of rows, each with shards and files of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = [
            ek.EmbeddingBags(
                [ek.Table(name, rows=60, dim=4, tier=Tier(path / name, memory=60_000))],
                optimizer=ek.Adagrad(lr=0.1), cluster=ek.local(shards=2),
            )
            for name in ("a", "b")
        ]  # fmt: skip
        self.both = nn.ModuleList(self.bags)
        self.top = nn.Linear(8, 1)

    def forward(self, step: int) -> torch.Tensor:
        ids = (torch.arange(16) * 7 + step) % 60
        found = [bags({name: ids})[:, 0] for name, bags in zip("ab", self.bags, strict=True)]
        out: torch.Tensor = self.top(torch.cat(found, 1))
        return out


@pytest.mark.parametrize("fails", [False, True], ids=["both", "one is not recovered"])
def test_a_failure_in_two_clusters_is_one_restore(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TwoClusters(tmp_path / "t")
    optimizers = [
        *(bags.optimizer for bags in model.bags),
        torch.optim.Adam(model.top.parameters(), lr=0.01),
    ]
    keeper = ek.Keeper(
        tmp_path / "r", model, optimizers, total_steps=100,
        strategy=ek.tiered(every=50, remote=50, recovery="partial", bits=4),
    )  # fmt: skip
    keeper.resume()
    model(0).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    keeper.step()
    for bags in model.bags:
        bags.cluster.kill(1)  # type: ignore[attr-defined]
    if fails:
        recover, calls = tiered_saver.recover_partially, []

        def second_fails(*given: Any) -> Any:
            calls.append(given)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return recover(*given)

        monkeypatch.setattr(tiered_saver, "recover_partially", second_fails)
        with pytest.raises(KeyboardInterrupt):
            keeper.recover()
        monkeypatch.undo()
    else:
        made = keeper.recover()
        assert made is not None
        assert (made.scope, made.shards, made.version) == ("partial", (1, 3), 1)  # no batch yet
    assert restores(tmp_path / "r") == 1
    keeper.close(save=False)
