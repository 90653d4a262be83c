"""A server writes and reads the repository of its run, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import SecurityError
from emberkeep.runtime.pool import Pool
from emberkeep.tables import SGD, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock


@pytest.fixture
def network() -> LocalNetwork:
    return LocalNetwork(VirtualClock())


def opened(network: LocalNetwork, servers: LocalServers) -> FlightCluster:
    return FlightCluster(
        [Table("t", rows=8, dim=2)], SGD(lr=1.0), servers, seed=0, pool=Pool(1),
        transport=network.transport(), clock=network.clock,
    )  # fmt: skip


def test_another_url_is_refused_in_the_same_epoch(network: LocalNetwork, tmp_path: Path) -> None:
    servers = LocalServers(network, 1)
    cluster = opened(network, servers)
    cluster.track()
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    cluster.check_repository(own, None)
    cluster.check_repository(own, None)
    shard = cluster.handles[0]
    shard.freeze(None, 2**20)
    for kind in ("repository", "write", "load", "extract"):
        header = {
            "url": other, "version": "1.1", "nonce": "n", "codecs": {}, "threads": 1, "nice": 0,
            "block_nbytes": 4096, "names": {}, "piece_nbytes": 4096,
        }  # fmt: skip
        with pytest.raises(SecurityError, match=f"versions at {own}, so {other} was not touched"):
            shard.ask(kind, header)
    assert list(tmp_path.iterdir()) == []
    cluster.close()
    # Another run on the same server has its own.
    again = opened(network, servers)
    again.check_repository(other, None)
    again.close()
