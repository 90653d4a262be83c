"""Streams whose server is stopped, and streams that another thread has closed: nobody waits for
what cannot come."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.errors import ServerError, ShardLostError
from emberkeep.runtime.pool import Pool
from emberkeep.tables import SGD, Table
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import PROTOCOL
from emberkeep.wire.security import Security
from tests.contracts.engine import wanted_of
from tests.servers import Farm

SECOND = timedelta(seconds=1)
TIMING = Timing(deadline=SECOND, lease=60 * SECOND, patience=60 * SECOND)
MUCH_SECONDS = 50  # far beyond all deadlines


def opened(address: str) -> Any:
    channel = FLIGHT.dial(address, Security())
    channel.open(json.dumps({"protocol": PROTOCOL, "incarnation": 1}).encode())
    return channel


def cluster_at(address: str) -> FlightCluster:
    servers = FixedAddresses([address], Security(), patience=TIMING.patience)
    return FlightCluster(
        [Table("t", rows=9, dim=2)], SGD(lr=0.1), servers, seed=1, pool=Pool(1), timing=TIMING
    )


def ends(call: Callable[[], object]) -> bool:
    """Whether a call comes to an end, with an error or without."""

    def run() -> None:
        try:
            call()
        except (ServerError, ShardLostError) as error:
            errors.append(error)

    errors: list[Exception] = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(MUCH_SECONDS)
    return not thread.is_alive()


def test_an_idle_stream_is_closed_though_its_server_is_stopped(farm: Farm) -> None:
    pid, address = farm.start()
    channel = opened(address)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert ends(channel.close)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_nothing_is_received_where_nothing_is_awaited(farm: Farm) -> None:
    _, address = farm.start()
    channel = opened(address)
    with pytest.raises(ServerError, match="nothing is awaited"):
        channel.receive()
    channel.close()
    for call in (
        channel.receive,
        lambda: channel.send(np.zeros(1, np.uint8), SECOND),
        lambda: list(channel.call("status", b"", SECOND)),
        lambda: channel.open(b""),
    ):
        with pytest.raises(ServerError):
            call()


@pytest.mark.parametrize("asked", ["table_state", "alive", "close"])
def test_a_server_that_stops_between_two_steps_is_noticed_by_whatever_asks_first(
    farm: Farm, asked: str
) -> None:
    pid, address = farm.start()
    cluster = cluster_at(address)
    cluster.on_loss = lambda _: False
    cluster.pull(wanted_of(cluster, {"t": [1]}))
    handle = cluster.handles[0]
    calls = {"table_state": handle.table_state, "alive": handle.alive, "close": cluster.close}
    os.kill(pid, signal.SIGSTOP)
    try:
        assert ends(calls[asked])
    finally:
        os.kill(pid, signal.SIGCONT)
        cluster.close()


def test_a_push_goes_on_though_another_thread_has_made_a_new_connection(farm: Farm) -> None:
    """One that looks at the server, say, and found it silent."""
    _, address = farm.start()
    cluster = cluster_at(address)
    handle, wanted = cluster.handles[0], wanted_of(cluster, {"t": [1]})
    before = cluster.pull(wanted)[0].copy()
    receive, revived = handle.receive, list[bool]()

    def revives_first() -> Any:
        if not revived:
            revived.append(True)
            handle._revive()
        return receive()

    handle.receive = revives_first  # type: ignore[method-assign]
    ones = [np.ones((1, 2), np.float32)]
    assert ends(lambda: cluster.push(wanted, ones, lr=0.1))
    handle.receive = receive  # type: ignore[method-assign]
    assert np.allclose(before - cluster.pull(wanted)[0], 0.1)
    cluster.close()
