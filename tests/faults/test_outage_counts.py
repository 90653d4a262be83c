"""What a run waits for in an outage, for how long, and what it counts as lost."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emberkeep._types import Json
from emberkeep.cluster.outage import surviving
from emberkeep.cluster.remote import leases, timing
from emberkeep.cluster.remote.timing import Timing
from emberkeep.errors import PeerError, ServerError, ShardLostError
from emberkeep.runtime.clock import Clock
from emberkeep.testing.local_transport import Rule
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.security import Security
from tests.contracts.engine import wanted_of
from tests.faults.test_recovery_interrupted import saved
from tests.faults.test_servers_return import CODED, DYNAMIC, SHARDS, TIMING, World
from tests.waiting import passing


class Troubled:
    """A call that meets the given errors, one after the other; each wait takes a second."""

    lost_since: float | None = None

    def __init__(self, *errors: ShardLostError | PeerError) -> None:
        self._clock: Clock = VirtualClock()
        self._errors = list(errors)
        self.waited: list[float] = []

    @surviving
    def call(self) -> str:
        if self._errors:
            raise self._errors.pop(0)
        return "done"

    def _second_opinion(self, lost: ShardLostError) -> ShardLostError | PeerError:
        return lost

    def _bring_back(self, lost: ShardLostError) -> bool:
        return True

    def _await_peers(self, error: PeerError, seconds: float) -> bool:
        self.waited.append(seconds)
        self._clock.sleep(1)
        return "brought back" in str(error)


def test_peers_have_all_their_time_again_after_a_recovery() -> None:
    silent, lost = PeerError("silent"), ShardLostError([1])
    troubled = Troubled(silent, silent, silent, lost, silent, silent)
    assert troubled.call() == "done"
    assert troubled.waited == [0, 1, 2, 0, 1]
    troubled = Troubled(silent, silent, PeerError("brought back"), silent)
    assert troubled.call() == "done"
    assert troubled.waited == [0, 1, 2, 0]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_replacement_that_dies_while_it_starts_is_one_more_loss(deaths: int) -> None:
    world = World(parity=CODED)
    world.push()
    replace, left = world.launcher.replace, [None] * deaths

    def dies(shard: int, life: str) -> str:
        if left:
            left.pop()
            raise ServerError("a shard server ended with -9 before it was ready")
        return str(replace(shard, life))

    world.launcher.replace = dies
    world.launcher.kill(1)
    world.push()
    assert not left
    assert world.cluster.losses == [1]
    world.cluster.rebuild()
    world.check()


def test_a_server_that_another_connection_finds_dead_is_known_to_be_lost() -> None:
    """Else who recovers decides the same again, and meets the same again."""
    world = World(parity=CODED)
    world.push()
    world.launcher.kill(2)
    assert world.cluster.lost() == ()
    with pytest.raises(ShardLostError):
        world.cluster.renew(0)
    assert world.cluster.lost() == (0, 2)
    world.cluster.close()


def test_a_dead_server_does_not_take_a_silent_one_with_it() -> None:
    job = saved(2)
    world = job.worlds[0]
    epochs = world.epochs
    world.launcher.kill(0)
    world.cut_off(1, seconds=8)
    replace = world.launcher.replace

    def reachable(shard: int, life: str) -> str:
        if shard == 1:
            world.network.partition()  # where another server is, all is well
        return str(replace(shard, life))

    world.launcher.replace = reachable
    job.step()
    renewed = [after > before for after, before in zip(world.epochs, epochs, strict=True)]
    assert renewed == [True, False, False]
    assert job.lost_updates() == 2
    assert job.recoverer.summary().failures == 1
    assert [details["shards"] for event, details in job.events if event == "lost"] == [[0]]
    job.close()


def test_a_shard_whose_renewal_takes_several_attempts_is_lost_once() -> None:
    world = World()
    world.push()
    world.launcher.kill(1)
    world.network.rules = [Rule(how="refuse", kind="admit", server=world.names[1], at={2, 3})]
    with pytest.raises(ShardLostError):
        world.push(twin=False)
    for _ in range(2):
        with pytest.raises(ShardLostError):
            world.cluster.renew(1)
    world.cluster.renew(1)
    world.cluster.serve(1)
    assert world.cluster.losses == [1]
    # Of those that live, a model that goes back loses none.
    world.cluster.renew(*range(SHARDS))
    world.cluster.serve(*range(SHARDS))
    assert world.cluster.losses == [1]
    world.cluster.close()


def test_a_silence_is_counted_from_when_the_server_was_last_heard() -> None:
    """Nobody has asked it for a while: what a call says of it is no shorter for that."""
    world = World(fixed=True)
    world.push()
    heard: list[Json] = []
    world.cluster.on_event = lambda event, about: heard.extend([about] * (event == "silent"))
    world.network.partition(world.names[1])
    world.clock.advance(timedelta(seconds=40))
    world.clock.at(12, world.network.partition)
    world.push()
    assert 40 <= heard[0]["seconds"] < 60
    patience = TIMING.patience.total_seconds()
    assert heard[0]["until"] - heard[0]["seconds"] == pytest.approx(patience - 5, abs=1)
    world.check()


def test_a_silence_is_counted_although_the_thread_that_renews_had_no_turn_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases.Worker, "wake", lambda self: None)
    clock = VirtualClock()
    shard: Any = SimpleNamespace(index=0, address="127.0.0.1:1", epoch=1)
    kept = leases.Leases("me", [shard], Security(), TIMING, clock=clock)
    clock.advance(timedelta(seconds=40))
    kept.keep(shard)  # the same server: still silent
    assert kept.silent_seconds(0, clock.monotonic()) == 40
    shard.epoch = 2
    kept.keep(shard)
    clock.advance(timedelta(seconds=5))
    assert kept.silent_seconds(0, clock.monotonic()) == 5


def test_an_idle_coordinator_says_which_server_it_does_not_hear() -> None:
    world = World(fixed=True)
    world.push()
    heard: list[tuple[str, Json]] = []
    world.cluster.on_event = lambda *event: heard.append(event)
    world.network.partition(world.names[1])
    world.clock.advance(TIMING.lease / 2 - timedelta(seconds=1))
    assert heard == []
    passing(world.clock, lambda: heard, "the event", TIMING.lease)
    ((event, about),) = heard  # once
    assert (event, about["shard"], about["address"]) == ("unheard", 1, world.names[1])
    assert TIMING.lease.total_seconds() / 2 < about["seconds"]
    assert "cannot be reached" in about["error"]
    world.network.partition()
    passing(world.clock, lambda: len(heard) > 1, "its return", TIMING.lease)
    assert heard[1:] == [("returned", {"shard": 1, "address": world.names[1]})]
    world.push()
    assert len(heard) == 2
    world.check()


def test_renewals_do_not_tell_what_a_call_tells() -> None:
    world = World(fixed=True)
    world.push()
    world.cut_off(1, seconds=100)
    world.push()
    assert set(world.heard) == {"silent", "returned"}
    assert world.heard.count("returned") == 1
    world.check()


def test_a_worker_that_waits_in_vain_says_who_brings_shards_back() -> None:
    world = World(fixed=True)
    worker = world.open("worker", coordinate=False)
    world.network.stop(world.names[1])
    with pytest.raises(ServerError, match="the coordinator brings them back with its next call"):
        worker.pull(wanted_of(worker, {"fixed": [1]}))
    worker.close()
    world.cluster.close()


def test_a_worker_whose_pushes_a_shard_does_not_take_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shard serves, and a peer of it does not answer: nobody would look for that."""
    world = World(fixed=True)
    worker = world.open("worker", coordinate=False)
    cause = PeerError("shard 1 has not taken a push again: rows of shard 1 are not back")

    def refuse(index: int) -> None:
        if index == 1:
            raise cause

    monkeypatch.setattr(worker, "_send_again", refuse)
    worker.handles[1].lose()
    with pytest.raises(ServerError, match="rows of shard 1 are not back") as raised:
        worker.pull(wanted_of(worker, {"fixed": [1]}))
    assert raised.value.__cause__ is cause
    worker.close()
    world.cluster.close()


