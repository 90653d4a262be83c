"""A cluster whose shards are objects in this process: the default."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emberkeep._types import F32, I64, Rates, RowIds
from emberkeep.cluster.base import check_size
from emberkeep.cluster.failure_schedule import Failure, Failures, When
from emberkeep.cluster.local.local_parity import LocalParity
from emberkeep.cluster.outage import surviving
from emberkeep.cluster.protected_cluster import ProtectedCluster
from emberkeep.cluster.shard import Shard
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, EmberkeepError, ShardLostError
from emberkeep.rows.copy_room import CopyRoom
from emberkeep.rows.lookup import Lookup
from emberkeep.rows.push import Push
from emberkeep.rows.slab import Slab
from emberkeep.rows.snapshot import Cut, FrozenRows
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.memory import Values
from emberkeep.tables import Optimizer, Table
from emberkeep.tiers import decisions
from emberkeep.tiers.durable_open import open_slab, tier_files
from emberkeep.tiers.tier_use import TierStatus
from emberkeep.tiers.tiered_slab import TieredSlab


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Where rows live: `shards` shards in this process, working on `threads` threads.

    `threads` is the number of cores (or `EMBERKEEP_THREADS`) unless given. `failures` is a
    schedule of shards that fail, each once. With `parity`, shards that fail come back from the
    others, with every row as it was.
    """

    shards: int = 1
    threads: int | None = None
    failures: Failures = ()
    parity: Parity | None = None

    def __post_init__(self) -> None:
        check_size(self.shards, self.threads, self.parity)
        for failure in self.failures:
            if failure.shards[-1] >= self.shards:
                raise ConfigError(
                    f"shard {failure.shards[-1]} cannot fail: there are 0..{self.shards - 1}"
                )

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> LocalCluster:
        if self.parity is not None and any(table.tier is not None for table in tables):
            raise ConfigError(
                "parity over tiered tables would itself be larger than memory: leave out parity= "
                "(a tier brings a lost shard back by itself), or tier="
            )
        pool = pools.shared() if self.threads is None else pools.Pool(self.threads)
        cluster = LocalCluster(tables, optimizer, shards=self.shards, seed=seed, pool=pool)
        cluster.failures = list(self.failures)
        if self.parity is not None:
            cluster.protect(self.parity)
        return cluster


def local(
    *,
    shards: int = 1,
    threads: int | None = None,
    failures: Failures = (),
    parity: Parity | None = None,
) -> Local:
    """`shards` shards in this process: `ek.EmbeddingBags(..., cluster=ek.local(shards=8))`.

    `failures=[ek.fail_at(2, step=40)]` makes some of them fail; `parity=ek.Parity(k=4, r=1)` brings
    them back.
    """
    return Local(shards=shards, threads=threads, failures=failures, parity=parity)


_Part = tuple[Sequence[RowIds], Sequence[F32]]

# Said of a push: the shard's rows came from a repository since, or the push was given up.
_NOT_NEEDED = -1


@dataclass(slots=True, eq=False)
class _Numbered:
    """A push that some shard may have to be sent again: its part for each of them."""

    worker: str
    number: int
    lr: Rates
    parts_S: list[_Part]
    finite: bool
    # By shard: the number of the message to its hosts; 0 until it has applied its part.
    numbers_S: list[int] = field(default_factory=list)


