"""What scenarios of simulated clusters can do, and that they notice a rule that is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_cluster import RemoteCluster
from emberkeep.cluster.shard import Shard
from emberkeep.testing.simulation.scenarios import scenario_of
from emberkeep.testing.simulation.sim_options import COORDINATOR, Fault, Launches
from emberkeep.testing.simulation.simulated_run import Outcome, run_options


def cut_off(launches: Launches = "spawned") -> Outcome:
    """Who pushes goes on although a push has failed."""
    part = Fault(at=3.0, kind="part", target=1, seconds=50.0)
    scenario = scenario_of("goes on", 0)
    return run_options(replace(scenario, faults=(part,), launches=launches, steps=20))


def test_a_caller_goes_on_after_a_push_that_failed() -> None:
    outcome = cut_off()
    assert not outcome.failure
    assert any("goes on after step" in line for line in outcome.story)


def test_a_number_that_is_used_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlightCluster, "_start_round", lambda self: None)
    assert "wrong rows" in cut_off().failure


def test_a_push_that_is_not_finished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlightCluster, "_send_one", lambda self, sent, index: None)
    failures = [cut_off("spawned").failure, cut_off("moved").failure]
    assert any("wrong" in failure for failure in failures)


def test_a_trainer_that_was_replaced_wakes_up_and_ends() -> None:
    replaced = Fault(at=3.0, kind="replace trainer", seconds=40.0)
    scenario = replace(
        scenario_of("usurped", 2), recovers="full", parity=None, faults=(replaced,), steps=24,
        pace=4.0,
    )  # fmt: skip
    outcome = run_options(scenario)
    assert not outcome.failure
    (ended,) = (line for line in outcome.story if " ends: " in line)
    assert "trainer-0#1 ends: FencedError" in ended


def test_nobody_is_started_while_there_is_no_room() -> None:
    part = Fault(at=3.0, kind="part", target=1, seconds=40.0)
    launch = Fault(at=3.0, kind="launch", seconds=80.0)
    outcome = run_options(replace(scenario_of("unlaunched", 1), faults=(part, launch), every=6))
    assert not outcome.failure
    assert any("partial recovery of [1]" in line for line in outcome.story)
    recovered = next(line for line in outcome.story if "partial recovery" in line)
    assert 43 < float(recovered.split()[0]) < 80, "it came back itself, and was emptied"


def test_a_server_that_serves_beside_its_successor_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread takes a server back whose place is being taken."""
    part = Fault(at=3.0, kind="part", other=COORDINATOR, seconds=40.0)
    scenario = replace(scenario_of("watched", 1), faults=(part,), steps=20)
    assert not run_options(scenario).failure
    monkeypatch.setattr(RemoteCluster, "_give_up", lambda self, shards: None)
    assert "had served it in epoch" in run_options(scenario).failure


def test_a_fault_waits_for_a_question() -> None:
    """Whatever the first of them says of lost rows is late, and another server dies then."""
    scenario = scenario_of("decoding", 0)
    first = [replace(fault, times=1) for fault in scenario.faults if fault.on == "syndromes"]
    kill = next(fault for fault in scenario.faults if fault.kind == "kill" and not fault.on)
    outcome = run_options(replace(scenario, faults=(kill, *first), steps=16))
    assert not outcome.failure
    lines = [line for line in outcome.story if "fault: lag" in line]
    assert len(lines) >= 4
    assert len({line.split()[0] for line in lines}) == 1


def short_of_memory(times: int) -> Outcome:
    """A server fails in the middle of a call."""
    scenario = replace(scenario_of("unheard", 2), steps=12)
    short = Fault(at=2.0, kind="memory", inward=True, times=times)
    return run_options(replace(scenario, faults=(short,)))


def test_a_server_is_short_of_memory_once_and_nothing_is_lost() -> None:
    where = set()
    for times in range(1, 8):
        outcome = short_of_memory(times)
        assert not outcome.failure
        (line,) = (line for line in outcome.story if "has no memory after" in line)
        where.add(line.split()[-1])
    assert {"Slab.push", "ParityMember.record", "Ledger.note"} <= where


def test_half_a_write_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "tear", lambda shard, error: None)
    assert any("wrong" in short_of_memory(times).failure for times in range(1, 8))
