"""Servers that cannot reach each other: what parity does not hold is unprotected and said to be,
training goes on within bounds or stops, and parity is kept again when they can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.outage import UnsettledError
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, ServerError, ShardLostError
from emberkeep.runtime.metrics import Registry, families
from emberkeep.runtime.pool import Pool
from emberkeep.server.parity_service import ParityService
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers, LocalTransport, Rule
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.engine import state, wanted_of
from tests.waiting import passing, until

SECOND = timedelta(seconds=1)
TIMING = Timing(deadline=SECOND, lease=15 * SECOND)
TABLES = [Table("fixed", rows=40, dim=3), Table("wide", rows=30, dim=9)]


class CutNetwork(LocalNetwork):
    """A network in which some servers do not reach some others; clients reach all of them."""

    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self.cuts: set[tuple[str, str]] = set()
        self.refused: set[tuple[str, str]] = set()
        self.said: list[tuple[str, dict[str, Any]]] = []

    def start(self, address: str) -> ShardService:
        service = super().start(address)
        service._tell = lambda event, details: self.said.append((event, details))
        return service

    def cut(self, *pairs: tuple[int, int]) -> None:
        self.cuts = {(f"server-{a}", f"server-{b}") for a, b in pairs}
        self.refused.clear()

    def deliver(
        self, sender: LocalTransport, server: str, kind: str, deadline: timedelta,
        work: Callable[[ShardService], Any],
    ) -> Any:  # fmt: skip
        if (sender.name, server) in self.cuts:
            self.refused.add((sender.name, server))
            raise ServerError(f"{server}: {kind} failed: it cannot be reached")
        return super().deliver(sender, server, kind, deadline, work)


class Scene:
    """A cluster on such a network, and its twin without servers."""

    def __init__(self, shards: int = 3, **parity: Any) -> None:
        self.network = CutNetwork()
        self.hosts = LocalServers(self.network, shards)
        self.cluster = FlightCluster(
            TABLES, Adagrad(lr=0.1), self.hosts, seed=3, pool=Pool(1), timing=TIMING,
            transport=self.network.transport(), clock=self.network.clock,
            parity=Parity(**{"k": 2, "r": 1, **parity}),
        )  # fmt: skip
        self.twin = local(shards=shards, threads=1).open(TABLES, Adagrad(lr=0.1), seed=3)

    def push(self, times: int = 1) -> None:
        for _ in range(times):
            for one in (self.cluster, self.twin):
                push(one)

    def push_for(self, seconds: int) -> None:
        for _ in range(seconds):
            push(self.cluster)
            self.pass_time(1)

    def services(self) -> list[ParityService]:
        found = []
        for address in sorted(self.network.servers):
            epoch = self.network.servers[address]._epoch
            assert epoch is not None
            assert epoch.parity_service is not None
            found.append(epoch.parity_service)
        return found

    def pass_time(self, seconds: float) -> None:
        assert isinstance(self.network.clock, VirtualClock)
        self.network.clock.advance(timedelta(seconds=seconds))

    @property
    def status(self) -> Any:
        status = self.cluster.parity
        assert status is not None
        return status

    def heal(self) -> None:
        """They reach each other again: the next looks attach them, and parity is filled."""
        self.network.cut()
        self.pass_time(3)
        self.cluster.rebuild()
        # A part that was asked for twice may still be on its way.
        until(lambda: self.status.protected, "parity of all rows")

    def check(self) -> None:
        assert state(self.cluster) == state(self.twin)


def push(cluster: Any) -> None:
    wanted = wanted_of(cluster, {"fixed": list(range(40)), "wide": list(range(30))})
    dims = [cluster.tables[group[0]].dim for group in cluster.groups]
    grads = [np.ones((w.ids.size, d), np.float32) for w, d in zip(wanted, dims, strict=True)]
    cluster.push(wanted, grads, lr=0.1)


@contextmanager
def scene(**more: Any) -> Iterator[Scene]:
    opened = Scene(**more)
    try:
        yield opened
    finally:
        opened.network.cut()
        opened.cluster.close()


BOTH = ((0, 1), (1, 0))
ALONE = (*BOTH, (0, 2), (2, 0))


@pytest.mark.parametrize(
    ("background", "cuts"),
    [(False, BOTH), (False, ALONE), (True, [(0, 1)]), (True, ALONE)],
    ids=["both ways", "one is alone", "one way, background", "one is alone, background"],
)
def test_training_goes_on_and_parity_comes_back(
    background: bool, cuts: Sequence[tuple[int, int]]
) -> None:
    with scene(background=background) as run:
        run.push(2)
        began = run.network.clock.now().timestamp()
        run.network.cut(*cuts)
        run.push(3)
        # In the background a thread sends, as soon as the machine lets it.
        until(lambda: run.network.refused >= run.network.cuts, "messages that cannot be sent")
        run.pass_time(TIMING.deadline.total_seconds() + 2)
        passing(
            run.network.clock, lambda: run.status.left_out_hosts == len(cuts), "hosts left out",
            step=SECOND,
        )  # fmt: skip
        run.push(2)
        status = run.status
        assert not status.protected
        assert status.left_out_hosts == len(cuts)
        assert status.unprotected_stripes > 0
        assert began <= status.unprotected_since <= began + 1
        text = Registry(lambda: families(({}, status.samples()))).text()
        assert f"emberkeep_parity_left_out_hosts {len(cuts)}" in text
        service = run.services()[0]
        assert service.status()["left_out_hosts"] == len([a for a, _ in cuts if a == 0])
        assert service.status()["unprotected_since"] == pytest.approx(began, abs=1)
        events = [details for event, details in run.network.said if event == "unprotected"]
        assert {(e["shard"], e["host"]) for e in events} == set(cuts)
        run.heal()
        run.push(1)
        run.hosts.kill(2)
        run.check()
        run.cluster.rebuild()
        run.hosts.kill(0)
        run.check()


def test_what_waits_for_a_silent_host_is_bounded() -> None:
    with scene(background=True, window_nbytes=4_000) as run:
        run.push()
        run.network.cut(*BOTH)
        for _ in range(15):
            run.push()
            assert all(service.status()["lag"] <= 4 for service in run.services())
        run.heal()
        run.check()


@pytest.mark.parametrize("background", [False, True])
def test_so_it_is_while_rows_are_loaded(background: bool) -> None:
    """A server that loads a version writes its rows without any push."""
    with scene(background=background, window_nbytes=4_000) as run:
        run.push()
        run.network.cut(*BOTH)
        ids = np.arange(0, 40, 3)
        planes = run.twin.read("fixed", ids)
        epoch = run.network.servers["server-0"]._epoch
        assert epoch is not None
        service = run.services()[0]
        for _ in range(30):
            epoch.shard.delete("fixed", ids)
            epoch.shard.install("fixed", ids, planes)
            assert service.status()["lag"] <= 12
        assert service.status()["left_out_hosts"] == 1
        run.heal()
        run.check()


@pytest.mark.parametrize("background", [False, True])
def test_training_stops_where_it_is_asked_to(background: bool) -> None:
    with scene(background=background, unprotected="stop", window_nbytes=1 << 16) as run:
        run.push(2)
        run.network.cut(*BOTH)
        with pytest.raises(UnsettledError, match="silent"):
            run.push_for(200)
        assert run.status.left_out_hosts == 0
        assert run.status.unprotected_since is not None
        assert not [event for event, _ in run.network.said if event == "unprotected"]


def test_a_host_that_is_behind_is_not_asked_for_rows() -> None:
    """Shard 1 believes that its parity is whole; it lacks the last pushes of shard 0."""
    with scene() as run:
        run.push(2)
        run.network.cut((0, 1))
        run.push(2)
        assert run.status.left_out_hosts == 1
        run.hosts.kill(2)
        with pytest.warns(UserWarning, match="more than parity"), pytest.raises(ShardLostError):
            run.cluster.pull(wanted_of(run.cluster, {"fixed": [1, 2, 3]}))


def test_other_parity_brings_rows_back_meanwhile() -> None:
    with scene(shards=5, k=2, r=2) as run:
        run.push(2)
        run.network.cut((0, 3))
        run.push(2)
        assert run.status.left_out_hosts == 1
        run.hosts.kill(2)
        run.check()
        run.push()
        run.heal()
        run.hosts.kill(0)
        run.hosts.kill(3)
        run.check()


def test_acknowledged_pushes_survive_a_shard_that_had_left_a_host_out() -> None:
    """The host that was left out holds less than the others, and thinks that it holds all."""
    with scene(shards=5, k=2, r=2) as run:
        run.push(2)
        run.network.cut((0, 4))
        run.push(3)
        assert run.status.left_out_hosts == 1
        run.hosts.kill(0)
        run.network.cut()
        run.check()
        run.heal()
        run.hosts.kill(4)
        run.check()


def test_a_shard_whose_pushes_nobody_holds_is_left_to_the_repository() -> None:
    with scene() as run:
        run.push(2)
        run.network.cut((0, 1), (0, 2))
        run.push(2)
        assert run.status.left_out_hosts == 2
        run.hosts.kill(0)
        with pytest.warns(UserWarning, match="more than parity"), pytest.raises(ShardLostError):
            push(run.cluster)


def test_pushes_that_nobody_holds_are_kept_until_the_coordinator_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shard 0 has left out all its hosts, who think that they are whole, and so does the
    coordinator: it brings the shard back from them, and what they lack is sent again."""
    with scene() as run:
        run.push(2)
        run.network.rules = [Rule(how="refuse", kind="renew")]
        monkeypatch.setattr(run.cluster._protection, "mend", lambda: None)
        run.network.cut((0, 1), (0, 2))
        run.push(3)
        assert run.services()[0].status()["left_out_hosts"] == 2
        run.network.cut()
        run.hosts.kill(0)
        run.network.rules = []
        run.check()
        run.push()
        run.check()


