"""Partial recoveries that are interrupted: what is lost is counted once, and nothing else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.recovery import Home, Recovery, recover_partially
from emberkeep.errors import RankError, ShardLostError
from emberkeep.keeper.recoverer import Recoverer
from emberkeep.keeper.run_saver import Kept
from emberkeep.repository import Repository
from emberkeep.testing.local_transport import Rule
from tests.contracts.engine import wanted_of
from tests.faults.test_servers_return import SECOND, SHARDS, World

TOTAL = 100


class Saver(Checkpointer):
    """As a keeper's: brings back what it has saved."""

    def recover_shards(
        self, lost: Iterable[tuple[Home, Sequence[int]]], still: Callable[[], bool] | None = None
    ) -> Kept | None:
        found = [recover_partially(self, home, shards, still) for home, shards in lost]
        return found[-1] if found else None


class Job:
    """Clusters whose steps are counted, saved and recovered together."""

    def __init__(self, *worlds: World) -> None:
        self.worlds = worlds
        self.steps = 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.homes = [Home(world.cluster, {"fixed": "fixed"}) for world in worlds]
        world = worlds[0]
        world.cluster.track()
        self.saver: Any = Saver(
            Repository.create(MemoryStore(), schema=world.cluster.schema()), world.cluster
        )
        self.recoverer = Recoverer(
            self.homes, self.saver, Recovery(scope="partial"), total_steps=TOTAL,
            steps=lambda: self.steps, go_back=None,
            tell=lambda event, details: self.events.append((event, details)), clock=world.clock,
        )  # fmt: skip

    def step(self) -> None:
        for world in self.worlds:
            world.push(twin=False)
        self.steps += 1

    def save(self) -> None:
        self.saver.save(self.steps)
        assert self.saver.wait() is not None

    def lost_updates(self) -> float:
        shards = SHARDS * len(self.worlds)
        return round(self.recoverer.losses.pls * TOTAL * shards, 6)

    def close(self) -> None:
        self.saver.close()
        for world in self.worlds:
            world.cluster.close()


def saved(steps: int, *worlds: World) -> Job:
    job = Job(*(worlds or (World(),)))
    job.step()
    job.save()
    for _ in range(steps):
        job.step()
    return job


@pytest.mark.parametrize(("kind", "at"), [("serve", {2, 3}), ("install", {1, 2}), ("admit", {2})])
def test_shards_that_serve_when_another_is_lost_again_are_counted(kind: str, at: set[int]) -> None:
    """Shard 0 may serve with its rows of the version when the recovery of shard 1 fails."""
    job = saved(2)
    world = job.worlds[0]
    for shard in (0, 1):
        world.launcher.kill(shard)
    world.network.rules = [Rule(how="refuse", kind=kind, server=world.names[1], at=at)]
    job.step()
    failed = [event for event in world.network.events if event.outcome == "refuse"]
    assert len(failed) == len(at)
    assert job.lost_updates() == 2 * 2
    assert job.recoverer.summary().partial == 1
    job.close()


def test_an_error_that_ends_a_recovery_leaves_what_is_lost_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows of the shard are gone by then, and it serves."""
    job = saved(3)
    world = job.worlds[0]
    world.launcher.kill(2)
    flush = world.cluster._settle_writes

    def fails() -> None:
        monkeypatch.setattr(world.cluster, "_settle_writes", flush)
        raise RankError("nobody foresaw this")

    monkeypatch.setattr(world.cluster, "_settle_writes", fails)
    with pytest.raises(RankError):
        job.step()
    assert world.cluster.lost() == ()
    assert job.lost_updates() == 3
    job.close()


def test_a_server_that_is_silent_in_the_recovery_of_another_is_not_lost() -> None:
    job = saved(2)
    world = job.worlds[0]
    epochs = world.epochs
    world.launcher.kill(2)
    replace = world.launcher.replace

    def cut(shard: int, life: str) -> str:
        world.cut_off(0, seconds=8)
        return str(replace(shard, life))

    world.launcher.replace = cut
    serve = world.cluster.serve

    def asks(*shards: int, exact: bool = False) -> None:
        world.cluster.handles[0].table_state()  # as a recovery may, at any moment
        serve(*shards, exact=exact)

    world.cluster.serve = asks  # type: ignore[method-assign]
    job.step()
    assert world.epochs[:2] == epochs[:2]
    assert job.lost_updates() == 2
    job.close()


@pytest.mark.parametrize("call", [1, 3, 4])
def test_what_is_counted_as_lost_does_not_return(call: int) -> None:
    """Shard 2 is silent for longer than its lease, and answers again when its recovery is
    interrupted, before or after it was decided upon."""
    job = saved(2)
    world = job.worlds[0]
    epochs = world.epochs
    world.cut_off(2, seconds=16)
    table_state = type(world.cluster.handles[0]).table_state
    calls: list[int] = []

    def fails(shard: Any) -> Any:
        calls.append(shard.index)
        if len(calls) == call:
            world.clock.advance(20 * SECOND)
            raise shard.lose()
        return table_state(shard)

    for handle in world.cluster.handles:
        handle.table_state = functools.partial(fails, handle)  # type: ignore[method-assign]
    job.step()
    assert len(calls) >= call
    renewed = [after > before for after, before in zip(world.epochs, epochs, strict=True)]
    assert renewed[:2] == [False, False]
    assert job.lost_updates() == 2 * sum(renewed)
    job.close()


def test_two_threads_that_meet_one_loss_recover_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits until the first has brought the shard back."""
    job = saved(2)
    world = job.worlds[0]
    before = world.epochs
    recovering, asked, go_on = threading.Event(), threading.Event(), threading.Event()
    join = job.saver.join

    def joins(*given: Any) -> bool:
        recovering.set()
        assert go_on.wait(60)
        return bool(join(*given))

    monkeypatch.setattr(job.saver, "join", joins)
    world.launcher.kill(1)
    errors: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    def pull() -> None:
        world.cluster.pull(wanted_of(world.cluster, {"fixed": [1, 2, 3, 4]}))

    on_loss = world.cluster.on_loss
    assert on_loss is not None

    def asks(lost: ShardLostError) -> bool:
        if recovering.is_set():
            asked.set()
        return on_loss(lost)

    world.cluster.on_loss = asks
    threads = [threading.Thread(target=guarded, args=[call]) for call in (job.step, pull)]
    threads[0].start()
    assert recovering.wait(60)
    threads[1].start()
    assert asked.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert world.epochs == [before[0], before[1] + 1, before[2]]
    assert job.lost_updates() == 2
    job.close()
