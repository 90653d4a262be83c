"""The tiers of shards in this process: batches that all of their files come back to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from emberkeep.blobs import BlobStore
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import DamageError
from emberkeep.tiers.superblock import Point

_STATES = "step-"


class LocalTiers:
    """The tiers of one run, on one machine. `state` is the store beside the rows of the tier which
    decides for all."""

    def __init__(self, clusters: Sequence[LocalCluster], state: BlobStore) -> None:
        self._cluster, *self._beside = clusters
        self._state = state
        self._pending: Point | None = None
        self._check_one_step()

    def _check_one_step(self) -> None:
        """Every decision is about all tiers of a run: those at different steps are of two."""
        batches = {
            os.path.dirname(status.path): status.batch
            for cluster in (self._cluster, *self._beside)
            for status in cluster.tier_status()
        }
        if len({*batches.values()}) > 1:
            found = ", ".join(
                f"{path} at {'no step yet' if batch is None else f'step {batch}'}"
                for path, batch in sorted(batches.items())
            )
            raise DamageError(
                f"the tiers of one run come back at one step, and these are not of one run: "
                f"{found}; nothing was trained. Check that every disk is mounted; to start over, "
                "remove them all before the model is made",
                name=" and ".join(sorted(batches)),
            )

    # -- what is durable -------------------------------------------------------------------------

    def batch(self) -> int | None:
        """The batch that all files come back to, or None."""
        batches = [cluster.tier_batch() for cluster in (self._cluster, *self._beside)]
        return min(b or 0 for b in batches) if all(batches) else None

    def lost(self) -> bool:
        return any(cluster.lost() for cluster in (self._cluster, *self._beside))

    def durable_state(self) -> str:
        """The name of what belongs to the rows of the durable batch. Before names had nonces, that
        of its number alone."""
        point = self._durable()
        if point is None:
            return _name(0)
        name, before, there = _name(point.batch, point.nonce), _name(point.batch), self._states()
        return before if before in there and name not in there else name

    def _durable(self) -> Point | None:
        """The batch that all files come back to."""
        batch, clusters = self.batch(), (self._cluster, *self._beside)
        shards = [s for cluster in clusters for s in cluster.shards if s.state != "lost"]
        points = [slab.log.head.committed for shard in shards for slab in shard.tier_slabs()]
        return next((p for p in points if p is not None and p.batch == batch), None)

    def _states(self) -> list[str]:
        return [info.name for info in self._state.list() if info.name.startswith(_STATES)]

    def at_batch(self) -> bool | None:
        """Whether all rows are those of the durable batch, as they are now; None if not all files
        have it."""
        clusters = (self._cluster, *self._beside)
        shards = [shard for cluster in clusters for shard in cluster.shards]
        slabs = [slab for shard in shards if shard.state != "lost" for slab in shard.tier_slabs()]
        return None if self.batch() is None else all(slab.unchanged for slab in slabs)

    def durable_steps(self, cluster: LocalCluster) -> dict[str, int]:
        """The steps of tables at the durable batch."""
        points = [s.log.head.committed for shard in cluster.shards for s in shard.tier_slabs()]
        tables = [point.tables for point in points if point is not None]
        return {name: int(t["steps"]) for table in tables for name, t in table.items()}

    def reopen(self) -> None:
        """Takes all shards back to what is durable in their files."""
        for cluster in (self._cluster, *self._beside):
            every = range(cluster.shard_count)
            cluster.renew(*every)
            cluster.serve(*every)

    def renew(self, cluster: LocalCluster, shards: Sequence[int]) -> tuple[list[int], list[int]]:
        """Replaces lost shards: those that are back at the durable batch, which are all: a file
        that is not there is an error where others are."""
        cluster.renew(*shards)
        return list(shards), []

    def serve(self, cluster: LocalCluster, shards: Sequence[int]) -> None:
        """Has shards answer that are back at the durable batch."""
        cluster.serve(*shards)

    def given_up(self) -> bool:
        """Whether the run has gone back behind what files hold: nothing belongs to their rows."""
        return self.durable_state() not in self._states()

    def forget(self) -> None:
        """The run goes back behind the durable batch: it must never come back, nor one that was
        decided and not every file could record."""
        self._state.delete(self._states())

    # -- the next batch --------------------------------------------------------------------------

    def prepare(self, batch: int) -> Callable[[], None]:
        """Declares the rows of all tiers to be those of `batch`, as they are now; returns at once.
        The call that it returns waits until every file could come back to it."""
        # A fault while the last one was cleaned up after may have left it under way.
        self._cluster.abandon_tiers(beside=self._beside)
        self._pending = None
        return partial(self._wait, self._cluster.prepare_tiers(batch, beside=self._beside))

    def _wait(self, prepared: Sequence[Future[Point]]) -> None:
        for future in prepared:
            self._pending = future.result()  # upkeep ends it, also when it fails

    def pending_state(self) -> str:
        """The name of what belongs to the rows of the batch that every file has prepared."""
        assert self._pending is not None
        return _name(self._pending.batch, self._pending.nonce)

    def commit(self) -> None:
        """Makes the batch that every file has prepared the one to come back to; what belonged to
        the one before goes."""
        self._cluster.commit_tiers(beside=self._beside)

    def tidy(self) -> None:
        """Lets go of what belonged to earlier batches."""
        kept = self.durable_state()
        self._state.delete([name for name in self._states() if name != kept])

    def abandon(self) -> None:
        """Gives up the batch under way; one that turns out to be committed is recorded as such."""
        self._cluster.abandon_tiers(beside=self._beside)


def _name(batch: int, nonce: str = "") -> str:
    """A number alone says too little: after a rewind another batch may have the same."""
    return f"{_STATES}{batch}{nonce and '-'}{nonce}.safetensors"
