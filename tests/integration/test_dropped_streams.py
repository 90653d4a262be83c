"""Streams that nobody closes: a run that ends with an error drops them."""

from __future__ import annotations

import gc
import json

import pytest

from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import PROTOCOL
from emberkeep.wire.security import Security
from tests.servers import Farm


@pytest.mark.parametrize("dead", [True, False])
def test_a_stream_that_is_dropped_prints_nothing(
    farm: Farm, dead: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Arrow printed a line for each whose server was gone."""
    pid, address = farm.start()
    channel = FLIGHT.dial(address, Security())
    channel.open(json.dumps({"protocol": PROTOCOL, "incarnation": 1}).encode())
    if dead:
        farm.kill(pid)
    del channel
    gc.collect()
    assert capfd.readouterr().err == ""
