"""What saving takes: what training stood still for, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.blobs import open_store
from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import ConfigError, EmberkeepError
from emberkeep.keeper.costs import Ledger
from emberkeep.planning import measure_run
from emberkeep.planning.measure_run import measure
from emberkeep.planning.measurements import save_time
from emberkeep.repository import Repository
from emberkeep.tables import SGD, Table
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.train.checkpoint_settings import CheckpointSettings
from emberkeep.train.run_config import JobSettings, RunConfig, demo

SAVED = {
    "commit_ms": 5.0, "nbytes": 10, "version": 1, "step": 1, "kind": "full", "pause_ms": 1.0,
}  # fmt: skip


def test_restores_and_prioritised_versions_are_not_what_a_version_costs() -> None:
    clock = VirtualClock()
    ledger = Ledger(clock)
    with ledger.stalling():  # `close`, in which shards are recovered from a version
        with ledger.restoring(), ledger.restoring():
            clock.sleep(100)
        clock.sleep(1)
    for _ in range(2):
        ledger.paused(1000.0, whole=True, waited_ms=500.0)
        ledger.hear("saved", {**SAVED, "whole": True, "held_seconds": 2.5})
    for _ in range(6):
        ledger.paused(250.0, whole=False)
        ledger.hear("saved", {**SAVED, "whole": False, "held_seconds": 0.1})
    counters = ledger.counters()
    assert counters["stall_seconds"] == 6.6  # the rest of `close`, and rows copied before a push
    assert ledger.costs(0).restoring_seconds == 100
    assert (counters["versions"], counters["whole_versions"]) == (8, 2)
    assert counters["saving_seconds"] == 8.0  # cuts, waits, and rows copied before a push
    assert ledger.stall_of_version == 4.0


def test_a_plan_reads_whole_versions(tmp_path: Path) -> None:
    bags = ek.EmbeddingBags(
        [ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1), cluster=ek.local(shards=2)
    )
    strategy = ek.partial(every=4, priority="mfu", fraction=0.25, keep="all")
    keeper = ek.Keeper(tmp_path, bags, bags.optimizer, strategy=strategy, total_steps=16)
    with keeper:
        for step in range(16):
            bags({"item": torch.arange(8) + step}).sum().backward()
            bags.optimizer.step()
            bags.optimizer.zero_grad()
            keeper.step()
            keeper.wait()
    repository = Repository.open(open_store(str(tmp_path)))
    newest = repository.latest()
    assert newest is not None
    counters = repository.manifest(newest).counters
    assert counters["versions"] > 2 * counters["whole_versions"]
    assert save_time(repository).total_seconds() == pytest.approx(
        counters["saving_seconds"] / counters["whole_versions"], rel=0.01, abs=1e-5
    )


def test_rows_that_a_push_copies_first_are_counted() -> None:
    cluster = local(shards=1, threads=1).open([Table("t", rows=10, dim=2)], SGD(lr=0.1), seed=1)
    ids = RowIds(np.arange(4), np.array([0, 4]))
    cluster.track(None)
    cluster.push([ids], [np.ones((4, 2), np.float32)], lr=0.1)
    (frozen,) = cluster.freeze(None, 2**20)
    cluster.push([ids], [np.ones((4, 2), np.float32)], lr=0.1)
    for rows in frozen:
        list(rows.chunks(100))
        rows.close(())
    assert sum(rows.held_seconds for rows in frozen) > 0
    cluster.close()


TINY = [
    "data.samples=6000", "data.rows_total=1000", "run.batch_size=100", "tables.dim=4",
    "model.bottom=[8]", "model.top=[8]", "run.compare=false", "cluster.shards=2",
]  # fmt: skip


@pytest.mark.long
def test_a_machine_and_a_store_are_measured(tmp_path: Path) -> None:
    store = tmp_path / "store"
    found = measure(demo(TINY), store=str(store), steps=20)
    for time in (found.save, found.write, found.load, found.step):
        assert time is not None
        assert time > timedelta(0)
    assert found.rows is not None
    assert found.rows >= 1000
    assert found.table_nbytes == 4 * (4 + 1) * found.rows
    assert found.parity_slowdown is not None
    assert found.quantized is not None
    assert found.quantized.bits == 4
    assert found.tier is not None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="20 steps or more"):
        measure(demo(TINY), steps=5)


# -- the same in TOML ----------------------------------------------------------------------------


def settings(*changes: str) -> RunConfig:
    return demo([*TINY, "checkpoint.path=r", *changes])


def test_data_that_is_too_short_is_refused_after_one_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = []

    def train(_: RunConfig, watch: measure_run._Watch) -> None:
        trained.append(watch)
        watch._at += [0.1 * step for step in range(7)]

    monkeypatch.setattr(measure_run, "_train", train)
    with pytest.raises(ConfigError, match="the data is enough for 7: give it more samples"):
        measure(demo(TINY))
    assert len(trained) == 1


@pytest.mark.parametrize("store", ["ftp://there", "/proc/emberkeep"])
def test_a_store_that_cannot_be_used_is_refused_before_anything_is_trained(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_run, "_train", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(EmberkeepError):
        measure(demo(TINY), store=store)


def test_a_job_in_toml() -> None:
    job = ["job.mtbf=28h", "job.duration=56h", "job.save=5.7min", "job.load=2.5min",
           "job.reschedule=2.5min", "checkpoint.recovery=partial"]  # fmt: skip
    given = settings(*job, "cluster.shards=8", "checkpoint.pls=0.1", "checkpoint.priority=ssu",
                     "checkpoint.period=3")  # fmt: skip
    strategy = given.strategy()
    assert strategy.schedule.time == timedelta(hours=44.8)
    assert strategy.recovery is not None
    assert strategy.recovery.most_pls == 0.1
    assert strategy.spec.priority is not None
    assert strategy.spec.priority.period == 3
    by_accuracy = settings(*job, "checkpoint.accuracy_loss=0.0005", "checkpoint.slope=0.01")
    assert by_accuracy.strategy().recovery == replace(
        strategy.recovery,
        most_pls=0.05,
        reason=by_accuracy.strategy().recovery.reason,  # type: ignore[union-attr]
    )


def test_a_run_that_plans_itself_in_toml() -> None:
    given = settings("checkpoint.recovery=auto", "checkpoint.target=accuracy loss 0.01%",
                     "checkpoint.mtbf=28h")  # fmt: skip
    assert given.strategy() == ek.auto(target="accuracy loss 0.01%", mtbf="28h")
    more = settings("checkpoint.recovery=auto", "checkpoint.together=2",
                    "checkpoint.reschedule=3min", "checkpoint.max_interval=5min")  # fmt: skip
    assert more.strategy() == ek.auto(together=2, reschedule="3min", max_interval="5min")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["checkpoint.target=PLS 0.1"], 'target is for recovery = "auto"'),
        (["checkpoint.recovery=auto", "checkpoint.bits=4"], "chooses layout and bits itself"),
        (["checkpoint.recovery=auto", "checkpoint.target=much"], "is no target"),
        (["checkpoint.recovery=full", "checkpoint.pls=0.1"], 'pls is for recovery = "partial"'),
        (["checkpoint.slope=0.1"], "slope is for recovery"),
        (["job.mtbf=28h"], "set all of them, or none"),
        (["job.mtbf=28h", "job.duration=x", "job.save=1s", "job.load=1s"], "is a duration"),
        (["job.mtbf=1h", "job.duration=1h", "job.save=1s", "job.load=1s"], "[job] is for recovery"),
        (["job.mtbf=1h", "job.duration=1h", "job.save=1s", "job.load=1s",
          "checkpoint.recovery=partial", "checkpoint.every=5 steps"], "leave out every"),
        (["job.mtbf=1h", "job.duration=1h", "job.save=1s", "job.load=1s",
          "checkpoint.recovery=auto"], "measures what [job] says"),
        (["checkpoint.mirror=m", "checkpoint.mirror_every=x"], "mirror_every='x' is no interval"),
        (["checkpoint.together=2"], 'together is for recovery = "auto"'),
        (["checkpoint.recovery=auto", "checkpoint.slope=0.1"], "a target such as"),
        (["checkpoint.recovery=auto", "checkpoint.every=5 steps", "checkpoint.max_interval=1h"],
         "set every to a time"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(changes: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(*changes)
    assert words in str(refused.value)


def test_nothing_is_known_of_a_job_by_default() -> None:
    assert JobSettings().job(shards=4) is None
    assert CheckpointSettings(path="r").strategy() == ek.incremental()