class LocalCluster(ProtectedCluster[Shard, LocalParity]):
    """Shards of this process. They fail on request: `kill` drops their memory.

    `slabs` opens what a shard holds of its tables, as `open_slab` does.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        *,
        shards: int = 1,
        seed: int = 0,
        pool: pools.Pool,
        clock: Clock = SYSTEM_CLOCK,
        slabs: Callable[..., Slab] = open_slab,
    ) -> None:
        made: list[Shard] = []
        try:
            for i in range(shards):
                shard = Shard(
                    tables, optimizer, index=i, count=shards, seed=seed, pool=pool, clock=clock,
                    slabs=slabs,
                )  # fmt: skip
                made.append(shard)
        except BaseException:  # the traceback keeps shards alive: let go of files at once
            end_all(*(shard.kill for shard in made))
            raise
        super().__init__(tables, optimizer, made, seed=seed, pool=pool, clock=clock)
        self._slabs = slabs
        durable = [file for file in self.tier_status() if file.batch is not None]
        if durable:
            where = os.path.dirname(durable[0].path)
            self.found_rows = f"{where} has the rows of step {durable[0].batch}"
        self.failures: list[Failure] = []
        """Those that are still to come."""
        self._push_numbers = itertools.count(1)
        self._unsettled: deque[_Numbered] = deque()

    @property
    def shards(self) -> list[Shard]:
        return self.handles

    def kill(self, *shards: int) -> None:
        """Ends these shards: their rows are gone, and so is what was not yet copied of them."""
        named = self._named(shards)
        with self._push_lock:
            if self._protection is not None:
                self._protection.lose(named)
            else:
                for shard in named:
                    self.shards[shard].kill()

    def _forget_pushes(self, shards: Collection[int]) -> None:
        for push in self._unsettled:
            for index in shards:
                push.numbers_S[index] = _NOT_NEEDED

    def _renew(self, index: int) -> Shard:
        old = self.shards[index]
        if old.state == "lost":
            self.losses.append(index)
        old.kill()
        new = Shard(
            self.tables, self.optimizer, index=index, count=len(self.shards),
            seed=self.seed, pool=self.pool, epoch=old.epoch + 1, state="recovering",
            clock=self._clock, slabs=self._slabs,
        )  # fmt: skip
        if self._tracked:
            new.track(self._priority)
        self.shards[index] = new
        return new

    def serve(self, *shards: int, exact: bool = False) -> None:
        for index in self._named(shards):
            self.shards[index].serve()
        self._settle_writes()  # rows came from a repository, part by part

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
    def pull(self, wanted: Sequence[RowIds]) -> list[F32]:
        self._before("pull")
        self._serving()
        out = [
            np.empty((ids.ids.size, self.tables[group[0]].dim), np.float32)
            for ids, group in zip(wanted, self.groups, strict=True)
        ]
        if len(self.shards) == 1:
            self.shards[0].pull(wanted, out)
            return out
        routed = self._routed(wanted)
        for s, shard in enumerate(self.shards):
            parts = [
                np.empty((r[s][0].ids.size, o.shape[1]), np.float32)
                for r, o in zip(routed, out, strict=True)
            ]
            shard.pull([r[s][0] for r in routed], parts)
            for r, o, part in zip(routed, out, parts, strict=True):
                o[r[s][1]] = part
        return out

    @surviving
    def fetch(self, wanted: Sequence[RowIds], *, ahead: bool = False) -> None:
        if not self.tiered:
            return
        self._serving()
        routed = self._routed(wanted)
        for s, shard in enumerate(self.shards):
            shard.fetch([r[s][0] for r in routed], ahead=ahead)

    def prepare_tiers(
        self, batch: int, *, beside: Sequence[LocalCluster] = ()
    ) -> list[Future[Any]]:
        """Declares the rows of all tiers to be those of `batch`, as they are now; returns at once.

        The futures are done when every file could come back to it; then `commit_tiers`, or
        `abandon_tiers`. There is one such batch at a time. `beside` are other clusters, the same
        in each of these calls: their tiers and these come back to one batch, whatever happens.
        """
        clusters = (self, *beside)
        with ExitStack() as locks:
            for cluster in clusters:
                locks.enter_context(cluster._push_lock)
                cluster._serving()
            shards = [shard for cluster in clusters for shard in cluster.shards]
            slabs = self._tiers(beside)
            if any(slab.saving is not None for slab in slabs):
                raise AssertionError("there is one checkpoint of tiers under way at a time")
            # Where the outcome of the last batch could not be recorded.
            self.abandon_tiers(beside=beside)
            nonce, home = secrets.token_hex(8), decisions.home_of(self._tier_files(beside))
            started: list[Future[Any]] = []
            try:
                for shard in shards:
                    for slab in shard.tiers():
                        way = decisions.way_to(home, slab)
                        started.append(slab.checkpoint(batch, shard.table_state(), nonce, way))
            except BaseException:  # under way in all of them, or in none
                with suppress(EmberkeepError):  # said above: the next one tries again
                    self.abandon_tiers(beside=beside)
                raise
            return started

    def commit_tiers(self, *, beside: Sequence[LocalCluster] = ()) -> None:
        """Makes the batch that every file has prepared the one to come back to.

        If it raises, `abandon_tiers` finds out whether that happened.
        """
        decisions.commit(self._tiers(beside), self._tier_files(beside))

    def abandon_tiers(self, *, beside: Sequence[LocalCluster] = ()) -> None:
        """Gives up the batch under way; one that turns out to be committed is recorded as such."""
        decisions.abandon(self._tiers(beside), self._tier_files(beside))

    def tier_batch(self) -> int | None:
        """The batch that the tiers come back to, or None."""
        return min((slab.batch or 0 for slab in self._tiers()), default=0) or None

    def tier_status(self) -> list[TierStatus]:
        """How the files of tiers are doing, one entry for each."""
        return [slab.status() for slab in self._tiers()]

    def _tiers(self, beside: Sequence[LocalCluster] = ()) -> list[TieredSlab]:
        shards = [shard for cluster in (self, *beside) for shard in cluster.shards]
        return [slab for shard in shards if shard.state != "lost" for slab in shard.slabs
                if isinstance(slab, TieredSlab)]  # fmt: skip

    def _tier_files(self, beside: Sequence[LocalCluster]) -> dict[str, list[str]]:
        files: dict[str, list[str]] = {}
        for cluster in (self, *beside):
            files |= tier_files(cluster.tables, len(cluster.shards))
        return files

    # -- parity ----------------------------------------------------------------------------------

    def _new_protection(self, parity: Parity) -> LocalParity:
        return LocalParity(parity, self.shards, self.pool, self._clock)

    def close(self) -> None:
        """Ends the threads that keep parity and rebuild it; lets the files of tiers go."""
        end_all(
            *([] if self._protection is None else [self._protection.close]),
            *(slab.close for slab in self._tiers()),
        )

    def _from_parity(self) -> bool:
        protection = self._protection
        if protection is None:
            return False
        with self._push_lock:
            gone = self._gone()
            if not gone:  # another thread has brought them back, or is about to
                return not self.lost()
            return self._recovered(protection, gone)

    def _give_up(self, shards: Sequence[int]) -> None:
        self.kill(*shards)

    def _send_again(self, index: int) -> None:
        """Has a replacement apply what had not reached every host when the shard was lost."""
        for push in self._unsettled:
            self._apply_part(push, index)

    def push(
        self, wanted: Sequence[RowIds], grads: Sequence[F32], *, lr: Rates, finite: bool = False
    ) -> None:
        # Numbers rise for each thread that pushes: by them a shard knows what it has applied.
        worker, number = f"thread {threading.get_ident()}", next(self._push_numbers)
        self._push(_Numbered(worker, number, lr, self._parts(wanted, grads), finite))

    def _parts(self, wanted: Sequence[RowIds], grads: Sequence[F32]) -> list[_Part]:
        """For each shard its part of a push."""
        if len(self.shards) == 1:
            return [(wanted, grads)]
        routed = self._routed(wanted)
        return [
            ([r[s][0] for r in routed], [g[r[s][1]] for g, r in zip(grads, routed, strict=True)])
            for s in range(len(self.shards))
        ]

    @surviving
    def _push(self, push: _Numbered) -> None:
        """Applies a push, or the rest of it where a shard was lost half-way."""
        if not push.numbers_S:
            self._before("push")
        with self._push_lock:
            self._serving()
            protection = self._protection
            if protection is None:
                for shard, checked in zip(self.shards, self._checked(push), strict=True):
                    shard.apply(checked, push.lr)
                return
            protection.check()
            try:
                self._apply_parts(push)
            except ShardLostError:
                raise  # the rest follows when the shard is back
            except BaseException:
                # The caller gets the error, and the rest is never sent. What shards have applied
                # stays, until no loss can undo it.
                push.numbers_S = [number or _NOT_NEEDED for number in push.numbers_S]
                raise
            protection.settle()
            self._forget_settled()
            protection.rebuild_along()

    def _apply_parts(self, push: _Numbered) -> None:
        """Applies what shards have not applied yet; all of them have agreed before the first."""
        if push.numbers_S:
            for index in range(len(self.shards)):
                self._apply_part(push, index)
            return
        checked_S = self._checked(push)
        push.numbers_S = [0] * len(self.shards)
        self._unsettled.append(push)
        for index, checked in enumerate(checked_S):
            self._apply_part(push, index, checked)

    def _checked(self, push: _Numbered) -> list[list[Push]]:
        return [
            shard.check(*part, finite=push.finite)
            for shard, part in zip(self.shards, push.parts_S, strict=True)
        ]

    def _apply_part(
        self, push: _Numbered, index: int, checked: Sequence[Push] | None = None
    ) -> None:
        """Applies a shard's part of a push, unless it has done so before."""
        assert self._protection is not None
        if push.numbers_S[index] == _NOT_NEEDED:
            return
        if self._protection.applied(index, push.worker) >= push.number:
            return
        shard = self.shards[index]
        if checked is None:
            checked = shard.check(*push.parts_S[index], finite=push.finite)
        push.numbers_S[index] = shard.apply(checked, push.lr, (push.worker, push.number))

    def _forget_settled(self) -> None:
        """Drops the pushes that no loss can undo any more."""
        assert self._protection is not None
        settled_S = [self._protection.settled(index) for index in range(len(self.shards))]
        while self._unsettled and all(
            number and number <= settled
            for number, settled in zip(self._unsettled[0].numbers_S, settled_S, strict=True)
        ):
            self._unsettled.popleft()

    def install_scattered(
        self,
        tables: Sequence[str],
        offsets: Sequence[int],
        ids: I64,
        planes: Mapping[str, Values],
        *,
        busy: int = 0,
    ) -> None:
        """`install` of scattered rows of several tables."""
        self._present()
        if len(self.shards) == 1:
            self.shards[0].install_scattered(tables, offsets, ids, planes, busy=busy)
        else:
            for table, start, stop in zip(tables, offsets, offsets[1:], strict=False):
                for order, shard in zip(
                    self.positions(table, ids[start:stop]), self.shards, strict=True
                ):
                    rows = start + order
                    own = {name: v[rows] for name, v in planes.items()}
                    shard.install_scattered([table], [0, rows.size], ids[rows], own, busy=busy)
        self._settle_writes()

    def _freeze_shard(self, shard: Any, since: str | None, room: CopyRoom) -> Cut[FrozenRows]:
        """All shards are in this process, and share one buffer."""
        frozen: Cut[FrozenRows] = shard.freeze(since, room)
        return frozen

    def clear(self) -> None:
        if self._protection is None:
            super().clear()
            return
        with self._push_lock:
            self._present()
            for shard in self.shards:
                shard.clear_with_parity()
            self._protection.clear()
            self._unsettled.clear()

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
