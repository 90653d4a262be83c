"""Whole clusters on a seeded scheduler: every run is a function of its seed, and shows no loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, _base, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import emberkeep
from emberkeep.cli import app
from emberkeep.erasure.host import ParityHost
from emberkeep.erasure.messages import Changed
from emberkeep.repository.grid.living import LivingRows
from emberkeep.repository.policies import LAYOUTS, Layout
from emberkeep.rows.slab import Slab
from emberkeep.runtime.background import Worker
from emberkeep.runtime.crew import Crew
from emberkeep.runtime.waiting import Waiting
from emberkeep.testing.simulation import simulate, simulated_run
from emberkeep.testing.simulation.row_model import RowModel
from emberkeep.testing.simulation.scenarios import SCENARIOS, run_of, scenario_of
from emberkeep.testing.simulation.scheduler import (
    Process,
    Scheduler,
    SimulationError,
    StuckError,
    current_task,
)
from emberkeep.testing.simulation.sim_network import SimulatedClock
from emberkeep.testing.simulation.sim_options import ALL_KINDS, Options
from emberkeep.testing.simulation.sim_threading import SimLock, patched
from emberkeep.testing.simulation.simulated_run import run_options
from tests.faults.seeds import check_seeds
from tests.threads import started_since

SOAK_SEEDS = int(os.environ.get("EMBERKEEP_SEEDS", "2000"))
FIRST_SOAK_SEED = int(os.environ.get("EMBERKEEP_FIRST_SEED", "100000"))


def run(main: Callable[[], object], seed: int = 0, preemption: float = 0.3) -> Scheduler:
    """Runs `main` and what it starts in one process."""
    scheduler = Scheduler(seed, preemption=preemption)
    with patched(__name__):
        try:
            scheduler.run(main, Process("here"))
        finally:
            scheduler.close()
    return scheduler


# -- the scheduler -------------------------------------------------------------------------------


def racing(seed: int) -> list[int]:
    order: list[int] = []

    def main() -> None:
        lock, threads = threading.Lock(), []
        assert isinstance(lock, SimLock)

        def work(number: int) -> None:
            for _ in range(5):
                with lock:
                    order.append(number)

        for number in range(4):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
            assert not thread.is_alive()

    run(main, seed)
    return order


def test_a_seed_is_an_order_of_threads_and_others_are_others() -> None:
    orders = [racing(seed) for seed in range(8)]
    assert orders == [racing(seed) for seed in range(8)]
    assert len({tuple(order) for order in orders}) > 4
    assert all(sorted(order) == sorted([0, 1, 2, 3] * 5) for order in orders)


def test_time_passes_when_everybody_waits() -> None:
    heard: list[tuple[str, float]] = []

    def main() -> None:
        task = current_task()
        assert task is not None
        clock = SimulatedClock(task.scheduler, task.process)
        event, condition = threading.Event(), threading.Condition()

        def later() -> None:
            clock.sleep(3600)
            event.set()

        threading.Thread(target=later).start()
        assert not event.wait(60)
        heard.append(("in vain", clock.monotonic()))
        assert event.wait(4000)
        heard.append(("set", clock.monotonic()))
        with condition:
            assert not condition.wait_for(lambda: False, 5)
        heard.append(("over", clock.monotonic()))

    start = time.monotonic()
    run(main, preemption=0.0)
    assert heard == [("in vain", 60.0), ("set", 3600.0), ("over", 3605.0)]
    assert time.monotonic() - start < 30


def test_workers_crews_and_futures_run_in_a_simulation() -> None:
    results: list[int] = []

    def main() -> None:
        task = current_task()
        assert task is not None
        clock = SimulatedClock(task.scheduler, task.process)
        with Crew(3, "crew", clock=clock) as crew:
            futures: list[Future[int]] = [crew.submit(lambda n=n: n * n) for n in range(10)]
            wait(futures)
            results.extend(future.result(timeout=1) for future in futures)
        worker = Worker("worker", clock=clock)
        worker.do(lambda: clock.sleep(10), lambda _: results.append(int(clock.monotonic())))
        worker.close()

    run(main)
    assert results == [n * n for n in range(10)] + [10]


def test_who_has_waited_in_vain_takes_nothing_from_those_who_still_wait() -> None:
    """A process is stopped while one of its threads waits in vain: when it goes on, another may
    let go of the lock, or notify, before that thread has its turn."""
    heard: list[str] = []

    def main() -> None:
        task = current_task()
        assert task is not None
        scheduler, stopped = task.scheduler, Process("stopped")
        lock, condition = threading.Lock(), threading.Condition()

        def hold() -> None:
            with lock:
                scheduler.block("a moment", 1.5)
            with condition:
                condition.notify()

        def try_lock(name: str, seconds: float) -> None:
            if lock.acquire(timeout=seconds):
                heard.append(f"{name} has the lock")
                lock.release()

        def listen(name: str, seconds: float) -> None:
            with condition:
                if condition.wait(seconds):
                    heard.append(f"{name} is notified")

        for work in (try_lock, listen):
            scheduler.spawn("hold", hold, stopped)
            scheduler.block("a moment", 0.1)
            for name, seconds in (("short", 1.0), ("long", 60.0)):
                scheduler.spawn(name, partial(work, name, seconds), stopped)
            scheduler.block("a moment", 0.1)
            scheduler.pause(stopped)
            scheduler.block("a while", 3.0)
            scheduler.resume(stopped)
            scheduler.block("the end", 3.0)

    for seed in range(20):
        run(main, seed, preemption=0.0)
        assert heard == ["long has the lock", "long is notified"], f"seed {seed}"
        heard.clear()


def test_who_waits_for_each_other_is_named() -> None:
    def main() -> None:
        first, second = threading.Lock(), threading.Lock()

        def other() -> None:
            with second:
                task = current_task()
                assert task is not None
                task.scheduler.block("a moment", 1.0)
                first.acquire()

        with first:
            thread = threading.Thread(target=other, name="other")
            thread.start()
            task = current_task()
            assert task is not None
            task.scheduler.block("a moment", 1.0)
            second.acquire()

    with pytest.raises(
        StuckError, match=r"everybody waits(.|\n)*main waits for a lock(.|\n)*other"
    ):
        run(main)


def test_processes_stop_and_die() -> None:
    heard: list[str] = []

    def main() -> None:
        task = current_task()
        assert task is not None
        scheduler, stopped, doomed = task.scheduler, Process("stopped"), Process("doomed")

        def live(process: Process) -> None:
            for _ in range(10):
                scheduler.block("a second", 1.0)
                heard.append(f"{process} at {scheduler.seconds:.1f}")

        for process in (stopped, doomed):
            scheduler.spawn("live", lambda process=process: live(process), process)
        scheduler.at(2.5, lambda: scheduler.pause(stopped))
        scheduler.at(7.5, lambda: scheduler.resume(stopped))
        scheduler.at(4.5, lambda: scheduler.kill(doomed))
        scheduler.block("the end", 9.2)

    run(main, preemption=0.0)
    assert [line for line in heard if "doomed" in line] == [
        f"doomed at {n}.0" for n in (1, 2, 3, 4)
    ]
    # Its clock runs on: what it waited for while it was stopped is over when it wakes.
    assert [line for line in heard if "stopped" in line] == [
        "stopped at 1.0", "stopped at 2.0", "stopped at 7.5", "stopped at 8.5",
    ]  # fmt: skip


def test_a_thread_of_the_system_carries_one_task_at_a_time() -> None:
    """Many that end at once, and begin while another hands the baton on."""
    running: list[str] = []
    ended: list[str] = []

    def main() -> None:
        task = current_task()
        assert task is not None
        scheduler = task.scheduler

        def work(name: str, more: int) -> None:
            assert not running
            running.append(name)
            running.clear()
            for part in range(more):
                inner = f"{name}.{part}"
                scheduler.spawn(inner, partial(work, inner, 0), task.process)
                scheduler.block("a moment", 0.001)
            carried = current_task()
            assert carried is not None
            assert carried.name == name
            ended.append(name)

        for number in range(300):
            scheduler.spawn(str(number), partial(work, str(number), 3), task.process)
            if number % 3 == 0:
                scheduler.block("a moment", 0.002)
        scheduler.block("the end", 60.0)

    run(main)
    assert len(ended) == len(set(ended)) == 300 * 4


def test_what_is_made_outside_is_real_and_nothing_stays_behind() -> None:
    before = set(threading.enumerate())
    with patched(__name__):
        assert not isinstance(threading.Lock(), SimLock)
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    run(lambda: None)
    assert not started_since(before)
    assert not isinstance(threading.Lock(), SimLock)


def test_futures_are_waited_for_in_the_order_that_they_were_made() -> None:
    """The library takes their locks in the order of their addresses, which no seed decides."""
    orders: list[list[int]] = []

    def main() -> None:
        made = [Future[int]() for _ in range(50)]
        held: Any = getattr(_base, "_AcquireFutures")(set(made))  # noqa: B009
        orders.append([made.index(future) for future in held.futures])

    run(main)
    assert orders == [[*range(50)]]


# -- runs ----------------------------------------------------------------------------------------


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Byte for byte, also where dictionaries and sets have another order."""
    hashing = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not what it is here
    environment = {
        **os.environ, "PYTHONHASHSEED": hashing,
        "PYTHONPATH": str(Path(emberkeep.__file__).parent.parent),
    }  # fmt: skip
    command = [sys.executable, "-m", "emberkeep.cli", "simulate", "--seed", "16"]
    there = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    here = simulate(16)
    assert there.stdout.splitlines()[1:-1] == here.story
    assert len(here.story) > 5


