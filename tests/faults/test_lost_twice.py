"""Shards that come back from a version and then, in the next epoch, from parity."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from emberkeep._types import U8
from emberkeep.checkpoint.recovery import Home, recover_partially
from emberkeep.testing.local_transport import Rule
from tests.contracts.engine import wanted_of
from tests.faults.test_servers_return import BEHIND, CODED, SHARDS
from tests.faults.test_workers_interrupted import NAMES, Job, Watched

LOST = 1


def lose_twice(job: Job) -> None:
    """First the rows come from the newest version, as if too much was lost, then from parity."""
    job.world.launcher.kill(LOST)
    assert not job.cluster.handles[LOST].alive()
    recover_partially(job.saver, Home(job.cluster, NAMES), [LOST])
    job.cluster.rebuild()
    job.world.launcher.kill(LOST)
    job.cluster.pull(wanted_of(job.cluster, {"fixed": list(range(40))}))


@pytest.mark.parametrize("whose", ["coordinator", "worker"])
def test_a_push_that_was_lost_with_a_shard_is_not_made_again_by_parity(whose: str) -> None:
    """It is counted as lost, and rows were read without it."""
    job = Job(parity=BEHIND)
    pushes = job.cluster if whose == "coordinator" else job.worker
    job.push(pushes)
    job.save()
    job.world.network.rules = [Rule(how="refuse", kind="parity")]  # so that the next one is kept
    job.push(pushes)
    job.world.network.rules = []
    assert len(pushes._unsettled) == 1
    lose_twice(job)
    job.push(pushes)
    assert [job.pushes(s) for s in range(SHARDS)] == [{3.0}, {2.0}, {3.0}]
    assert job.cluster.table_state()["fixed"]["steps"] == 3
    job.close()


def test_a_push_that_was_made_again_is_made_again_once_more() -> None:
    """By parity that was without it; the worker had its answer in the epoch before."""
    job = Job(parity=BEHIND)
    job.push(job.worker)
    job.save()

    def loss() -> None:
        job.world.launcher.kill(LOST)
        assert not job.cluster.handles[LOST].alive()
        recover_partially(job.saver, Home(job.cluster, NAMES), [LOST])
        job.cluster.rebuild()
        job.world.network.rules = [Rule(how="refuse", kind="parity")]

    job.stop_worker_in_push(LOST, loss)
    job.push(job.worker)
    assert job.worker._unsettled
    job.world.launcher.kill(LOST)
    job.world.network.rules = []
    job.cluster.pull(wanted_of(job.cluster, {"fixed": list(range(40))}))
    job.push(job.worker)
    assert [job.pushes(s) for s in range(SHARDS)] == [{3.0}] * SHARDS
    job.close()


def test_a_push_that_a_version_holds_is_not_applied_to_rows_that_parity_brings_back() -> None:
    job = Job(parity=CODED)
    job.push(job.cluster)
    job.push(job.worker)

    def version_and_losses() -> None:
        job.save()
        lose_twice(job)

    job.stop_worker_in_push(LOST, version_and_losses)
    job.push(job.worker)
    assert [job.pushes(s) for s in range(SHARDS)] == [{3.0}] * SHARDS
    job.close()


def test_a_push_that_the_lost_shard_alone_had_answered_is_sent_to_it_again() -> None:
    """It reaches the others after they were asked what was trained since the version."""
    job = Watched()
    job.push(job.cluster)
    job.push(job.worker)
    job.save()
    worker, exchange = job.worker, job.worker._exchange

    def late(blobs: Sequence[U8], deadline: timedelta, sent: Any = None) -> list[U8]:
        worker._exchange = exchange  # type: ignore[method-assign]
        first = worker.handles[0]
        first.send(blobs[0], deadline)
        first.receive()
        epoch = first.epoch
        job.world.launcher.kill(0)
        assert job.comes_back()
        replies = []
        for shard, blob in zip(worker.handles[1:], blobs[1:], strict=True):
            shard.send(blob, deadline)
            replies.append(shard.receive())
        sent.answered.update({0: epoch, 1: epoch, 2: epoch})
        return [replies[0], *replies]

    worker._exchange = late  # type: ignore[method-assign]
    job.push(worker)
    job.push(worker)
    assert [job.pushes(s) for s in range(SHARDS)] == [{4.0}] * SHARDS
    job.close()


def test_a_worker_whose_pushes_are_settled_does_not_ask_servers_when_it_ends() -> None:
    job = Job()
    job.push(job.worker)
    assert [sent.settled for sent in job.worker._unsettled] == [True]
    job.cluster.close()
    job.worker.close()
    job.saver.close()
    assert job.world.clock.monotonic() < 1
