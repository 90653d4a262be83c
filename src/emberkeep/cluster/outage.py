"""Calls that outlast lost shards: what a call waits for before it is made again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from emberkeep.errors import PeerError, RecoveryError, ShardLostError
from emberkeep.runtime.clock import Clock

_T = TypeVar("_T")
_P = ParamSpec("_P")

# So often in a row a call meets lost shards, each time after they were brought back. What dies that
# often is killed by what the call does, by its need of memory say.
_MOST_RECOVERIES = 16


class UnsettledError(PeerError):
    """Shards have done what they were asked, and hosts of their parity have yet to hold it. To ask
    again changes nothing, so it may be done as often as hosts take more of it."""


class Interrupted(Protocol):
    """A cluster as its calls see it while shards are lost; see `Cluster`."""

    _clock: Clock
    lost_since: float | None

    def _second_opinion(self, lost: ShardLostError) -> ShardLostError | PeerError: ...

    def _bring_back(self, lost: ShardLostError) -> bool: ...

    def _await_peers(self, error: PeerError, seconds: float) -> bool: ...


class HasEpoch(Protocol):
    """One shard of a cluster."""

    @property
    def epoch(self) -> int: ...

    @property
    def state(self) -> str: ...


AnyCluster = TypeVar("AnyCluster", bound=Interrupted)


def surviving(
    method: Callable[Concatenate[AnyCluster, _P], _T],
) -> Callable[Concatenate[AnyCluster, _P], _T]:
    """A call that a lost shard makes fail is made again once the shard is back, up to 16 times:
    then it is `RecoveryError`."""

    @functools.wraps(method)
    def call(self: AnyCluster, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        start, outage = self._clock.monotonic(), None
        while True:
            try:
                found = method(self, *args, **kwargs)
                if outage is not None:
                    self.lost_since = None
                return found
            except (ShardLostError, PeerError) as error:
                outage = outage or _Outage(self, start)
                if not outage.ended(error):
                    raise

    return call


class _Outage:
    """What one call waits for: shards to come back, or peers of a shard to answer it."""

    def __init__(self, cluster: Interrupted, start: float) -> None:
        self._cluster = cluster
        self._start = start
        self._silent_since: float | None = None
        self._recoveries = 0

    def ended(self, error: ShardLostError | PeerError) -> bool:
        """Whether the call is worth making again; returns when it is, or raises."""
        cluster = self._cluster
        if isinstance(error, ShardLostError):
            error = cluster._second_opinion(error)
        if isinstance(error, PeerError):
            now = cluster._clock.monotonic()
            if self._silent_since is None:
                self._silent_since = now
            if cluster._await_peers(error, now - self._silent_since):
                self._count(error)
            return True
        if cluster.lost_since is None:
            cluster.lost_since = self._start
        self._count(error)
        return cluster._bring_back(error)

    def _count(self, error: ShardLostError | PeerError) -> None:
        """One more recovery, after which peers have all their time again."""
        self._silent_since = None
        self._recoveries += 1
        if self._recoveries > _MOST_RECOVERIES:
            raise RecoveryError(
                f"one call met lost shards {self._recoveries} times, although they were brought "
                f"back each time; the last time: {error}. See why they end, then start the run "
                "again to resume its newest version"
            ) from error


class SaidLosses:
    """The losses that were said: several calls may meet one, each inside of another or in a thread
    of its own, and nobody wants to hear of it twice."""

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}

    def news(self, lost: ShardLostError, shards: Sequence[HasEpoch]) -> list[int]:
        """Those that are lost and were not said to be, in this epoch; not one that is back."""
        gone = [i for i in lost.shards if shards[i].state != "serving"]
        found = [i for i in gone if self._epochs.get(i) != shards[i].epoch]
        self._epochs.update({i: shards[i].epoch for i in found})
        return found

    def returned(self, shard: int) -> None:
        """It serves again with its rows, in the same epoch, and may be lost again."""
        self._epochs.pop(shard, None)