def test_a_seed_run_twice_is_the_same_run() -> None:
    for seed in (2, 15):
        first, second = simulate(seed), simulate(seed)
        assert first.story == second.story
        assert (first.turns, first.messages) == (second.turns, second.messages)
        assert first.virtual_seconds == second.virtual_seconds


def test_seeds_cover_what_there_is() -> None:
    drawn = [run_of(seed) for seed in range(450)]
    assert {options.scenario for options in drawn} == {"", *SCENARIOS}
    assert {options.recovers for options in drawn} == {"full", "partial", "parity"}
    assert {options.workers for options in drawn} == {"one", "synchronous", "asynchronous"}
    assert {options.launches for options in drawn} == {"fixed", "spawned", "moved"}
    assert {fault.kind for options in drawn for fault in options.faults} == set(ALL_KINDS)
    assert {options.shards for options in drawn} == {1, 2, 3, 4, 5}
    assert {options.layout for options in drawn} == {*LAYOUTS}


@pytest.mark.parametrize(
    ("seed", "layout"),
    [
        # a version holds a push that is acknowledged later, and shards come back from it
        (202024, "intermittent"),
        # in the background, a worker dies with the server that acknowledged its last push
        (100752, "intermittent"),
    ],
)
def test_what_is_known_of_asynchronous_pushes_is_not_taken_for_more(
    seed: int, layout: Layout
) -> None:
    outcome = run_options(replace(run_of(seed), layout=layout))
    assert outcome.options.workers == "asynchronous"
    assert not outcome.failure


