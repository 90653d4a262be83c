"""The contracts of the engine and of clusters on shard servers, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.servers import Clusters, OneServerContract, ServersContract
from tests.servers import Farm


@pytest.fixture(scope="module")
def clusters(farm: Farm) -> Iterator[Clusters]:
    opened = Clusters(farm)
    yield opened
    opened.close()


class TestOneServer(OneServerContract):
    pass


class TestServers(ServersContract):
    pass
