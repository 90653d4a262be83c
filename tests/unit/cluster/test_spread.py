"""At most r shards of a stripe on one machine, or a warning that says what its death costs."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.processes import connect
from emberkeep.cluster.spread import places, warn_of_shared_machines, warn_of_sharing
from emberkeep.erasure.codes import Parity
from emberkeep.tables import SGD, Table


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("nodes", range(1, 10))
@pytest.mark.parametrize("shards", range(2, 9))
def test_no_node_gets_more_shards_than_parity_bears(shards: int, nodes: int, r: int) -> None:
    found = places(shards, nodes, Parity(k=1, r=r))
    if nodes * r < shards:
        assert found is None
        return
    assert found is not None
    used = Counter(found)
    assert len(found) == shards
    assert max(used.values()) <= r
    assert set(used) == set(range(len(used)))
    assert len(used) <= nodes
    # The shards of a node that dies need a place: one stays free, if the others are enough.
    assert len(used) < nodes or (nodes - 1) * r < shards


def test_a_warning_says_what_a_node_takes_with_it() -> None:
    parity = Parity(k=2, r=1)
    with pytest.warns(UserWarning, match="4 servers share 3 nodes: a node that dies takes 2 with"):
        warn_of_sharing(parity, ["a", "b", "b", "c"], "add nodes")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_sharing(parity, ["a", "b", "c"], "add nodes")
        warn_of_sharing(Parity(k=2, r=2), ["a", "b", "b", "c"], "add nodes")


def test_addresses_that_share_a_machine_are_warned_of() -> None:
    parity = Parity(k=2, r=1)
    shared = ["grpc+tls://a:1", "grpc+tls://a:2", "grpc+tls://b:1"]
    with pytest.warns(UserWarning, match="a machine that dies takes 2 .*at most 1 of them on each"):
        warn_of_shared_machines(parity, shared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_shared_machines(None, shared)
        warn_of_shared_machines(parity, ["grpc+tls://a:1", "grpc+tls://b:1", "grpc+tls://c:1"])
        # All on the machine of the trainer, whose death ends the run as well.
        warn_of_shared_machines(parity, ["127.0.0.1:1", "localhost:2", "127.0.0.1:3"])


def test_connect_warns_where_it_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["grpc+tls://a:1", "grpc+tls://a:2", "grpc+tls://b:1"]
    monkeypatch.setattr(
        "emberkeep.cluster.remote.processes.FlightCluster", lambda *_, **__: FlightCluster
    )
    tables = [Table("t", rows=4, dim=2)]
    with pytest.warns(UserWarning, match="3 servers share 2 machines"):
        connect(addresses, parity=Parity(k=2, r=1)).open(tables, SGD(lr=1.0), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = connect(addresses, rank=1, world=2, parity=Parity(k=2, r=1))
        spec.open(tables, SGD(lr=1.0), seed=0)
