"""A cluster whose shards are objects in this process: the default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberkeep import pool as pools
from emberkeep.cluster.client import Cluster, surviving
from emberkeep.cluster.failures import Failure, Failures, When
from emberkeep.errors import ConfigError
from emberkeep.lookup import Lookup
from emberkeep.priority import Priority
from emberkeep.shard import Shard
from emberkeep.slab import F32, RowIds
from emberkeep.tables import Optimizer, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Where rows live: `shards` shards in this process, working on `threads` threads.

    `threads` is the number of cores (or `EMBERKEEP_THREADS`) unless given. `failures` is a
    schedule of shards that fail, each once.
    """

    shards: int = 1
    threads: int | None = None
    failures: Failures = ()

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigError(f"a cluster has 1 shard or more, not {self.shards}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be 1 or more, not {self.threads}")
        for failure in self.failures:
            if failure.shards[-1] >= self.shards:
                raise ConfigError(
                    f"shard {failure.shards[-1]} cannot fail: there are 0..{self.shards - 1}"
                )

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> LocalCluster:
        pool = pools.shared() if self.threads is None else pools.Pool(self.threads)
        cluster = LocalCluster(tables, optimizer, shards=self.shards, seed=seed, pool=pool)
        cluster.failures = list(self.failures)
        return cluster


def local(*, shards: int = 1, threads: int | None = None, failures: Failures = ()) -> Local:
    """`shards` shards in this process: `ek.EmbeddingBags(..., cluster=ek.local(shards=8))`.

    `failures=[ek.fail_at(2, step=40)]` makes some of them fail.
    """
    return Local(shards=shards, threads=threads, failures=failures)


class LocalCluster(Cluster):
    """Shards of this process. They fail when they are told to: `kill` drops their memory."""

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        *,
        shards: int = 1,
        seed: int = 0,
        pool: pools.Pool,
    ) -> None:
        self.shards: list[Shard] = [
            Shard(tables, optimizer, index=i, count=shards, seed=seed, pool=pool)
            for i in range(shards)
        ]
        self.failures: list[Failure] = []
        """Those that are still to come."""
        self._tracked = False
        self._priority: Priority | None = None
        super().__init__(tables, optimizer, self.shards, seed=seed, pool=pool)

    def kill(self, *shards: int) -> None:
        """Ends these shards: their rows are gone, and so is what was not yet copied of them."""
        for shard in self._named(shards):
            with self._push_lock:
                self.shards[shard].kill()

    def renew(self, *shards: int) -> None:
        for index in self._named(shards):
            with self._push_lock:
                old = self.shards[index]
                old.kill()
                new = Shard(
                    self.tables, self.optimizer, index=index, count=len(self.shards),
                    seed=self.seed, pool=self.pool, epoch=old.epoch + 1, state="recovering",
                )  # fmt: skip
                if self._tracked:
                    new.track(self._priority)
                self.shards[index] = self.handles[index] = new

    def serve(self, *shards: int) -> None:
        for index in self._named(shards):
            self.shards[index].serve()

    def track(self, priority: Priority | None = None) -> None:
        super().track(priority)
        self._tracked = True
        self._priority = priority or self._priority

    def _before(self, scope: When) -> None:
        if not self.failures or self.lost():
            return
        step = 1 + next(iter(self.shards[0].table_state().values()))["steps"]
        due = [failure for failure in self.failures if failure.step == step]
        for failure in due:
            if failure.when == scope:
                self.failures.remove(failure)
                self.kill(*failure.shards)

    @surviving
    def fetch(self, wanted: Sequence[RowIds], *, ahead: bool = False) -> None:
        if not self.tiered:
            return
        self._serving()
        if len(self.shards) == 1:
            self.shards[0].fetch(wanted, ahead=ahead)
            return
        routed = [self._route(g, ids) for g, ids in enumerate(wanted)]
        for s, shard in enumerate(self.shards):
            shard.fetch([r[s][0] for r in routed], ahead=ahead)

    def _named(self, shards: Sequence[int]) -> list[int]:
        for shard in shards:
            if not 0 <= shard < len(self.shards):
                raise ConfigError(f"there is no shard {shard}: there are 0..{len(self.shards) - 1}")
        return sorted(set(shards))

    @surviving
    def pull_bags(self, lookups: Sequence[Lookup], out: Sequence[F32]) -> None:
        """Pooled bags, slab by slab: straight from the rows where they are on one shard."""
        if len(self.shards) > 1:
            super().pull_bags(lookups, out)
            return
        self._before("pull")
        self._serving()
        (shard,) = self.shards
        rest = [g for g, slab in enumerate(shard.slabs) if not slab.direct]
        if rest:
            wanted = [
                lookup.wanted if g in rest else lookup.nothing for g, lookup in enumerate(lookups)
            ]
            pulled = self.pull(wanted)
        for g, (lookup, out_BFD) in enumerate(zip(lookups, out, strict=True)):
            if g in rest:
                lookup.pooled(pulled[g], out_BFD)
            else:
                shard.pull_bags(g, lookup, out_BFD)