@pytest.mark.soak
def test_many_seeds_lose_and_double_no_push() -> None:
    check_seeds(range(FIRST_SOAK_SEED, FIRST_SOAK_SEED + SOAK_SEEDS))


def test_a_lost_push_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge is not asleep: a model that takes a step more than the cluster disagrees."""
    take = RowModel.take_step

    def take_more(model: RowModel, ranks: int = 1) -> None:
        take(model, ranks)
        if model.step == 9:
            model.push(*model.batch(4))

    monkeypatch.setattr(RowModel, "take_step", take_more)
    outcome = simulate(2, ())
    assert outcome.failure.startswith(SimulationError.__name__)


def test_parity_is_not_judged_by_half_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows change before their differences have a number: one worker often stops in between."""
    push = Slab.push

    def push_slowly(slab: Slab, *args: Any) -> None:
        push(slab, *args)
        task = current_task()
        if task is not None and task.name.startswith("push of trainer-1"):
            task.scheduler.block("a moment", 1.0)

    monkeypatch.setattr(Slab, "push", push_slowly)
    outcome = run_options(
        replace(scenario_of("acknowledged", 1), workers="asynchronous", faults=(), steps=20)
    )
    assert not outcome.failure
    assert outcome.parities > 10


@pytest.mark.parametrize("servers_write", [False, True])
def test_rows_of_a_grid_move_on_the_turns_of_a_simulation(servers_write: bool) -> None:
    grid = _grid_run(servers_write)
    first, second = run_options(grid), run_options(grid)
    assert not first.failure
    assert first.extractions > 5
    assert first.extractions == second.extractions
    assert (first.story, first.turns) == (second.story, second.turns)


