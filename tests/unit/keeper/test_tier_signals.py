"""A signal while a run that its tiers keep ends: what is under way has half of `grace`, then it is
given up for what the run ends with."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.repository import Repository
from emberkeep.strategies import Strategy
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.tiers import durable_open
from tests.waiting import until

GRACE = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)


class Model(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        tables = [ek.Table("a", rows=60, dim=4, tier=ek.Tier(path, memory="1MB"))]
        self.bags = ek.EmbeddingBags(tables, optimizer=ek.Adagrad(lr=0.1))


class Run:
    """A run on a clock that passes quickly while somebody waits."""

    def __init__(self, path: Path, store: MemoryStore | None, strategy: Strategy) -> None:
        self.model = Model(path)
        self.events: list[tuple[str, int]] = []
        self.cancelled: Callable[[], object] = lambda: None
        self.keeper = ek.Keeper(
            store, self.model, self.model.bags.optimizer, strategy=strategy, grace=GRACE,
            clock=VirtualClock(pace=100), on_event=self._hear,
        )  # fmt: skip
        self.saver: Any = self.keeper._saver
        self.keeper.resume()

    def _hear(self, name: str, details: Any) -> None:
        if name == "save_cancelled":
            self.cancelled()
        if name in ("saved", "save_cancelled"):
            self.events.append((name, details["step"]))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model.bags({"a": torch.arange(16) + self.keeper.steps}).sum().backward()
            self.model.bags.optimizer.step()
            self.keeper.step()

    def stop_when_awaited(self, *savers: Any) -> None:
        """The signal comes when one of these has just looked for it."""

        def watched(look: Callable[[], object]) -> Callable[[], object]:
            def look_too_early() -> object:
                found = look()
                self.keeper.stop_after_step()
                return found

            return look_too_early

        for saver in savers:
            saver.stopping = watched(saver.stopping)


def hold_batches(run: Run) -> None:
    """A disk that is slow: the batch under way is not prepared before it is given up."""
    cluster = run.model.bags.cluster
    assert isinstance(cluster, LocalCluster)
    (slab,) = cluster.shards[0].tiers()
    upkeep, slab._upkeep_round = slab._upkeep_round, lambda _: False

    def go_on() -> None:
        slab._upkeep_round = upkeep

    run.cancelled = go_on


@pytest.mark.parametrize("before", [True, False])
def test_close_gives_up_a_batch_that_does_not_end(tmp_path: Path, before: bool) -> None:
    run = Run(tmp_path / "t", None, ek.incremental(every=1000))
    run.train(2)
    hold_batches(run)
    run.keeper.save()
    if before:
        run.keeper.stop_after_step()
    else:
        run.stop_when_awaited(run.saver)
    with pytest.raises(SystemExit, match="75"):
        run.keeper.close()
    assert run.events == [("save_cancelled", 2), ("saved", 2)]
    run.model.bags.cluster.close()


def test_a_save_that_waits_for_another_stops_waiting(tmp_path: Path) -> None:
    run = Run(tmp_path / "t", None, ek.incremental(every=1000))
    run.train(1)
    hold_batches(run)
    run.keeper.save()
    run.stop_when_awaited(run.saver)
    run.saver.make_room()
    assert run.saver.busy
    run.saver.give_up()
    run.model.bags.cluster.close()


class Blocked(MemoryStore):
    """Takes no data of the version of a `saver` before it is given up."""

    saver: Any = None

    def put(self, name: str, data: Any) -> int:
        if self.saver is not None and name.startswith("data"):
            until(self.saver._saving.cancelled.is_set, "the save to be given up", 20)
            self.saver = None
        return super().put(name, data)


def blocked(path: Path) -> tuple[Run, Blocked]:
    """A run whose version of step 4 is under way and does not end; the batch of that step has."""
    store = Blocked()
    run = Run(path, store, ek.tiered(every=2, remote=4, layout="full"))
    run.train(3)
    run.keeper.wait()
    store.saver = run.saver
    run.train(1)
    run.saver._tier.join()
    run.train(1)
    run.events.clear()
    assert not run.saver._saving.ended.is_set()
    return run, store


@pytest.mark.parametrize("before", [True, False])
def test_close_gives_up_a_version_that_does_not_end(tmp_path: Path, before: bool) -> None:
    run, store = blocked(tmp_path / "t")
    if before:
        run.keeper.stop_after_step()
    else:
        run.stop_when_awaited(run.saver)
    with pytest.raises(SystemExit, match="75"):
        run.keeper.close()
    assert run.events == [("save_cancelled", 4), ("saved", 5)]
    newest = Repository.open(store).newest_whole()
    assert newest is not None
    assert Repository.open(store).manifest(newest).step == 5
    run.model.bags.cluster.close()


def test_close_gives_up_batch_and_version(tmp_path: Path) -> None:
    run, _ = blocked(tmp_path / "t")
    hold_batches(run)
    run.train(1)
    assert run.saver._tier.busy
    run.stop_when_awaited(run.saver._tier)
    with pytest.raises(SystemExit, match="75"):
        run.keeper.close()
    assert sorted(run.events) == [("save_cancelled", 4), ("save_cancelled", 6), ("saved", 6)]
    run.model.bags.cluster.close()


def test_a_wait_that_a_signal_has_ended_gives_up_a_version(tmp_path: Path) -> None:
    run, _ = blocked(tmp_path / "t")
    run.keeper._waits.left = True
    run.keeper.__exit__(SystemExit, SystemExit(75), None)
    assert run.events == [("save_cancelled", 4)]
    run.model.bags.cluster.close()
