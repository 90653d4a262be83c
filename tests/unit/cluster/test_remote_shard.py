"""One shard on a server, used by several threads at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep._types import U8
from emberkeep.errors import ServerError
from emberkeep.tables import Table
from emberkeep.wire.connection import Connection
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.security import Security
from tests.contracts.engine import wanted_of
from tests.faults.test_servers_return import World

TABLES = [Table("fixed", rows=40, dim=3)]


def lose_meanwhile(monkeypatch: pytest.MonkeyPatch, world: World, shard: int, name: str) -> None:
    """The next connection to a shard is lost while it is made or used, as by another thread."""
    handle = world.cluster.handles[shard]
    real, left = getattr(Connection, name), [None]

    def losing(connection: Connection, *given: Any) -> Any:
        hit = left and connection.address == handle.address
        if hit and name == "open":
            left.pop()
            result = real(connection, *given)
            handle.lose()
            return result
        if hit:
            left.pop()
            handle.settle()
            handle.lose()
        return real(connection, *given)

    monkeypatch.setattr(Connection, name, losing)


@pytest.mark.parametrize("name", ["open", "send"])
def test_a_connection_that_another_thread_gives_up_is_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    world = World(TABLES)
    shard = world.cluster.handles[1]
    shard.disconnect()
    lose_meanwhile(monkeypatch, world, 1, name)
    blob: U8 = np.zeros(64, np.uint8)
    with pytest.raises(ServerError):
        shard.send(blob, timedelta(seconds=1))
    world.cluster.close()


def test_training_goes_on_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(TABLES)
    world.push()
    world.cluster.handles[1].disconnect()
    lose_meanwhile(monkeypatch, world, 1, "open")
    world.push()
    world.cluster.pull(wanted_of(world.cluster, {"fixed": [1]}))
    world.check()


def test_a_stream_that_is_half_open_can_be_closed() -> None:
    """Another thread closes it when Flight has made the one half of it known."""

    class Writer:
        closed = False

        def close(self) -> None:
            self.closed = True

    channel: Any = FLIGHT.dial("127.0.0.1:7", Security())
    writer = channel._writer = Writer()
    channel.close()
    assert writer.closed
