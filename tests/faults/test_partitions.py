"""Partitions between real processes, and processes that are stopped: what was only unreachable
goes on with its rows, and a run ends with the bits of one that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from emberkeep.testing.proxy import Proxy
from emberkeep.train.result import Result
from tests.faults.partitions import (
    SCALED,
    STRATEGIES,
    Rig,
    expected_pls,
    line_fault,
    outcome,
    restart_fault,
    stop_fault,
    train,
    undisturbed,
)
from tests.faults.stalls import judge, steps_of, wait_for
from tests.servers import Farm

LEASE = SCALED.lease.total_seconds()


@pytest.fixture(scope="module")
def rig(farm: Farm) -> Iterator[Rig]:
    with Rig(farm) as made:
        yield made


@pytest.fixture(scope="module")
def whole() -> Result:
    return undisturbed()


# Each for half a lease and for two, at once on different servers.
FAULTS = {
    "full": [
        line_fault(0, LEASE / 2, lambda line: line.cut("requests")),
        line_fault(1, 2 * LEASE, Proxy.blackhole),
    ],
    "partial": [
        line_fault(0, LEASE / 2, Proxy.reset, Proxy.half_open),
        stop_fault(2, 2 * LEASE),
    ],
    "parity": [
        stop_fault(1, LEASE / 2),
        line_fault(2, 2 * LEASE, lambda line: line.cut("answers")),
    ],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_servers_that_were_cut_off_or_stopped_go_on_with_their_rows(
    rig: Rig, whole: Result, tmp_path: Path, strategy: str
) -> None:
    result, trouble = train(rig, strategy, tmp_path / "r", FAULTS[strategy], SCALED)
    assert result.digest == whole.digest
    assert result.recoveries is not None
    assert (result.recoveries.failures, result.recoveries.pls) == (0, 0.0)
    assert trouble.epochs[0] == trouble.epochs[1]
    assert trouble.served - trouble.ended < 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_server_that_was_started_again_behind_a_cut_is_recovered(
    rig: Rig, whole: Result, tmp_path: Path, strategy: str
) -> None:
    faults = [restart_fault(1, LEASE / 4)]
    result, trouble = train(rig, strategy, tmp_path / "r", faults, SCALED)
    made = result.recoveries
    assert made is not None
    assert made.failures == 1
    assert made.pls == pytest.approx(expected_pls(tmp_path / "r", trouble.recoveries, result.steps))
    assert (made.pls > 0) == (strategy == "partial")
    assert (result.digest == whole.digest) == (strategy != "partial")
    assert [event["scope"] for event in trouble.recoveries] == [strategy]
    changed = [old != new for old, new in zip(*trouble.epochs, strict=True)]
    assert changed == ([True] * 3 if strategy == "full" else [False, True, False])


def test_slow_lines_change_nothing(rig: Rig, whole: Result, tmp_path: Path) -> None:
    slow = timedelta(milliseconds=10)
    faults = [line_fault(shard, 0.3, lambda line: line.delay(slow)) for shard in range(3)]
    result, trouble = train(rig, "full", tmp_path / "r", faults, SCALED)
    assert result.digest == whole.digest
    assert trouble.epochs[0] == trouble.epochs[1]


def stop_the_coordinator(farm: Farm, rig: Rig, where: Path, seconds: float) -> float:
    """The trainer is stopped for so long; how long it takes to train again."""
    addresses = json.dumps([line.address for line in rig.lines])
    trainer = farm.call("tests.faults.stalls:train", str(where), addresses, log=where / "log")

    def is_stopped() -> bool:
        return " T " in Path(f"/proc/{trainer}/stat").read_text()

    try:
        wait_for(lambda: steps_of(where) >= 3)
        os.kill(trainer, signal.SIGSTOP)
        wait_for(is_stopped)
        before = steps_of(where)
        time.sleep(seconds)  # this long is what is tested
        os.kill(trainer, signal.SIGCONT)
        start = time.monotonic()
        wait_for(lambda: steps_of(where) > before + 1)  # the first may have been under way
        taken = time.monotonic() - start
        (where / "stop").touch()
        codes: list[int] = []
        wait_for(lambda: codes or codes.extend(c for c in [farm.ended(trainer)] if c is not None))
        assert codes == [0], (where / "log").read_text()
    finally:
        farm.kill(trainer)
    judge(where)
    return taken


def test_a_coordinator_that_was_stopped_finds_its_servers_as_they_were(
    farm: Farm, rig: Rig, tmp_path: Path
) -> None:
    assert stop_the_coordinator(farm, rig, tmp_path, 2 * LEASE) < 20


@pytest.mark.soak
@pytest.mark.parametrize("leases", [0.5, 5, 30])
def test_a_coordinator_is_stopped_for_long(
    farm: Farm, rig: Rig, tmp_path: Path, leases: float
) -> None:
    assert stop_the_coordinator(farm, rig, tmp_path, leases * LEASE) < 20


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("replaceable", [False, True])
@pytest.mark.parametrize("seconds", [5, 15, 30, 120])
def test_partitions_at_the_pace_of_a_real_run(
    farm: Farm, whole: Result, seconds: float, replaceable: bool, strategy: str
) -> None:
    found = outcome(farm, strategy, seconds, whole.digest, replaceable=replaceable)
    print(found)
    assert found.exact
    assert found.bits == (found.pls == 0)
    assert found.rows_kept or replaceable
    assert found.seconds_to_serve < seconds + 15
