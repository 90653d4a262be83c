"""What an engineer would have bet a job on, and lost: plans as users ask for them.

Each test is a finding about an earlier planner, through commands and public functions alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import emberkeep as ek
from emberkeep.cli import app
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.rows import snapshot
from emberkeep.runtime.pool import Pool
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.train.run_config import demo

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
JOB = ["--duration", "56h", "--shards", "8", "--save-time", "5.7min", "--load-time", "2.5min",
       "--reschedule-time", "2.5min"]  # fmt: skip


def plan(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", *JOB, *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def job(**changes: Any) -> ek.Job:
    given = {"duration": 56 * HOUR, "mtbf": 2.8 * HOUR, "shards": 8, "save": 5.7 * MINUTE,
             "load": 2.5 * MINUTE, "reschedule": 2.5 * MINUTE}  # fmt: skip
    return ek.Job(**{**given, **changes})


def bags_of(shards: int = 2) -> ek.EmbeddingBags:
    return ek.EmbeddingBags(
        [ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1),
        cluster=ek.local(shards=shards), seed=1,
    )  # fmt: skip


def train(bags: Any, keeper: ek.Keeper, steps: int) -> None:
    for step in range(steps):
        bags({"item": torch.arange(8) + step}).sum().backward()
        bags.optimizer.step()
        bags.optimizer.zero_grad()
        keeper.step()
        keeper.wait()


def test_prioritised_versions_are_not_taken_where_they_do_not_pay() -> None:
    strategy = ek.partial(job=job(), pls=0.01, priority="ssu")
    assert strategy.spec.priority is None
    found = plan("--mtbf", "2.8h", "--pls", "0.01")["strategies"]
    assert found["cpr_ssu"]["overhead"] > found["full"]["overhead"] > found["cpr"]["overhead"]


class Slow:
    """Of a run: what takes long when it is brought back."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(0.4)


