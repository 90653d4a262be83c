"""How soon a server serves again after a partition: on virtual time."""

from __future__ import annotations

import pytest

from tests.faults.test_servers_return import World


@pytest.mark.parametrize("seconds", [16, 31, 63, 120, 121, 122, 123])
def test_a_server_serves_soon_after_the_end_of_a_partition(seconds: float) -> None:
    """It is silent since its lease has passed: its renewal does not wait for its turn."""
    world = World(fixed=True)
    world.push()
    start = world.clock.monotonic()
    world.cut_off(1, seconds=seconds)
    world.push()
    assert world.clock.monotonic() - start < seconds + 1.5
    world.check()
