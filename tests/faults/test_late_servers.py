"""Servers that somebody starts minutes later end no run: one patience for all that others have to
do. On virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from emberkeep.cluster.remote.timing import Timing
from emberkeep.testing.simulation import sim_job, sim_world, simulated_run
from emberkeep.testing.simulation.scenarios import scenario_of
from emberkeep.testing.simulation.sim_options import Fault, Workers
from emberkeep.testing.simulation.sim_world import World
from emberkeep.testing.simulation.simulated_run import run_options
from tests.faults.test_servers_return import TIMING
from tests.faults.test_servers_return import World as Servers

SIX_MINUTES = 360.0


@pytest.mark.parametrize("workers", ["one", "synchronous"])
def test_a_run_goes_on_with_a_server_that_is_started_six_minutes_later(
    monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    def start_late(world: World, address: str) -> None:
        world.scheduler.at(SIX_MINUTES, partial(world._start_again, address))

    monkeypatch.setattr(World, "_restart_later", start_late)
    monkeypatch.setattr(sim_job, "TIMING", Timing())
    monkeypatch.setattr(sim_world, "PATIENCE", Timing().patience)
    monkeypatch.setattr(simulated_run, "_STILL_SECONDS", SIX_MINUTES + 60)
    scenario = replace(
        scenario_of("ahead", 3), recovers="partial", workers=workers, launches="fixed",
        faults=(Fault(at=5.0, kind="kill", target=1),),
    )  # fmt: skip
    outcome = run_options(scenario)
    assert not outcome.failure
    (recovered,) = (line for line in outcome.story if "partial recovery of [1]" in line)
    assert float(recovered.split()[0]) > SIX_MINUTES
    assert not any(" ends: " in line for line in outcome.story)
    assert outcome.resumes == 0


def test_a_trainer_that_starts_waits_for_servers_as_long_as_one_that_runs() -> None:
    """Its supervisor may have started it again while a server was away."""
    world = Servers(fixed=True)
    world.cluster.close()
    for name in world.names:
        world.network.stop(name)
        world.clock.at(0.8 * TIMING.patience.total_seconds(), partial(world.network.start, name))
    world.cluster = world.open("another")
    world.push()
    world.check()