@pytest.mark.filterwarnings("ignore:step .* was resumed:UserWarning")
def test_restores_are_not_what_a_version_costs(tmp_path: Path) -> None:
    for _ in range(2):
        bags = bags_of()
        strategy = ek.partial(every=4, priority="mfu", fraction=0.25, keep="all")
        with ek.Keeper(
            tmp_path, bags, bags.optimizer, strategy=strategy, total_steps=99,
            state={"slow": Slow()},
        ) as keeper:  # fmt: skip
            keeper.resume()
            train(bags, keeper, 8)
    done = CliRunner().invoke(
        app,
        ["plan", "--duration", "56h", "--shards", "8", "--mtbf", "28h", "--json",
         "--repository", str(tmp_path)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["job"]["save_hours"] * 3600 < 0.04


class OnClock:
    """`cluster=` of one shard in this process, on a clock of the test."""

    shards = 1

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def open(self, tables: Any, optimizer: Any, *, seed: int) -> LocalCluster:
        return LocalCluster(tables, optimizer, shards=1, seed=seed, pool=Pool(1), clock=self._clock)


def test_rows_that_steps_copy_for_a_version_are_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that changes rows of a version under way copies them first, and takes longer."""
    stepped = threading.Event()
    claim, chunks = snapshot.Snapshot._claim, snapshot.Snapshot.chunks

    clock = VirtualClock()

    def slow_claim(self: Any, *given: Any) -> Any:
        clock.sleep(20)
        return claim(self, *given)

    def late_chunks(self: Any, *given: Any) -> Iterator[Any]:
        assert stepped.wait(60)
        yield from chunks(self, *given)

    monkeypatch.setattr(snapshot.Snapshot, "_claim", slow_claim)
    monkeypatch.setattr(snapshot.Snapshot, "chunks", late_chunks)
    bags = ek.EmbeddingBags(
        [ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1), cluster=OnClock(clock)
    )
    strategy = ek.incremental(every=99, keep="all")
    with ek.Keeper(tmp_path, bags, bags.optimizer, strategy=strategy, clock=clock) as keeper:
        for _ in range(2):
            stepped.clear()
            keeper.save()
            bags({"item": torch.arange(8)}).sum().backward()
            bags.optimizer.step()
            stepped.set()
            keeper.step()
            keeper.wait()
    done = CliRunner().invoke(
        app,
        ["plan", "--duration", "56h", "--shards", "8", "--mtbf", "28h", "--json",
         "--repository", str(tmp_path)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["job"]["save_hours"] * 3600 > 10


def test_rounded_rows_are_not_what_was_lost() -> None:
    bags, events = bags_of(4), list[Any]()
    strategy = ek.incremental(every=4, bits=4, recovery="full")
    with ek.Keeper(
        "memory://lossy", bags, bags.optimizer, strategy=strategy, total_steps=99,
        on_event=lambda name, details: events.append((name, details)),
    ) as keeper:  # fmt: skip
        keeper.resume()
        train(bags, keeper, 4)
        bags.cluster.kill(1)  # type: ignore[attr-defined]
        keeper.recover()
    (reason,) = [details["reason"] for name, details in events if name == "recovered"]
    assert "nothing is lost" not in reason


def test_whole_versions_come_as_often_as_was_asked() -> None:
    bags, whole = bags_of(), list[int]()

    def hear(event: str, details: dict[str, Any]) -> None:
        if event == "saved" and details["kind"] != "prioritised" and details["step"]:
            whole.append(details["step"])

    strategy = ek.partial(every=3, priority="ssu")
    with ek.Keeper(
        "memory://often", bags, bags.optimizer, strategy=strategy, total_steps=24, on_event=hear
    ) as keeper:
        keeper.resume()
        train(bags, keeper, 24)
    assert whole == list(range(3, 25, 3))


def test_the_target_is_a_bound() -> None:
    by_interval = ek.partial(every="1h", pls=0.05).recovery
    by_job = ek.partial(job=job(mtbf=28 * HOUR), pls=0.05).recovery
    assert by_interval is not None
    assert by_job is not None
    assert by_interval.most_pls == by_job.most_pls == 0.05


def test_the_sweep_that_fits_a_slope_is_named() -> None:
    done = CliRunner().invoke(app, ["plan", *JOB, "--mtbf", "28h", "--accuracy-loss", "0.001"])
    assert done.exit_code == 2
    assert "--sweep fraction" in done.stderr


def test_priority_is_the_same_wherever_it_is_left_out() -> None:
    in_python = ek.partial(every="30min").spec.priority
    in_toml = demo(["checkpoint.path=r", "checkpoint.recovery=partial"]).checkpoint
    assert in_python == in_toml.strategy().spec.priority
    recommended = plan("--mtbf", "28h", "--pls", "0.1")["recommended"]
    assert (in_python is None) == (recommended == "cpr")


def test_accuracy_period_and_job_can_be_said() -> None:
    strategy = ek.partial(
        job=job(mtbf=28 * HOUR), accuracy_loss=0.0005, slope=0.01, priority="ssu", period=3
    )
    assert strategy.recovery is not None
    assert strategy.recovery.most_pls == pytest.approx(0.05)
    given = demo([
        "cluster.shards=8", "job.mtbf=28h", "job.duration=56h", "job.save=5.7min",
        "job.load=2.5min", "job.reschedule=2.5min", "checkpoint.path=r",
        "checkpoint.recovery=partial", "checkpoint.accuracy_loss=0.0005", "checkpoint.slope=0.01",
        "checkpoint.priority=ssu", "checkpoint.period=3",
    ])  # fmt: skip
    assert given.strategy() == strategy


@pytest.mark.parametrize(
    ("name", "factor"),
    [("seconds", 3600), ("elapsed_seconds", 3600), ("time_seconds", 3600), ("minutes", 60)],
)
def test_columns_have_the_unit_of_their_name(tmp_path: Path, name: str, factor: float) -> None:
    path = tmp_path / "failures.csv"
    path.write_text(f"{name}\n" + "".join(f"{h * factor}\n" for h in (20, 8, 15, 9, 30, 14, 16)))
    assert plan("--failures", str(path))["job"]["mtbf_hours"] == pytest.approx(16.0)


def test_machines_that_fail_together_are_planned_for(tmp_path: Path) -> None:
    start = datetime(2024, 1, 1)
    lines = [
        f"{(start + 5 * failure * HOUR + (failure % 3) * HOUR).isoformat()},n{node}"
        for failure in range(145)
        for node in range(10)
    ]
    path = tmp_path / "failures.csv"
    path.write_text("started,node\n" + "\n".join(lines) + "\n")
    found = plan("--failures", str(path), "--shards", "100")
    assert found["job"]["failing_together"] == 10
    assert found["job"]["failures"] == pytest.approx(56 / 5, rel=0.02)


def test_parity_says_how_many_shards_it_brings_back() -> None:
    found = plan("--mtbf", "28h", "--fail-together", "3", "--pls", "0", "--parity-slowdown", "0.01")
    assert found["recommended"] == "parity"
    assert "r=3" in found["reason"]


def test_json_is_a_log_too(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    path.write_text(json.dumps([{"hours": hours} for hours in (0, 16, 30, 50, 61, 80, 96)]))
    assert plan("--failures", str(path))["job"]["mtbf_hours"] == pytest.approx(16.0)
