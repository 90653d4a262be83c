"""Pushes that end half-way: each shard for a reason of its own, and nobody recovers. Whatever a
shard has not answered it gets once, as soon as it is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from emberkeep._types import U8
from emberkeep.errors import EmberkeepError, PeerError, RankError, ShardLostError
from emberkeep.wire.protocol import PUSH, refusal
from tests.contracts.engine import wanted_of
from tests.faults.test_servers_return import SECOND, TIMING, World

_KIND_AT = 4  # in the header of a request


def refuse(
    world: World, shard: int, error: EmberkeepError, *, times: int = 1,
    before: Callable[[], object] = lambda: None,
) -> Callable[[], object]:  # fmt: skip
    """A server refuses pushes, so many times: nothing is applied. What is returned ends that."""
    service = world.network.servers[world.names[shard]]
    answer, left = service.answer, [None] * times

    def refused(blob: U8, session: Any) -> U8:
        if left and int(blob[_KIND_AT]) == PUSH:
            left.pop()
            before()
            return refusal(error, 1)
        return answer(blob, session)

    service.answer = refused  # type: ignore[method-assign]
    return left.clear


def push_on_twin(world: World) -> None:
    wanted = wanted_of(world.twin, {world.tables[0].name: list(range(40))})
    world.twin.push(wanted, [np.ones((40, 3), np.float32)], lr=0.1)


@pytest.mark.parametrize("error", [PeerError("rows are not back"), RankError("nobody came")])
def test_a_shard_that_refused_while_another_was_lost_gets_the_push_as_well(
    error: EmberkeepError,
) -> None:
    """The call ends with the loss, which names the lost one alone."""
    world = World()
    world.push()
    world.cut_off(1, seconds=100)
    refuse(world, 2, error)
    with pytest.raises(ShardLostError) as lost:
        world.push(twin=False)
    assert lost.value.shards == (1,)
    push_on_twin(world)
    world.clock.advance(200 * SECOND)
    world.push()
    world.check()


def test_a_push_that_no_peer_of_a_shard_lets_it_apply_is_finished_later() -> None:
    """It waits for as long as a call waits for peers, and ends with their error."""
    world = World()
    world.push()
    deadline = TIMING.deadline.total_seconds()
    heal = refuse(
        world, 2, PeerError("rows are not back"), times=10,
        before=lambda: world.clock.sleep(deadline),
    )  # fmt: skip
    with pytest.raises(PeerError, match="rows are not back"):
        world.push(twin=False)
    push_on_twin(world)
    heal()
    world.push()
    world.check()


def test_a_push_that_is_sent_again_and_meets_peers_in_trouble_is_not_written_off() -> None:
    world = World()
    world.push()
    world.cut_off(1, seconds=100)
    with pytest.raises(ShardLostError):
        world.push(twin=False)
    push_on_twin(world)
    world.clock.advance(200 * SECOND)
    refuse(world, 1, PeerError("rows are not back"), times=3)
    world.push()
    world.check()
