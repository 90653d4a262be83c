"""Shards are killed anywhere, any number of times: training goes on, and full recovery ends with
the same bits as the run without failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.cluster.failure_schedule import Failure, random_failures
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.train.hooks import Hook
from emberkeep.train.loop import run
from emberkeep.train.result import Result
from emberkeep.train.run_config import demo

STEPS = 18
SHARDS = 4
SMALL = [
    "data.samples=2000",
    "data.rows_total=1000",
    "run.batch_size=100",
    "run.compare=false",
    "model.bottom=[8]",
    "model.top=[8]",
    "tables.dim=4",
    f"cluster.shards={SHARDS}",
]
KINDS = {
    "adam": ["optimizer.kind=adam"],
    "evicting": ["tables.kind=dynamic", "tables.capacity=120", "tables.on_full=evict_oldest"],
    "row-wise": [],
}


class Heard(Hook):
    def __init__(self) -> None:
        self.recovered: list[dict[str, Any]] = []
        self.steps: list[int] = []

    def on_step(self, step: Any) -> None:
        self.steps.append(step.number)

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        if event == "recovered":
            self.recovered.append(details)


def written(failure: Failure) -> str:
    return f"{', '.join(map(str, failure.shards))} at {failure.step} {failure.when}"


def trained(where: Path | None, failures: Any = (), hook: Hook | None = None, *more: str) -> Result:
    given = [*SMALL, *more]
    if where is not None:
        at = "[" + ", ".join(f'"{written(failure)}"' for failure in failures) + "]"
        given += [f"checkpoint.path={where}", f"failures.at={at}"]
    return run(demo(given), hooks=[hook] if hook else [])


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Result]:
    return {kind: trained(None, (), None, *more) for kind, more in KINDS.items()}


def schedules(count: int, first: int = 0) -> Iterator[tuple[int, list[Failure]]]:
    """Random ones: few and many failures, alone and together, in bursts."""
    for seed in range(first, first + count):
        random = np.random.default_rng(seed)
        yield (
            seed,
            list(
                random_failures(
                    shards=SHARDS,
                    steps=STEPS,
                    seed=seed,
                    count=int(random.integers(1, 8)),
                    together=int(random.integers(1, SHARDS + 1)),
                )
            ),
        )


def losses(failures: list[Failure]) -> int:
    """Shards that die: one that is dead cannot die again in the same moment."""
    return len({(shard, it.step, it.when) for it in failures for shard in it.shards})


def check_full(
    tmp_path: Path, seed: int, failures: list[Failure], whole: dict[str, Result]
) -> None:
    random = np.random.default_rng(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    layout = ["full", "one_shot", "intermittent", "consecutive"][int(random.integers(4))]
    heard = Heard()
    result = trained(
        tmp_path / str(seed),
        failures,
        heard,
        *KINDS[kind],
        f"checkpoint.layout={layout}",
        f"checkpoint.every={random.integers(1, 9)} steps",
        "checkpoint.recovery=full",
    )
    assert result.digest == whole[kind].digest, (seed, kind, layout, failures)
    assert (result.auc, result.loss) == (whole[kind].auc, whole[kind].loss)
    recoveries = result.recoveries
    assert recoveries is not None
    assert recoveries.failures == losses(failures)
    assert recoveries.full + recoveries.partial == len(heard.recovered) > 0
    assert recoveries.pls == 0.0
    assert all(
        it["scope"] == "full" or "no row was trained since" in it["reason"]
        for it in heard.recovered
    )
    assert len(heard.steps) == STEPS + recoveries.repeated_steps


def test_full_recovery_from_random_failures_gives_the_same_bits(
    tmp_path: Path, uninterrupted: dict[str, Result]
) -> None:
    for seed, failures in schedules(3, first=36):  # every kind of table and optimizer once
        check_full(tmp_path, seed, failures, uninterrupted)


@pytest.mark.soak
def test_full_recovery_from_very_many_random_failures(
    tmp_path: Path, uninterrupted: dict[str, Result]
) -> None:
    for seed, failures in schedules(500, first=1000):
        check_full(tmp_path, seed, failures, uninterrupted)


def check_partial(tmp_path: Path, seed: int, failures: list[Failure]) -> None:
    random = np.random.default_rng(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    heard = Heard()
    every = int(random.integers(2, 9))
    more = [
        *KINDS[kind],
        f"checkpoint.every={every} steps",
        "checkpoint.recovery=partial",
        *([], ["checkpoint.priority=mfu"], ["checkpoint.priority=ssu"])[seed % 3],
    ]
    result = trained(tmp_path / str(seed), failures, heard, *more)
    recoveries = result.recoveries
    assert recoveries is not None
    assert result.steps == STEPS
    assert recoveries.failures == losses(failures)
    partial = [it for it in heard.recovered if it["scope"] == "partial"]
    assert recoveries.partial == len(partial)
    assert all(it["repeated_steps"] == 0 for it in partial)
    assert len(heard.steps) == STEPS + recoveries.repeated_steps
    # Of one failure a shard loses at most what came after the version before.
    most = sum(len(failure.shards) for failure in failures) * 9 / (STEPS * SHARDS)
    assert 0 <= recoveries.pls <= most


def test_partial_recovery_from_random_failures_never_stops_training(tmp_path: Path) -> None:
    for seed, failures in schedules(3, first=105):  # every kind, every priority once
        check_partial(tmp_path, seed, failures)


@pytest.mark.soak
def test_partial_recovery_from_very_many_random_failures(tmp_path: Path) -> None:
    for seed, failures in schedules(120, first=2000):
        check_partial(tmp_path, seed, failures)


def test_memory_of_what_was_lost_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before anything was saved but the beginning, a shard comes back as it began."""
    seen: list[int] = []
    kill = LocalCluster.kill

    def killed(self: LocalCluster, *shards: int) -> None:
        seen.append(sum(self.shards[0].touched_ids(t.name).size for t in self.tables))
        kill(self, *shards)
        self.on_loss, hear = None, self.on_loss
        self.renew(*shards)
        self.serve(*shards)
        seen.append(sum(self.shards[0].touched_ids(t.name).size for t in self.tables))
        kill(self, *shards)
        self.on_loss = hear

    monkeypatch.setattr(LocalCluster, "kill", killed)
    trained(
        tmp_path, [Failure(shards=(0,), step=5)], None, "checkpoint.every=100 steps",
        "checkpoint.recovery=partial",
    )  # fmt: skip
    assert seen[0] > 0
    assert seen[1] == 0
