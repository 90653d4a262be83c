"""Recoveries from parity that are interrupted: who is only unreachable keeps its rows."""

from __future__ import annotations

from typing import Any

import pytest

from emberkeep.errors import ServerError
from emberkeep.testing.local_transport import Rule
from tests.faults.test_servers_return import CODED, World


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("seconds", [0, 8])
def test_a_living_server_that_does_not_answer_in_a_recovery_keeps_its_rows(
    fixed: bool, seconds: float
) -> None:
    """Shard 0 is dead, and shard 1 is asked for parity when it cannot be reached. With both of
    them gone, parity could bring back neither."""
    world = World(fixed=fixed, parity=CODED)
    world.push()
    epochs = world.epochs
    world.network.stop(world.names[0])
    if fixed:
        world.network.start(world.names[0])
    answer = world.network.servers[world.names[1]].answer_action
    asked: list[str] = []

    def cut(kind: str, content: Any) -> Any:
        if kind == "member" and not asked:
            asked.append(kind)
            world.network.rules = [Rule(how="refuse", server=world.names[1])]
            world.clock.at(seconds, world.network.rules.clear)
            raise ServerError("the answer is lost")
        return answer(kind, content)

    world.network.servers[world.names[1]].answer_action = cut  # type: ignore[method-assign]
    world.push()
    assert asked
    assert world.epochs[1:] == epochs[1:]
    assert "recovered" in world.heard
    world.cluster.rebuild()
    world.check()