@pytest.mark.parametrize("kind", ["read", "upsert", "delete"])
def test_a_server_that_is_silent_to_rows_from_outside_is_noticed_as_by_a_pull(kind: str) -> None:
    """It was waited for as long as for moving a whole table."""
    world = World(DYNAMIC)
    world.push(ids=range(10))
    ids, began = np.arange(10), world.clock.monotonic()
    silent = Rule(how="delay", kind=kind, server=world.names[1], at={1}, by=TIMING.bulk)
    world.network.rules = [silent]
    for cluster in (world.cluster, world.twin):
        if kind == "read":
            cluster.read("dynamic", ids)
        elif kind == "upsert":
            cluster.upsert("dynamic", ids, {"weight": np.ones((10, 3), np.float32)})
        else:
            cluster.delete("dynamic", ids)
    assert world.clock.monotonic() - began < 1.5 * TIMING.deadline.total_seconds()
    world.check()


def test_many_rows_may_take_longer() -> None:
    world = World()
    world.push()
    ids, by = np.arange(30_000) % 40, 2 * TIMING.deadline
    world.network.rules = [Rule(how="delay", kind="read", at={1}, by=by)]
    planes = world.cluster.read("fixed", ids)
    assert planes["weight"].tobytes() == world.twin.read("fixed", ids)["weight"].tobytes()
    assert not world.heard
    assert [event.outcome for event in world.network.events if event.kind == "read"] == (
        ["delay"] * SHARDS
    )
    world.check()


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_many_bytes_may_take_longer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the least rate that counts, the rows of one request take more than two deadlines."""
    world = World()
    world.push()
    rows = wanted_of(world.cluster, {world.tables[0].name: list(range(40))})
    monkeypatch.setattr(timing, "_NBYTES_PER_SECOND", 10)
    world.network.rules = [Rule(how="delay", kind=kind, by=1.5 * TIMING.deadline)]
    if kind == "pull":
        world.cluster.pull(rows)
    else:
        world.push()
    outcomes = {event.outcome for event in world.network.events if event.kind == kind}
    assert outcomes - {"delivered"} == {"delay"}
    world.network.rules = []
    assert not world.heard
    world.check()


def test_the_deadline_grows_with_the_bytes_up_to_that_of_bulk() -> None:
    minute = timedelta(minutes=1)
    given = Timing(bulk=minute)
    assert given.moving(0) == given.deadline
    assert given.moving(100 * 2**20) == given.deadline + timedelta(seconds=10)
    assert given.moving(2**31) == minute
    assert Timing(bulk=timedelta(seconds=1)).moving(2**31) == given.deadline