@pytest.mark.parametrize("servers_write", [False, True])
def test_versions_of_a_grid_that_extraction_spoils_are_noticed(
    monkeypatch: pytest.MonkeyPatch, servers_write: bool
) -> None:
    rows_of = LivingRows.rows_of

    def end_too_early(rows: LivingRows, living: Any) -> Any:
        tables, ids, deaths = rows_of(rows, living)
        return tables, ids, np.where(deaths > living.piece.birth + 1, deaths - 1, deaths)

    monkeypatch.setattr(LivingRows, "rows_of", end_too_early)
    assert re.search("version .* of step", run_options(_grid_run(servers_write)).failure)


def _grid_run(servers_write: bool) -> Options:
    """One whose rows are moved often. Every server keeps its part of the catalog."""
    scenario = replace(scenario_of("late", 5), faults=(), layout="grid", every=1, steps=16)
    assert scenario.shards > 1
    assert scenario.grid is not None
    assert scenario.grid.ratio < 0.5
    return replace(scenario, servers_write=servers_write)


def test_wrong_parity_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ParityHost._add_changed

    def add_less(host: ParityHost, source: int, part: Changed, sums: Any) -> None:
        if host.updates < 20:
            real(host, source, part, sums)

    monkeypatch.setattr(ParityHost, "_add_changed", add_less)
    outcome = run_options(replace(scenario_of("acknowledged", 1), faults=(), steps=20))
    assert "says that its parity is whole" in outcome.failure


# -- the command ---------------------------------------------------------------------------------


def test_the_command_tells_a_story() -> None:
    done = CliRunner().invoke(app, ["simulate", "--seed", "2"])
    assert done.exit_code == 0
    assert done.stdout.startswith("seed 2: ")
    assert "version 1 holds step 0" in done.stdout


def test_the_command_counts_seeds_and_fails_with_the_seed_to_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = simulated_run.simulate

    def one_fails(seed: int) -> simulated_run.Outcome:
        Waiting().say("waiting for servers")  # which are simulated: nobody waits
        outcome = real(seed, ())
        outcome.failure = "SimulationError: wrong rows" if seed == 6 else ""
        return outcome

    monkeypatch.delenv("EMBERKEEP_QUIET", raising=False)
    monkeypatch.setattr("emberkeep.testing.simulation.simulate", one_fails)
    monkeypatch.setattr("emberkeep.testing.simulation.freeze_heap", lambda: None)
    monkeypatch.setattr(sys.modules["emberkeep.cli.simulate"], "PROGRESS_SEEDS", 1)
    done = CliRunner().invoke(app, ["simulate", "--seed", "5", "--seeds", "2"])
    assert done.exit_code == 1
    assert "2 seeds" in done.stdout
    assert "1 failed: seeds 6" in done.stdout
    assert "1 seeds up to 5, 0 failed, " in done.stderr
    assert "2 seeds up to 6, 1 failed, " in done.stderr
    assert "waiting" not in done.stderr
    done = CliRunner().invoke(app, ["simulate", "--seed", "5", "--seeds", "2", "--json"])
    assert done.exit_code == 1
    assert '"seed": 6' in done.stdout
    done = CliRunner().invoke(app, ["simulate", "--seed", "5", "--seeds", "0"])
    assert done.exit_code == 2
