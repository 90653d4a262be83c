"""A server dies when one rank of two has its answer and the other has not; its rows come back from
a version. Each step is on every shard, or is one that the recovery counts as lost."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from emberkeep._types import U8
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.recovery import Home, recover_partially
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import ServerError, ShardLostError
from emberkeep.repository import Repository
from emberkeep.tables import Table
from emberkeep.wire.protocol import APPLY, CHECK, PUSH
from tests.contracts.engine import wanted_of
from tests.faults.test_servers_return import DYNAMIC, TABLES, World

_KIND_AT, _RANK_AT = 4, 8  # in the header of a request
IDS = list(range(6))
SAVED, FAILS, LAST = 2, 4, 7
DEAD = 1


class Ranks:
    """Two ranks, each in a thread; the first saves, and recovers partially."""

    def __init__(self, tables: list[Table]) -> None:
        self.world = World(tables, pace=1.0, rank=0, world=2)
        self.name = tables[0].name
        self.clusters = [
            self.world.cluster,
            self.world.open("rank-1", rank=1, world=2, coordinate=False),
        ]
        coordinator = self.clusters[0]
        coordinator.track()
        self.saver = Checkpointer(
            Repository.create(MemoryStore(), schema=coordinator.schema()), coordinator
        )
        coordinator.on_loss = self.on_loss
        self.steps = [0, 0]
        self.lost_steps: list[int] = []
        self.errors: list[BaseException] = []

    def on_loss(self, lost: ShardLostError) -> bool:
        home = Home(self.clusters[0], {self.name: self.name})
        recover_partially(self.saver, home, lost.shards)
        self.lost_steps.append(self.steps[0] - SAVED)
        return True

    def train(self, last: int) -> None:
        threads = [threading.Thread(target=self._train, args=[rank, last]) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not self.errors, self.errors

    def _train(self, rank: int, last: int) -> None:
        cluster: FlightCluster = self.clusters[rank]
        try:
            while self.steps[rank] < last:
                wanted = wanted_of(cluster, {self.name: IDS})
                cluster.pull(wanted)
                cluster.push(wanted, [np.ones((len(IDS), 3), np.float32)], lr=0.1)
                self.steps[rank] += 1
        except BaseException as error:
            self.errors.append(error)

    def kill_between(self, behind: int) -> None:
        """The server of a shard answers a step to one rank, and dies before it answers the one
        that stays behind."""
        world = self.world
        service = world.network.servers[world.names[DEAD]]
        answer, other_has_it = service.answer, threading.Event()

        def dies(blob: U8, session: Any) -> U8:
            if int(blob[_KIND_AT]) not in (PUSH, APPLY) or self.steps[behind] != FAILS - 1:
                return answer(blob, session)
            if int(blob[_RANK_AT]) != behind:
                reply = answer(blob, session)
                other_has_it.set()
                return reply
            if int(blob[_KIND_AT]) == APPLY:
                assert other_has_it.wait(60)
            answer(blob, session)
            assert other_has_it.wait(60)
            world.launcher.kill(DEAD)
            raise ServerError("it is dead")

        service.answer = dies  # type: ignore[method-assign]


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("tables", [TABLES, DYNAMIC], ids=["fixed", "dynamic"])
def test_a_rank_that_is_ahead_of_a_recovery(tables: list[Table], behind: int) -> None:
    ranks = Ranks(tables)
    ranks.train(SAVED)
    ranks.saver.save(SAVED)
    assert ranks.saver.wait() is not None
    ranks.train(FAILS - 1)
    ranks.kill_between(behind)
    ranks.train(LAST)
    # The coordinator has ended the step, or it has not, and then no shard is without it.
    lost = FAILS - SAVED if behind == 1 else FAILS - 1 - SAVED
    assert ranks.lost_steps == [lost]
    cluster = ranks.clusters[0]
    owners = cluster.positions(ranks.name, np.array(IDS))
    for shard, positions in enumerate(owners):
        rows = cluster.read(ranks.name, np.array(IDS)[positions])
        steps = LAST - lost if shard == DEAD else LAST
        assert (rows["accumulator"] == steps).all()
    assert {handle.table_state()[ranks.name]["steps"] for handle in cluster.handles} == {LAST}
    ranks.saver.close()
    ranks.clusters[1].close()
    cluster.close()


@pytest.mark.parametrize("sends_again", [False, True])
def test_a_step_that_all_shards_have_checked_is_applied_by_all_although_one_rank_has_given_it_up(
    sends_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank may be applying it: some shards would be without it. That is so
    whether it knows that all have checked the step or has to ask again."""
    ranks = Ranks(DYNAMIC)
    ranks.train(SAVED)
    given_up = threading.Event()
    first, second = ranks.clusters
    requests = first._requests

    def stops(kind: int, *args: Any, **kwargs: Any) -> list[U8]:
        if kind == APPLY:
            raise KeyboardInterrupt
        return requests(kind, *args, **kwargs)

    monkeypatch.setattr(first, "_requests", stops)
    held_up = CHECK if sends_again else APPLY
    # One rank's requests come one after the other: all servers but the last have its check by then.
    for name in ranks.world.names[-1 if sends_again else 0 :]:
        service = ranks.world.network.servers[name]
        answer = service.answer

        def waits(blob: U8, session: Any, answer: Any = answer) -> U8:
            if int(blob[_RANK_AT]) != 1 or int(blob[_KIND_AT]) != held_up or given_up.is_set():
                return answer(blob, session)  # type: ignore[no-any-return]
            if held_up == CHECK:
                answer(blob, session)
            assert given_up.wait(60)
            if held_up == CHECK:
                raise ServerError("the answer is lost")
            return answer(blob, session)  # type: ignore[no-any-return]

        monkeypatch.setattr(service, "answer", waits)
    wanted = wanted_of(first, {ranks.name: IDS})
    grads = [np.ones((len(IDS), 3), np.float32)]
    raised: list[BaseException] = []

    def push() -> None:
        try:
            second.push(wanted, grads, lr=0.1)
        except BaseException as error:
            raised.append(error)

    other = threading.Thread(target=push)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        first.push(wanted, grads, lr=0.1)
    given_up.set()
    other.join(100)
    assert raised == []
    assert {h.table_state()[ranks.name]["steps"] for h in first.handles} == {SAVED + 1}
    ranks.saver.close()
    second.close()
