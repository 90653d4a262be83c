"""Whether parity is what it says: the code over the rows of others, wherever it counts as whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.erasure.host import ParityHost
from emberkeep.server.parity_service import ParityService
from emberkeep.testing.simulation.scheduler import SimulationError, current_task, undisturbed
from emberkeep.testing.simulation.sim_network import SimulatedNetwork


@undisturbed()
def check_parity(network: SimulatedNetwork, cluster: FlightCluster) -> int:
    """How many hosts' parity was held against the rows; 0 where something is on its way, or a
    server says itself that it is not protected."""
    task = current_task()
    assert task is not None, "parity is checked between the turns of a simulation"
    before = task.scheduler.turns
    services = [_service(network, cluster, shard) for shard in range(cluster.shard_count)]
    whole = [service for service in services if service is not None and _settled(service)]
    if len(whole) < len(services):
        return 0
    if task.scheduler.turns != before:
        return 0  # one that was asked waited for others, who may have changed anything
    for service in whole:
        _check(service, whole)
    return len(whole)


@undisturbed()
def any_left_out(network: SimulatedNetwork) -> bool:
    """Whether some server goes on without a host of its parity."""
    epochs = (server.service.epoch for server in network.servers.values())
    services = (epoch.parity_service for epoch in epochs if epoch is not None)
    return any(service._streams._left_out for service in services if service is not None)


def _service(network: SimulatedNetwork, cluster: FlightCluster, shard: int) -> ParityService | None:
    """The parity service that a coordinator means, if its server is there and serves."""
    handle = cluster.handles[shard]
    server = network.servers.get(handle.address)
    epoch = None if server is None else server.service.epoch
    if server is None or epoch is None or not server.process.alive:
        return None
    meant = handle.state == "serving" and epoch.number == handle.epoch
    return epoch.parity_service if meant and epoch.shard.state == "serving" else None


def _settled(service: ParityService) -> bool:
    """Whether a server says that all it has is protected, by hosts that hold all of it; and nobody
    is half-way through a write, whose differences are numbered when all rows have changed."""
    if service._shard.lock.held:
        return False
    source, host, moved = service.member.source, service.member.host, service._streams._moved
    locks: list[Any] = [moved._lock, service._lock, source._lock, host.lock]  # type: ignore[attr-defined]
    if any(lock.locked() for lock in locks):
        return False  # who holds it may die: a trainer would wait for it in the place of this look
    status = service.status()
    names = ("lag", "missing_rows", "unprotected_stripes", "left_out_hosts")
    return not any(status[name] for name in names) and source.settled == source.number


def _check(service: ParityService, services: Sequence[ParityService]) -> None:
    held = service.member.host
    right = ParityHost(held.index, held.placement, held.shapes, complete=False)
    for p, slab, source, _ in right.to_fill():
        rows = services[source]._rows
        right.fill_from(p, slab, source, 0, right.stripes[slab], rows)
    for name in ("_records", "_marks"):
        for slab, (found, expected) in enumerate(
            zip(getattr(held, name), getattr(right, name), strict=True)
        ):
            wrong = np.flatnonzero((found != expected).any(axis=1)).tolist()
            if wrong:
                raise SimulationError(
                    f"shard {held.index} says that its parity is whole, but{name.replace('_', ' ')}"
                    f" {wrong[:5]} of slab {slab} are not the code of the rows"
                )