def test_pushes_that_nobody_holds_are_let_go_once_the_coordinator_knows() -> None:
    with scene() as run:
        run.push(2)
        run.network.cut((0, 1), (0, 2))
        for _ in range(30):
            run.push()
            run.pass_time(1)
        assert run.services()[0].status()["left_out_hosts"] == 2
        assert len(run.cluster._unsettled) < 10
        run.cluster.install("fixed", *run.cluster.read_all("fixed"))  # nor do writes wait for them
        run.hosts.kill(0)
        with pytest.warns(UserWarning, match="more than parity"), pytest.raises(ShardLostError):
            push(run.cluster)


def test_mending_is_cheap_and_never_raises() -> None:
    with scene() as run:
        run.push()
        protection = run.cluster._protection
        assert protection is not None

        def asked() -> int:
            return sum(event.kind == "status" for event in run.network.events)

        protection.mend()
        before = asked()
        for _ in range(50):
            protection.mend()
        assert asked() == before
        run.pass_time(TIMING.lease.total_seconds())
        protection.mend()
        assert asked() > before
        for shard in range(3):
            run.hosts.kill(shard)
        run.pass_time(TIMING.lease.total_seconds())
        protection.mend()


def test_a_value_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="unprotected is"):
        Parity(unprotected="perhaps")  # type: ignore[arg-type]
