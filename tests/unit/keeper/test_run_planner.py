"""A run that plans itself: what it measures, what it does about it, and what its versions say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import emberkeep as ek
from emberkeep.blobs import open_store
from emberkeep.checkpoint import VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import ConfigError
from emberkeep.keeper import run_planner
from emberkeep.planning.measurements import decisions
from emberkeep.repository import Repository
from emberkeep.runtime.pool import Pool
from emberkeep.testing.virtual_clock import VirtualClock

STEPS = 400


@dataclass
class Shards:
    """Four in this process, on the clock of the test."""

    clock: VirtualClock
    shards: int = 4

    def open(self, tables: Any, optimizer: Any, *, seed: int) -> LocalCluster:
        return LocalCluster(tables, optimizer, shards=4, seed=seed, pool=Pool(1), clock=self.clock)


def bags_on(clock: VirtualClock) -> ek.EmbeddingBags:
    return ek.EmbeddingBags(
        [ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1), cluster=Shards(clock), seed=1
    )


def train(
    bags: Any,
    keeper: ek.Keeper,
    clock: VirtualClock,
    until: int,
    kills: dict[int, int] | None = None,
) -> None:
    """Steps of a minute each."""
    while keeper.steps < until:
        with keeper.surviving():
            shard = (kills or {}).pop(keeper.steps + 1, None)
            if shard is not None:
                keeper._saver.join()  # type: ignore[union-attr]
                bags.cluster.kill(shard)
            bags({"item": torch.arange(8) + keeper.steps % 50}).sum().backward()
            bags.optimizer.step()
            bags.optimizer.zero_grad()
            clock.sleep(60)
            keeper.step()


def keeper_of(where: Path, bags: Any, clock: Any, events: list[Any], **given: Any) -> ek.Keeper:
    return ek.Keeper(
        where, bags, bags.optimizer, clock=clock, total_steps=STEPS,
        strategy=ek.auto(**{"first": "5min", "target": "PLS 0.1", "mtbf": "2h", **given}),
        on_event=lambda name, details: events.append((name, details)),
    )  # fmt: skip


@pytest.mark.long
def test_a_run_plans_itself_and_its_versions_say_why(tmp_path: Path) -> None:
    clock, events = VirtualClock(), []
    bags = bags_on(clock)
    keeper = keeper_of(tmp_path / "r", bags, clock, events)
    keeper.resume()
    kills = {step: step % 4 for step in (60, 90, 110, 130, 150)}
    with keeper:
        train(bags, keeper, clock, 200, kills)
        keeper.save()
        keeper.wait()
        planned = [details for name, details in events if name == "planned"]
        assert planned, "nothing was measured"
        assert planned[0]["scope"] == "partial"
        assert "partial recovery costs" in planned[0]["reason"]
        # Failures every 20 minutes, where one in two hours was believed: versions come sooner.
        assert planned[-1]["interval_seconds"] < planned[0]["interval_seconds"]
        assert "5 seen" in planned[-1]["reason"]
        recoveries = keeper.recoveries()
        assert recoveries is not None
        assert recoveries.pls <= 0.1
        assert recoveries.partial >= 4
        repository = Repository.open(open_store(str(tmp_path / "r")))
        newest = repository.latest()
        assert newest is not None
        auto = repository.manifest(newest).counters["auto"]
        assert auto["plan"] == planned[-1]
        assert auto["failures"]["seen"] == 5
        assert decisions(repository)[-1] == planned[-1]


@pytest.mark.long
def test_what_was_seen_survives_the_process(tmp_path: Path) -> None:
    clock, events = VirtualClock(), []
    bags = bags_on(clock)
    keeper = keeper_of(tmp_path / "r", bags, clock, events)
    keeper.resume()
    train(bags, keeper, clock, 60, {30: 1, 45: 2})
    keeper.save()
    keeper.wait()
    plan = keeper._planner.plan  # type: ignore[union-attr]
    assert plan is not None
    keeper._release()  # the process ends without closing anything

    again = bags_on(clock)
    after = keeper_of(tmp_path / "r", again, clock, events)
    after.resume()
    planner = after._planner
    assert planner is not None
    # Two failures of shards, and the process.
    assert planner._history.seen == 3
    assert planner.plan == plan
    assert after._pace._schedule.time == plan.interval
    assert after._recoverer is not None
    assert after._recoverer._recovery.scope == plan.scope
    train(again, after, clock, 80)
    after.close()

    third = keeper_of(tmp_path / "r", bags_on(clock), clock, events)
    third.resume()
    assert third._planner is not None
    assert third._planner._history.seen == 3  # a keeper that was closed has not failed
    third.close()


def test_without_shards_the_interval_alone_is_planned(tmp_path: Path) -> None:
    clock, events = VirtualClock(), []
    table = torch.nn.EmbeddingBag(64, 4, mode="sum")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    keeper = ek.Keeper(
        tmp_path / "r", table, optimizer, clock=clock, strategy=ek.auto(first="5min", mtbf="2h"),
        on_event=lambda name, details: events.append((name, details)),
    )  # fmt: skip
    with keeper:
        for _ in range(30):
            table(torch.arange(8).reshape(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.sleep(60)
            keeper.step()
    planned = [details for name, details in events if name == "planned"]
    assert planned
    assert planned[0]["scope"] == "full"


def test_a_tier_refuses_to_be_planned(tmp_path: Path) -> None:
    bags = ek.EmbeddingBags(
        [ek.Table("item", rows=64, dim=4, tier=ek.Tier(tmp_path / "tier", memory="1MB"))],
        optimizer=ek.SGD(lr=0.1), seed=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"a repository, which ek\.auto needs"):
        ek.Keeper(None, bags, bags.optimizer, strategy=ek.auto())


@pytest.mark.long
def test_a_run_that_starts_from_another_one_counts_its_own_steps(tmp_path: Path) -> None:
    clock, events = VirtualClock(), []
    bags = bags_on(clock)
    with keeper_of(tmp_path / "first", bags, clock, events) as keeper:
        keeper.resume()
        train(bags, keeper, clock, STEPS + 100)  # also one that takes longer than was said
    planned = [details for name, details in events if name == "planned"]
    events.clear()
    bags = bags_on(clock)
    with keeper_of(tmp_path / "second", bags, clock, events) as keeper:
        keeper.resume(partial=True, source=tmp_path / "first")
        train(bags, keeper, clock, keeper.steps + 60)
        counters = keeper._planner.counters()  # type: ignore[union-attr]
    assert counters["auto"]["began"] == STEPS + 100
    versions = [details for name, details in events if name == "saved"]
    assert len(versions) < 20  # of 60 steps of a minute each, where 2 h pass between failures
    assert planned


def test_a_version_says_that_the_run_ended_whatever_was_saved_before(tmp_path: Path) -> None:
    clock = VirtualClock()
    for kill in (False, True):
        bags, events = bags_on(clock), []
        keeper = keeper_of(tmp_path / "r", bags, clock, events)
        keeper.resume()
        failures = keeper._planner._history.seen  # type: ignore[union-attr]
        assert failures == 0
        train(bags, keeper, clock, keeper.steps + 20, {keeper.steps + 10: 1} if kill else {})
        keeper.save()
        keeper.wait()
        keeper.close()
    assert keeper._planner._history.seen == 1  # type: ignore[union-attr]


def test_what_is_closed_is_exact_after_a_plan_has_taken_bits_away(tmp_path: Path) -> None:
    for further in (0, 2):
        clock = VirtualClock()
        bags = bags_on(clock)
        keeper = ek.Keeper(tmp_path / str(further), bags, bags.optimizer, clock=clock)
        keeper.resume()
        keeper._saver.follow(VersionSpec(bits=8))  # type: ignore[union-attr]
        train(bags, keeper, clock, 5)
        keeper.save()
        keeper.wait()
        keeper._saver.follow(VersionSpec())  # type: ignore[union-attr]
        train(bags, keeper, clock, 5 + further)
        keeper.close()
        expected = bags.rows("item", torch.arange(64))["weight"]
        again = bags_on(clock)
        with ek.Keeper(tmp_path / str(further), again, again.optimizer, clock=clock) as keeper:
            keeper.resume()
            found = again.rows("item", torch.arange(64))["weight"]
            assert (found == expected).all()


def test_the_version_of_the_very_beginning_is_no_measure(tmp_path: Path) -> None:
    """It is waited for while everything is made ready: versions were planned to be as dear, and
    a failure took the run back to its first step."""
    clock, events = VirtualClock(), []
    bags = bags_on(clock)
    keeper = keeper_of(tmp_path / "r", bags, clock, events)
    capture = keeper._state.capture

    def slow() -> Any:
        clock.sleep(600.0 if keeper.steps == 0 else 0.5)
        return capture()

    keeper._state.capture = slow  # type: ignore[method-assign]
    keeper.resume()
    with keeper:
        train(bags, keeper, clock, 5)
        assert not [details for name, details in events if name == "planned"]
        train(bags, keeper, clock, 30)
        planner = keeper._planner
        assert planner is not None
        assert planner._stalls
        assert max(planner._stalls) < 10


def test_a_plan_for_another_target_is_not_followed(tmp_path: Path) -> None:
    clock, events = VirtualClock(), []
    bags = bags_on(clock)
    with keeper_of(tmp_path / "r", bags, clock, events) as keeper:
        keeper.resume()
        train(bags, keeper, clock, 40)
        assert keeper._planner is not None
        assert keeper._planner.plan is not None
        assert keeper._planner.plan.scope == "partial"
    strict = keeper_of(tmp_path / "r", bags_on(clock), clock, events, target="PLS 0")
    strict.resume()
    assert strict._recoverer is not None
    assert strict._recoverer._recovery.scope == "full"
    assert strict._planner is not None
    assert strict._planner.decisions
    strict.close()


def test_what_is_believed_may_change_until_something_was_seen(tmp_path: Path) -> None:
    clock, events = VirtualClock(), []
    bags = bags_on(clock)
    with keeper_of(tmp_path / "r", bags, clock, events) as keeper:
        keeper.resume()
        train(bags, keeper, clock, 20)
    again = keeper_of(tmp_path / "r", bags_on(clock), clock, events, mtbf="50h")
    again.resume()
    assert again._planner is not None
    assert again._planner._history.mtbf.total_seconds() == 50 * 3600
    again.close()


def test_every_process_that_ended_counts_also_without_a_version(tmp_path: Path) -> None:
    """A run that failed sooner than its interval failed once, for ever, and got nowhere."""
    clock, events = VirtualClock(), []
    for attempt in range(6):
        bags = bags_on(clock)
        keeper = keeper_of(tmp_path / "r", bags, clock, events, mtbf="50h", first="60min")
        keeper.resume()
        assert keeper._planner is not None
        assert keeper._planner._history.seen == attempt
        assert keeper.steps == 0 or attempt > 2
        train(bags, keeper, clock, keeper.steps + 20)
        keeper._saver.join()  # type: ignore[union-attr]
        keeper._release()  # the process ends without closing anything
        if keeper._saver.committed_step:  # type: ignore[union-attr]
            break
    else:
        pytest.fail("no version was taken")


@pytest.mark.long
def test_restores_of_all_processes_count_for_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, events = VirtualClock(), []
    restores: list[int] = []
    real = run_planner.plan_run

    def spied(target: Any, seen: Any, *given: Any, **named: Any) -> Any:
        restores.append(seen.restores)
        return real(target, seen, *given, **named)

    monkeypatch.setattr(run_planner, "plan_run", spied)
    for process in range(3):
        bags = bags_on(clock)
        keeper = keeper_of(tmp_path / "r", bags, clock, events)
        keeper.resume()
        train(bags, keeper, clock, keeper.steps + 10)
        assert restores[-1] == process
        keeper._saver.follow(VersionSpec(bits=8))  # type: ignore[union-attr]
        train(bags, keeper, clock, keeper.steps + 1)
        keeper.save()
        keeper.wait()
        keeper._release()  # the process ends without closing anything


@pytest.mark.long
def test_nothing_is_planned_at_the_end(tmp_path: Path) -> None:
    clock, events = VirtualClock(), []
    bags = bags_on(clock)
    with keeper_of(tmp_path / "r", bags, clock, events) as keeper:
        keeper.resume()
        train(bags, keeper, clock, STEPS)
    planned = [details["step"] for name, details in events if name == "planned"]
    assert planned
    assert max(planned) < STEPS


def test_a_failure_is_planned_for_at_the_next_step(tmp_path: Path) -> None:
    """It was at half of the time to the next version: what failed meanwhile was lost by the plan
    of before."""
    clock, events = VirtualClock(), []
    bags = bags_on(clock)
    with keeper_of(tmp_path / "r", bags, clock, events) as keeper:
        keeper.resume()
        train(bags, keeper, clock, 40)
        while keeper._pace.looks(keeper.steps + 3):
            train(bags, keeper, clock, keeper.steps + 1)
        before = len([details for name, details in events if name == "planned"])
        fails = keeper.steps + 1
        train(bags, keeper, clock, fails + 2, {fails: 1})
    planned = [details["step"] for name, details in events if name == "planned"]
    assert planned[before:] == [fails]
