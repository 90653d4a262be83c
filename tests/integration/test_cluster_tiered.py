"""The contracts of the engine and of clusters on servers whose rows live in files."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, TierError
from emberkeep.runtime import pool
from emberkeep.tables import Adagrad, Optimizer, Table, Tier
from tests.contracts.cluster import push
from tests.contracts.engine import (
    state,
    tables,
    wanted_of,
)
from tests.contracts.servers import Clusters, OneServerContract, ServersContract
from tests.servers import Farm, FarmLauncher

SECOND = timedelta(seconds=1)
ALL = 1 << 20


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """In memory where that is possible: these tests are not about disks."""
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=where, prefix="emberkeep-") as path:
        yield Path(path)


class TieredClusters(Clusters):
    def __init__(self, farm: Farm, root: Path) -> None:
        super().__init__(farm)
        self.root = root
        self._numbers = itertools.count()

    def launcher(
        self, shards: int, threads: int = 1, memory: int = ALL, **more: Any
    ) -> FarmLauncher:
        tier = Tier(self.root / str(next(self._numbers)), memory=memory)
        return super().launcher(shards, threads, tier=tier, **more)

    def open(self, *args: Any, **given: Any) -> FlightCluster:
        cluster = super().open(*args, **given)
        assert cluster.tiered
        return cluster


@pytest.fixture(scope="module")
def clusters(farm: Farm, root: Path) -> Iterator[TieredClusters]:
    opened = TieredClusters(farm, root)
    yield opened
    opened.close()


class TestOneTieredServer(OneServerContract):
    """With memory for a batch."""

    sizes: ClassVar[tuple[int, ...]] = (16_000,)
    needs: ClassVar[dict[str, tuple[int, ...]]] = {
        "test_thread_counts_give_the_same_bits": (900_000,),
    }

    @pytest.fixture(autouse=True)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.memories = itertools.cycle(self.needs.get(request.node.originalname, self.sizes))

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int = 0, threads: int = 2
    ) -> FlightCluster:
        return self.clusters.open(
            tables, optimizer, shards=1, seed=seed, threads=threads, memory=next(self.memories)
        )


@pytest.mark.soak
class TestOneTieredServerOfTwoSizes(TestOneTieredServer):
    """With memory for a batch, and for everything."""

    sizes = (16_000, ALL)


class TestTieredServers(ServersContract):
    pass


# -- what is theirs alone ------------------------------------------------------------------------


def test_rows_that_are_trained_are_read_once_and_evaluation_admits_none(
    clusters: TieredClusters,
) -> None:
    """A pull that training announces brings its rows to memory: the push finds them there."""
    cluster = clusters.open(tables(), Adagrad(lr=0.1), shards=1, memory=7_000)
    twin = local().open(tables(), Adagrad(lr=0.1), seed=0)
    for one in (cluster, twin):
        push(one, np.random.default_rng(0), 12)

    def reads() -> int:
        return sum(file.reads for file in cluster.tier_status())

    random = np.random.default_rng(1)
    for _ in range(4):
        batch = {"fixed": random.choice(40, 9, replace=False).tolist()}
        wanted = wanted_of(cluster, batch)
        cluster.fetch(wanted)
        pulled, before = cluster.pull(wanted), reads()
        grads = [np.ones_like(rows) for rows in pulled]
        assert [r.tobytes() for r in pulled] == [r.tobytes() for r in twin.pull(wanted)]
        cluster.push(wanted, grads, lr=0.1)
        assert reads() == before
        twin.push(wanted, grads, lr=0.1)
    everything = wanted_of(cluster, {"fixed": list(range(40)), "wide": list(range(30))})
    cluster.pull(everything)
    first, again = reads(), cluster.pull(everything)
    assert [r.tobytes() for r in again] == [r.tobytes() for r in twin.pull(everything)]
    assert reads() > first > before  # in the file alone, both times
    cluster.prefetch(wanted)
    cluster.push(wanted, grads, lr=0.1)
    twin.push(wanted, grads, lr=0.1)
    assert [r.tobytes() for r in cluster.pull(wanted)] == [r.tobytes() for r in twin.pull(wanted)]
    assert state(cluster) == state(twin)


def test_each_shard_has_a_directory_of_its_own(clusters: TieredClusters) -> None:
    cluster = clusters.open(tables(), Adagrad(lr=0.1), shards=3)
    push(cluster, np.random.default_rng(0))
    tier = cluster.launcher.tier
    paths = {os.path.relpath(file.path, tier.path) for file in cluster.tier_status()}
    assert paths == {f"shard-{s}/rows-{s}-{g}.tier" for s in range(3) for g in range(2)}


def test_what_cannot_be_is_refused(clusters: Clusters, farm: Farm, root: Path) -> None:
    own = [Table("t", rows=9, dim=4, tier=Tier(root / "own", memory="1MB"))]
    with pytest.raises(ConfigError, match=r"'t' has a tier of its own, .* leave out tier="):
        clusters.open(own, Adagrad(lr=0.1), shards=1)
    cluster = clusters.open(tables(), Adagrad(lr=0.1), shards=3)
    with pytest.raises(ConfigError, match="parity over a tier would itself be larger"):
        cluster.protect(Parity(k=2, r=1))
    mixed = clusters.launcher(2)
    mixed.kill(1)
    mixed.servers[1] = farm.start()
    with pytest.raises(ConfigError, match=r"shard 1 at .* has no tier, and others have"):
        FlightCluster(tables(), Adagrad(lr=0.1), mixed, pool=pool.Pool(1))
    same = FarmLauncher(farm, 1, tier=cluster.launcher.tier)
    with pytest.raises(TierError, match="in use by another process"):
        FlightCluster(
            tables(), Adagrad(lr=0.1), same, pool=pool.Pool(1),
            timing=Timing(deadline=SECOND, lease=SECOND),
        )  # fmt: skip
    mixed.end()
    same.end()
