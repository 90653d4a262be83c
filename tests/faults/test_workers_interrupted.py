"""Asynchronous workers that are stopped while others go on: each push is applied once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from emberkeep._types import U8
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.recovery import Home, recover_partially
from emberkeep.errors import ServerError, ShardLostError
from emberkeep.repository import Repository
from emberkeep.wire.protocol import PUSH
from tests.contracts.engine import wanted_of
from tests.faults.test_servers_return import SHARDS, World

_KIND_AT = 4  # in the header of a request
NAMES = {"fixed": "fixed"}


class Job:
    """A coordinator that saves and recovers partially, and a worker beside it."""

    def __init__(self) -> None:
        self.world = World()
        self.cluster = self.world.cluster
        self.cluster.track()
        self.saver = Checkpointer(
            Repository.create(MemoryStore(), schema=self.cluster.schema()), self.cluster
        )
        self.cluster.on_loss = self.on_loss
        self.worker = self.world.open("worker", coordinate=False)

    def on_loss(self, lost: ShardLostError) -> bool:
        recover_partially(self.saver, Home(self.cluster, NAMES), lost.shards)
        return True

    def push(self, cluster: Any) -> None:
        wanted = wanted_of(cluster, {"fixed": list(range(40))})
        cluster.push(wanted, [np.ones((40, 3), np.float32)], lr=0.1)

    def save(self) -> None:
        self.saver.save(1)
        assert self.saver.wait() is not None

    def stop_worker_in_push(self, shard: int, meanwhile: Callable[[], object]) -> None:
        """A shard applies the worker's next push, which is stopped before it hears of it."""
        service = self.world.network.servers[self.world.names[shard]]
        answer = service.answer

        def stops(blob: U8, session: Any) -> U8:
            reply = answer(blob, session)
            if int(blob[_KIND_AT]) == PUSH:
                service.answer = answer  # type: ignore[method-assign]
                meanwhile()
                raise ServerError("the worker was stopped, and its stream is gone")
            return reply

        service.answer = stops  # type: ignore[method-assign]

    def pushes(self, shard: int) -> set[float]:
        """How many pushes the rows of a shard hold."""
        ids = self.cluster.positions("fixed", np.arange(40))[shard]
        return set(self.cluster.read("fixed", ids)["accumulator"].ravel().tolist())

    def close(self) -> None:
        self.saver.close()
        self.worker.close()
        self.cluster.close()


@pytest.mark.parametrize("recoveries", [1, 2])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_push_that_a_version_holds_is_not_applied_to_rows_that_come_from_it(
    shard: int, recoveries: int
) -> None:
    job = Job()
    job.push(job.cluster)
    job.push(job.worker)

    def version_and_loss() -> None:
        job.save()
        for _ in range(recoveries):
            job.world.launcher.kill(shard)
            job.cluster.pull(wanted_of(job.cluster, {"fixed": list(range(40))}))

    job.stop_worker_in_push(shard, version_and_loss)
    job.push(job.worker)
    assert [job.pushes(s) for s in range(SHARDS)] == [{3.0}] * SHARDS
    for cluster in (job.worker, job.cluster):
        job.push(cluster)
    job.save()
    job.world.launcher.kill(shard)
    job.push(job.cluster)
    assert [job.pushes(s) for s in range(SHARDS)] == [{6.0}] * SHARDS
    job.close()


def test_a_push_that_no_version_holds_is_applied_to_rows_that_come_from_one() -> None:
    """What the worker was answered since the version is lost with the shard, and counted."""
    job = Job()
    job.push(job.worker)
    job.save()
    for _ in range(3):
        job.push(job.worker)

    def loss() -> None:
        job.world.launcher.kill(1)
        job.cluster.pull(wanted_of(job.cluster, {"fixed": list(range(40))}))

    job.stop_worker_in_push(1, loss)
    job.push(job.worker)
    assert [job.pushes(s) for s in range(SHARDS)] == [{5.0}, {2.0}, {5.0}]
    job.close()
