"""What clusters with parity have in common, whether their shards are objects or servers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy.typing as npt

from emberkeep._types import I64, Json
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.shard_handle import ShardHandle
from emberkeep.erasure.codes import Parity
from emberkeep.erasure.rebuilder import Rebuilder
from emberkeep.erasure.status import ParityStatus
from emberkeep.errors import ConfigError, ParityLossError, RecoveryError
from emberkeep.rows.priority import Priority
from emberkeep.runtime import pool as pools
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.tables import Optimizer, Table
from emberkeep.tiers.tier_use import TierStatus, TierUse


def tier_use(clusters: Iterable[Cluster]) -> TierUse | None:
    """How the caches of all tiers of these clusters have served together; None without a tier."""
    asked = [cluster for cluster in clusters if isinstance(cluster, ProtectedCluster)]
    return TierUse.of([file for cluster in asked for file in cluster.tier_status()])


class Protection(Protocol):
    """The parity of a cluster, as the cluster uses it: `LocalParity` or `RemoteParity`."""

    spec: Parity

    @property
    def rebuilder(self) -> Rebuilder[Any]: ...

    def recover(self, lost: Collection[int], renew: Callable[[int], Any]) -> None: ...

    def start_over(self, shards: Collection[int], renew: Callable[[int], Any]) -> None: ...

    def flush(self) -> None: ...

    def rebuild(self) -> None: ...

    def status(self) -> ParityStatus: ...


# Losses of shards in one write that is no push.
_MOST_ATTEMPTS = 8

_T = TypeVar("_T")
_Shard = TypeVar("_Shard", bound=ShardHandle)
_Protection = TypeVar("_Protection", bound=Protection)


class ProtectedCluster(Cluster, Generic[_Shard, _Protection]):
    """A cluster that can keep parity, and brings lost shards back from it.

    A subclass says how parity is made (`_new_protection`), how one shard is replaced by an empty
    one (`_renew`), and what becomes of pushes that a lost shard may not have shared with its
    parity hosts (`_send_again`, `_forget_pushes`).
    """

    handles: list[_Shard]  # type: ignore[assignment]

    def tier_status(self) -> list[TierStatus]:
        """How the files of its tiers are doing, one entry for each of those that can be asked."""
        raise NotImplementedError

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        shards: Sequence[_Shard],
        *,
        seed: int,
        pool: pools.Pool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(tables, optimizer, shards, seed=seed, pool=pool, clock=clock)
        self._tracked = False
        self._priority: Priority | None = None
        self._protection: _Protection | None = None

    def _new_protection(self, parity: Parity) -> _Protection:
        raise NotImplementedError

    def _renew(self, index: int) -> object:
        """Replaces a shard by an empty one in a new epoch, which does not serve yet."""
        raise NotImplementedError

    def _send_again(self, index: int) -> None:
        """Has a replacement apply the pushes that the shard before had not shared with every
        parity host."""
        raise NotImplementedError

    def _forget_pushes(self, shards: Collection[int]) -> None:
        """The rows of these shards come from a repository: no earlier push is sent again."""
        raise NotImplementedError

    # -- shards ----------------------------------------------------------------------------------

    def track(self, priority: Priority | None = None) -> None:
        super().track(priority)
        self._tracked = True
        self._priority = priority or self._priority

    def renew(self, *shards: int) -> None:
        named = self._named(shards)
        with self._push_lock:
            if self._protection is None:
                self._each([partial(self._renew, index) for index in named])
            else:
                self._protection.start_over(named, self._renew)
            self._forget_pushes(named)

    def _named(self, shards: Sequence[int]) -> list[int]:
        for shard in shards:
            if not 0 <= shard < len(self.handles):
                raise ConfigError(
                    f"there is no shard {shard}: there are 0..{len(self.handles) - 1}"
                )
        return sorted(set(shards))

    # -- parity ----------------------------------------------------------------------------------

    def protect(self, parity: Parity) -> None:
        """Begins to keep parity: rows that were trained before are protected soon after."""
        parity.check_shards(len(self.handles))
        with self._push_lock:
            if self._protection is not None:
                self._protection.spec.check_same(parity)
                return
            self._serving()
            self._protection = self._new_protection(parity)

    @property
    def parity(self) -> ParityStatus | None:
        """How well rows are protected; None without parity."""
        return None if self._protection is None else self._protection.status()

    def rebuild(self) -> None:
        """Waits until all that was lost is back: rows and parity."""
        if self._protection is not None:
            self._protection.rebuild()

    def _recovered(self, protection: _Protection, lost: Collection[int]) -> bool:
        """Brings shards back from parity; False, with a warning, where they are too many."""
        start = self._clock.monotonic() if self.lost_since is None else self.lost_since
        try:
            protection.recover(lost, self._renew)
            self._forgot = self._tracked
            for index in lost:
                self.handles[index].serve()
                self._send_again(index)
        except ParityLossError as error:
            # Rows that were on their way back went with the shards that had their parity.
            self._give_up(protection.rebuilder.hopeless(lost))
            warnings.warn(str(error), stacklevel=3)
            return False
        self._say(
            "recovered", scope="parity", shards=sorted(lost),
            seconds=self._clock.monotonic() - start,
        )  # fmt: skip
        return True

    def _give_up(self, shards: Sequence[int]) -> None:
        """Counts shards as lost whose missing rows parity cannot bring back any more."""
        raise NotImplementedError

    # -- writes that are no push: nobody would send them again, so parity holds them at once -----

    def _settle_writes(self) -> None:
        if self._protection is not None:
            self._protection.flush()

    def _until_settled(self, write: Callable[[], _T]) -> _T:
        """Makes a write that is no push, again where a shard was lost before parity held all of it:
        it comes back without it. Returns what the first attempt did."""
        found: list[_T] = []
        for _ in range(_MOST_ATTEMPTS):
            epochs = [shard.epoch for shard in self.handles]
            found.append(write())
            self._settle_writes()
            if [shard.epoch for shard in self.handles] == epochs:
                return found[0]
        raise RecoveryError(
            f"shards were lost {_MOST_ATTEMPTS} times before parity held what was written to them: "
            "see why they end, then start the run again to resume its newest version"
        )

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        self._until_settled(partial(super().install, table, ids, planes))

    def delete(self, table: str, ids: I64) -> int:
        return self._until_settled(partial(super().delete, table, ids))

    def load_table_state(self, state: Json) -> None:
        self._until_settled(partial(super().load_table_state, state))

    def clear(self) -> None:
        self._until_settled(super().clear)
