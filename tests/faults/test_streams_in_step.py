"""A request that ends half-way, by no memory or by Ctrl-C, leaves no reply behind that would be
taken for the next one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.errors import ShardLostError
from tests.contracts.engine import wanted_of
from tests.faults.test_pushes_interrupted import push_on_twin
from tests.faults.test_servers_return import SECOND, World

ERRORS = [MemoryError("no room"), KeyboardInterrupt()]


def fail_once(
    monkeypatch: pytest.MonkeyPatch, name: str, shard: int, error: BaseException
) -> list[BaseException]:
    """`name` of a shard of the client raises, once."""
    call, left = getattr(RemoteShard, name), [error]

    def failing(self: RemoteShard, *args: Any) -> Any:
        if left and self.index == shard:
            raise left.pop()
        return call(self, *args)

    monkeypatch.setattr(RemoteShard, name, failing)
    return left


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_rows_that_a_prefetch_was_about_to_bring_are_not_taken_for_later_ones(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    world = World()
    world.push()
    wanted = wanted_of(world.cluster, {"fixed": list(range(20))})
    left = fail_once(monkeypatch, "send", 1, error)
    with pytest.raises(type(error)):
        world.cluster.prefetch(wanted)
    assert not left
    for ids in (range(20), range(20, 40)):  # as many of each shard
        wanted = wanted_of(world.cluster, {"fixed": list(ids)})
        (rows,), (same,) = world.cluster.pull(wanted), world.twin.pull(wanted)
        assert np.array_equal(rows, same)
    world.push()
    world.check()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_the_answer_to_a_push_that_was_sent_again_is_not_taken_for_that_to_the_next(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    world = World()
    world.push()
    world.cut_off(1, seconds=100)
    with pytest.raises(ShardLostError):
        world.push(twin=False)
    push_on_twin(world)
    world.clock.advance(200 * SECOND)
    wanted = wanted_of(world.cluster, {"fixed": list(range(40))})
    left: list[BaseException] = []
    send_one = type(world.cluster)._send_one

    def failing(self: Any, sent: Any, index: int) -> None:
        left.extend(fail_once(monkeypatch, "receive", index, error))
        monkeypatch.setattr(type(world.cluster), "_send_one", send_one)
        send_one(self, sent, index)

    monkeypatch.setattr(type(world.cluster), "_send_one", failing)
    with pytest.raises(type(error)):
        world.cluster.pull(wanted)
    assert left
    world.push()
    (rows,), (same,) = world.cluster.pull(wanted), world.twin.pull(wanted)
    assert np.array_equal(rows, same)
    world.check()
