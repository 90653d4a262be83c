"""What a run says of lost shards: every loss and recovery is an event, counted, with all the time
that it took."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep._types import Json
from emberkeep.cli._progress import Lines
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Optimizer, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock

SECOND = timedelta(seconds=1)
TIMING = Timing(deadline=10 * SECOND, lease=15 * SECOND)


class Servers:
    """`cluster=` on servers of this process, on virtual time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = LocalNetwork(self.clock)
        self.launcher = LocalServers(self.network, 3, lease=TIMING.lease)

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        return FlightCluster(
            tables, optimizer, self.launcher, seed=seed, pool=Pool(1), timing=TIMING,
            transport=self.network.transport(), clock=self.clock,
        )  # fmt: skip


class Events:
    """What a keeper says, and the lines that a command makes of it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Json]] = []
        self._lines = Lines()

    def __call__(self, event: str, details: Json) -> None:
        self.heard.append((event, details))
        self._lines.on_event(event, details)

    def of(self, name: str) -> list[Json]:
        return [details for event, details in self.heard if event == name]


def bags_on(cluster: Any) -> ek.EmbeddingBags:
    table = ek.Table("fixed", rows=60, dim=4)
    return ek.EmbeddingBags([table], optimizer=ek.Adagrad(lr=0.1), cluster=cluster)


def train(bags: ek.EmbeddingBags, keeper: ek.Keeper, steps: int) -> None:
    while keeper.steps < steps:
        with keeper.surviving():
            random = np.random.default_rng(keeper.steps)
            bags({"fixed": torch.from_numpy(random.integers(0, 60, 16))}).sum().backward()
            bags.optimizer.step()
            keeper.step()


def test_a_recovery_from_parity_is_an_event_a_line_and_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events, bags = Events(), bags_on(ek.local(shards=4, failures=[ek.fail_at(1, step=3)]))
    strategy = ek.parity(k=3, every=6)
    with ek.Keeper(tmp_path, bags, bags.optimizer, strategy=strategy, on_event=events) as keeper:
        train(bags, keeper, 8)
        made = keeper.recoveries()
    assert [details["shards"] for details in events.of("lost")] == [[1]]
    (recovered,) = events.of("recovered")
    assert (recovered["scope"], list(recovered["shards"])) == ("parity", [1])
    assert made is not None
    assert (made.failures, made.parity, made.full, made.partial) == (1, 1, 0, 0)
    assert made.seconds > 0
    said = capsys.readouterr().err
    assert "every row came back from the other shards in" in said


def test_a_full_recovery_names_every_loss_and_counts_the_time_to_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two servers are cut off at once; the call that meets the first does not see the other."""
    servers, events = Servers(), Events()
    bags = bags_on(servers)
    strategy = ek.incremental(every=2, recovery="full")
    keeper = ek.Keeper(
        tmp_path, bags, bags.optimizer, strategy=strategy, on_event=events, clock=servers.clock
    )
    train(bags, keeper, 4)
    keeper.wait()
    train(bags, keeper, 5)
    begin = servers.clock.monotonic()
    names = [servers.launcher.address(shard) for shard in (0, 2)]
    servers.network.partition(*names)
    train(bags, keeper, 6)
    stood_still = servers.clock.monotonic() - begin
    (recovered,) = events.of("recovered")
    assert (recovered["scope"], list(recovered["shards"])) == ("full", [0, 2])
    made = keeper.recoveries()
    assert made is not None
    assert (made.failures, made.full) == (2, 1)
    assert made.seconds >= TIMING.lease.total_seconds()  # a replacement may not serve before
    assert made.seconds == pytest.approx(stood_still, rel=0.2)
    assert [details["shards"] for details in events.of("lost")] == [[0, 2]]
    silent = events.of("silent")
    assert silent
    # Both count from when the server was last heard, at most a renewal before it was missed.
    assert all(details["seconds"] < details["until"] for details in silent)
    assert all(15 <= details["until"] < 15 + 15 / 4 + 1 for details in silent)
    assert "has been silent for" in capsys.readouterr().err
    keeper.close(save=False)
    bags.cluster.close()


@pytest.mark.parametrize("place", ["process", "servers"])
def test_a_loss_is_said_once_and_the_next_one_again(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lookup is a call in a call, and both meet the loss: it was said twice where everything
    goes back, as at the start of a run that plans itself."""
    servers, events = Servers(), Events()
    failures = [ek.fail_at(1, step=4), ek.fail_at(1, step=7)]
    bags = bags_on(servers if place == "servers" else ek.local(shards=3, failures=failures))
    keeper = ek.Keeper(
        tmp_path, bags, bags.optimizer, strategy=ek.auto(first="1h"), total_steps=10,
        on_event=events, clock=servers.clock if place == "servers" else SYSTEM_CLOCK,
    )  # fmt: skip
    keeper.resume()
    for until in (3, 6):
        train(bags, keeper, until)
        if place == "servers":
            servers.launcher.kill(1)
    train(bags, keeper, 9)
    assert [details["scope"] for details in events.of("recovered")] == ["full", "full"]
    assert [details["shards"] for details in events.of("lost")] == [[1], [1]]
    assert capsys.readouterr().err.count("shard 1 lost, recovering") == 2
    keeper.close(save=False)
    bags.cluster.close()
