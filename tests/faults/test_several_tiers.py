"""A run over several tiers comes back at one step, wherever it was interrupted."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import DamageError, EmberkeepError, TierError
from emberkeep.tiers import durable_open
from tests.contracts.engine import state
from tests.faults.test_tier_faults import end, start, train
from tests.unit.tiers.test_tiered_slab import Unsynced


class Dying(Unsynced):
    """After so many calls that change something every further one fails: the process is gone."""

    left: int | None = None

    @classmethod
    def _call(cls) -> None:
        if cls.left is not None:
            cls.left -= 1
            if cls.left < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def create(self, path: str) -> int:
        self._call()
        return super().create(path)

    def write_at(self, handle: int, view: memoryview, offset: int) -> None:
        self._call()
        super().write_at(handle, view, offset)

    def link(self, source: str, target: str) -> None:
        self._call()
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._call()
        super().unlink(path)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(durable_open, "DISK", Dying)
    Dying.left = None
    yield
    Dying.left = None


def save(clusters: list[LocalCluster], batch: int) -> None:
    first, *beside = clusters
    try:
        for future in first.prepare_tiers(batch, beside=beside):
            future.result(60)
        first.commit_tiers(beside=beside)
    except EmberkeepError:
        first.abandon_tiers(beside=beside)
        raise


def decisions(*tiers: Path) -> list[str]:
    return sorted(f.name for path in tiers for f in (path / "state").glob("decision-*"))


def test_interrupted_anywhere_all_tiers_come_back_at_one_batch(tmp_path: Path) -> None:
    """At every call that changes a file, and opened in either order afterwards."""
    seen, at = set(), 0
    survived = False
    while not survived:
        tiers = [tmp_path / f"{at}-t", tmp_path / f"{at}-u"]
        clusters = [start(path, shards=2) for path in tiers]
        expected = {}
        for batch in (1, 2):
            for cluster in clusters:
                train(cluster, batch)
            expected[batch] = [state(cluster) for cluster in clusters]
            Dying.left = None if batch == 1 else at
            try:
                save(clusters, batch)
            except EmberkeepError:
                assert batch == 2
        survived = Dying.left is not None and Dying.left >= 0
        Dying.left = None
        for cluster in clusters:
            end(cluster)
        for places in ([at % 2, 1 - at % 2], [0, 1]):
            back: dict[int, LocalCluster] = {p: start(tiers[p], shards=2) for p in places}
            batches = {cluster.tier_batch() for cluster in back.values()}
            assert len(batches) == 1, f"after call {at}: {batches}"
            (batch,) = batches
            assert batch is not None
            assert [state(back[p]) for p in (0, 1)] == expected[batch]
            for cluster in back.values():
                end(cluster)
        assert decisions(*tiers) == []
        seen.add(batch)
        at += 1
    assert seen == {1, 2}
    assert at > 10


class Model(nn.Module):
    """Two modules: one over two tiers, one over a third."""

    def __init__(self, path: Path, *, shards: int = 2) -> None:
        super().__init__()

        def table(name: str, tier: str) -> ek.Table:
            return ek.Table(name, rows=60, dim=4, tier=ek.Tier(path / tier, memory="1MB"))

        self.one = ek.EmbeddingBags(
            [table("a", "x"), table("b", "y")], optimizer=ek.Adagrad(lr=0.1),
            cluster=ek.local(shards=shards),
        )  # fmt: skip
        self.two = ek.EmbeddingBags(
            [table("c", "z")], optimizer=ek.SGD(lr=0.1), cluster=ek.local(shards=shards)
        )
        self.top = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        one, two = self.one({"a": ids, "b": ids}), self.two({"c": ids})
        out: torch.Tensor = self.top(torch.cat([one["a"], one["b"], two[:, 0]], 1))
        return out

    def clusters(self) -> list[Any]:
        return [self.one.cluster, self.two.cluster]


class Run:
    def __init__(self, path: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Model(path)
        dense = torch.optim.Adam(self.model.top.parameters(), lr=0.01)
        self.optimizers = [self.model.one.optimizer, self.model.two.optimizer, dense]
        strategy = ek.incremental(every="1000 steps")
        try:
            self.keeper = ek.Keeper(
                None, self.model, self.optimizers, **{"strategy": strategy, **options}
            )
        except BaseException:
            self.end()
            raise

    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = (torch.arange(8) * 7 + self.keeper.steps * 5) % 60
            self.model(ids.reshape(4, 2)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.keeper.step()

    def bits(self) -> list[Any]:
        dense = [parameter.detach().tolist() for parameter in self.model.top.parameters()]
        return [*map(state, self.model.clusters()), dense]

    def end(self) -> None:
        for cluster in self.model.clusters():
            cluster.close()


def saved(path: Path, steps: int) -> None:
    run = Run(path)
    run.train(steps)
    run.keeper.save()
    run.keeper.wait()
    run.train(1)  # is lost
    run.end()


def test_a_run_over_several_tiers_goes_on_to_the_bit(tmp_path: Path) -> None:
    saved(tmp_path / "r", 3)
    run = Run(tmp_path / "r")
    assert run.keeper.resume() == 3
    run.train(2)
    whole = Run(tmp_path / "whole")
    whole.train(5)
    assert run.bits() == whole.bits()
    assert run.keeper.close() == 5
    run.end()
    whole.end()
    assert decisions(*(tmp_path / "r" / tier for tier in "xyz")) == []


def test_sigterm_saves_all_of_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    run.train(1)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        run.train(1)
    bits = run.bits()
    run.end()
    run = Run(tmp_path / "r")
    assert run.keeper.resume() == 2
    assert run.bits() == bits
    run.end()


@pytest.mark.parametrize("module", [0, 1])
def test_a_loss_in_one_module_takes_all_of_them_back(tmp_path: Path, module: int) -> None:
    run = Run(tmp_path / "r")
    run.train(2)
    run.keeper.save()
    run.keeper.wait()
    run.train(1)
    run.model.clusters()[module].kill(1)
    with run.keeper.surviving():
        run.train(1)
    assert run.keeper.steps == 2
    run.train(3)
    whole = Run(tmp_path / "whole")
    whole.train(5)
    assert run.bits() == whole.bits()
    run.end()
    whole.end()


def test_a_loss_in_one_module_can_be_recovered_alone(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "r", strategy=ek.partial(every="1000 steps", priority=None), total_steps=100
    )
    run.train(2)
    run.keeper.save()
    run.keeper.wait()
    run.train(1)
    run.model.clusters()[1].kill(0)
    run.train(1)
    assert run.keeper.steps == 4
    made = run.keeper.recoveries()
    assert made is not None
    assert (made.partial, made.full) == (1, 0)
    assert run.keeper.close() == 4
    run.end()


@pytest.mark.parametrize("tier", ["x", "y", "z"])
def test_a_tier_that_is_not_mounted_is_missed(tmp_path: Path, tier: str) -> None:
    """Whichever it is: also the one in whose directory nothing but rows is."""
    saved(tmp_path / "r", 3)
    (tmp_path / "r" / tier).rename(tmp_path / "away")
    with pytest.raises(DamageError, match=f"{tier} at no step yet"):
        Run(tmp_path / "r")
    for file in sorted((tmp_path / "r" / tier).rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (tmp_path / "r" / tier).rmdir()
    (tmp_path / "away").rename(tmp_path / "r" / tier)
    run = Run(tmp_path / "r")
    assert run.keeper.resume() == 3
    run.end()


def test_what_another_tier_decides_is_not_guessed(tmp_path: Path) -> None:
    tiers = [tmp_path / "t", tmp_path / "u"]
    clusters = [start(path, shards=2) for path in tiers]
    for future in clusters[0].prepare_tiers(1, beside=clusters[1:]):
        future.result(60)
    for cluster in clusters:
        end(cluster)
    (tmp_path / "t").rename(tmp_path / "away")
    with pytest.raises(TierError, match=r"is decided in .*t, where there is no tier"):
        start(tiers[1], shards=2)
    (tmp_path / "t").mkdir()  # an empty mount point
    with pytest.raises(TierError, match="is decided in"):
        start(tiers[1], shards=2)
