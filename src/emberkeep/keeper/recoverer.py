"""What a keeper does about lost shards: partial recoveries on the spot, full ones when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from emberkeep.checkpoint.recovery import (
    Home,
    Losses,
    Plan,
    Recovery,
    Scope,
    plan,
    steps_of,
)
from emberkeep.errors import ConfigError, NoVersionError, RecoveryError, ShardLostError
from emberkeep.keeper.run_saver import Kept, RunSaver, version_number
from emberkeep.repository import Manifest
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.strategies import Strategy

# Shards that are lost again so long while they are recovered are killed by the recovery itself.
_PATIENCE = timedelta(minutes=15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One recovery that was made."""

    scope: Scope
    shards: tuple[int, ...]
    """Those that were lost; the shards of several clusters are counted through."""
    version: int | None
    """The newest that rows came from."""
    step: int
    """After which training goes on."""
    repeated_steps: int
    """Steps that are taken again."""
    pls: float
    """Of the model, from here on."""
    seconds: float
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """What failures have cost one process so far."""

    failures: int
    """Shards that were lost."""
    full: int
    partial: int
    pls: float
    """The portion of lost samples: what partial recoveries have taken from the model, over the
    whole job."""
    repeated_steps: int
    seconds: float
    """In which training stood still for recoveries."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Recoverer:
    """Brings lost shards of one model back.

    `go_back` loads the newest whole version: rows, dense state, reader and step; None for one rank
    of several, which cannot go back alone: what only a full recovery helps is raised. `steps` tells
    how many steps have ended. Shards that are lost again while they are recovered are recovered
    again, for 15 minutes: then it is `RecoveryError`.
    """

    def __init__(
        self,
        homes: Sequence[Home],
        saver: RunSaver,
        recovery: Recovery,
        *,
        total_steps: int | None,
        steps: Callable[[], int],
        go_back: Callable[[], Kept | None] | None,
        tell: Callable[[str, dict[str, Any]], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._homes = homes
        self._saver = saver
        self._recovery = recovery
        self._total_steps = total_steps
        self._steps = steps
        self._go_back = go_back
        self._tell = tell
        self.losses = Losses()
        self._going_back = False
        self._busy = False
        self._failures = self._repeated_steps = 0
        self._made: dict[Scope, int] = {"full": 0, "partial": 0}
        self._seconds = 0.0
        for home in homes:
            home.cluster.on_loss = self.on_loss

    def release(self) -> None:
        for home in self._homes:
            home.cluster.on_loss = None

    def on_loss(self, lost: ShardLostError) -> bool:
        """Whether the shards serve again. A full recovery is left to the caller, who can rewind."""
        if self._busy:
            return False
        if self._plan(self._clock.monotonic()).scope == "partial":
            self.recover()
            return not self._lost()
        return False

    def recover(self) -> Recovered | None:
        """Recovers what is lost, however often more is lost meanwhile; None if nothing is."""
        if not self._lost() and not self._going_back:
            return None
        start = self._clock.monotonic()
        self._busy = True
        lost: set[int] = set()
        try:
            while True:
                decided = self._plan(start)
                self._failures += sum(
                    status.state == "lost"
                    for home in self._homes
                    for status in home.cluster.status()
                )
                lost.update(decided.shards)
                if decided.scope == "full" and self._go_back is None:
                    raise ShardLostError(sorted(lost))
                try:
                    made = self._carry_out(decided, tuple(sorted(lost)), start)
                except ShardLostError as error:
                    self._must_go_on(start, error)
                    continue  # one more was lost: decide again
                break
        finally:
            self._busy = False
        self._made[made.scope] += 1
        self._seconds += made.seconds
        self._repeated_steps += made.repeated_steps
        self._tell("recovered", made.to_dict())
        return made

    def _carry_out(self, decided: Plan, lost: tuple[int, ...], start: float) -> Recovered:
        step, kept = self._steps(), None
        # A version under way may still be committed, and less would be lost.
        self._saver.join()
        if decided.scope == "partial":
            decided = self._plan(start)
            for home, shards in self._by_home(decided.shards):
                kept = self._saver.recover_shards(home, shards)
            self.losses = decided.losses
        else:
            assert self._go_back is not None
            self._going_back = True
            for home in self._homes:
                home.cluster.renew(*range(home.cluster.shard_count))
            kept = self._go_back()
            if kept is None:
                raise NoVersionError(
                    "shards were lost before the first version: there is nothing to go back to; "
                    "start the run again"
                )
            for home in self._homes:
                home.cluster.serve(*range(home.cluster.shard_count))
            self._going_back = False
        return Recovered(
            scope=decided.scope,
            shards=lost,
            version=version_number(kept),
            step=self._steps(),
            repeated_steps=step - self._steps(),
            pls=self.losses.pls,
            seconds=self._clock.monotonic() - start,
            reason=decided.reason,
        )

    def _plan(self, start: float) -> Plan:
        while True:
            try:
                return self._plan_once()
            except ShardLostError as error:
                # One that was asked is gone too, which is known from here on.
                self._must_go_on(start, error)

    def _must_go_on(self, start: float, error: ShardLostError) -> None:
        """Raises when a recovery that began at `start` has lost shards for too long."""
        if self._clock.monotonic() - start > _PATIENCE.total_seconds():
            named = ", ".join(map(str, error.shards))
            raise RecoveryError(
                f"shards keep being lost while they are recovered, for {_PATIENCE} by now, "
                f"the last time {named}: see why they end, then start the run again to resume its "
                "newest version"
            ) from error

    def _plan_once(self) -> Plan:
        whole = self._saver.whole
        return plan(
            self._recovery,
            self.losses,
            self._lost(),
            shards=sum(home.cluster.shard_count for home in self._homes),
            step=self._steps(),
            saved=None if whole is None else whole.step,
            total=self._total_steps,
            unchanged=whole is not None and self._unchanged_since(whole),
            going_back=self._going_back,
        )

    def _unchanged_since(self, whole: Kept) -> bool:
        """Whether no push was applied since a version by any cluster that has lost shards."""
        saved = whole.layout["tables"] if isinstance(whole, Manifest) else {}
        return all(
            steps_of(home.cluster).get(own) == saved.get(name, {}).get("steps")
            for home in self._homes
            if home.cluster.lost()
            for name, own in home.names.items()
        )

    def _dead(self) -> int:
        """Shards that are gone, as opposed to those that are being recovered."""
        return sum(
            status.state == "lost" for home in self._homes for status in home.cluster.status()
        )

    def _lost(self) -> list[int]:
        """Shards that do not serve, counted through all clusters."""
        found, first = [], 0
        for home in self._homes:
            found += [first + shard for shard in home.cluster.lost()]
            first += home.cluster.shard_count
        return found

    def _by_home(self, shards: Sequence[int]) -> list[tuple[Home, list[int]]]:
        found, first = [], 0
        for home in self._homes:
            count = home.cluster.shard_count
            own_shards = [shard - first for shard in shards if first <= shard < first + count]
            if own_shards:
                found.append((home, own_shards))
            first += count
        return found

    # -- figures ---------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """For the next version: what the model has lost, and how often shards failed."""
        return {**self.losses.to_dict(), "failures": self._failures}

    def load(self, counters: dict[str, Any]) -> None:
        """The losses of a version that was brought back; failures of a run are counted on."""
        self.losses = Losses.from_dict(counters)
        self._failures = max(self._failures, counters.get("failures", 0))

    def summary(self) -> Recoveries:
        return Recoveries(
            failures=self._failures,
            full=self._made["full"],
            partial=self._made["partial"],
            pls=self.losses.pls,
            repeated_steps=self._repeated_steps,
            seconds=self._seconds,
        )


def make_recoverer(
    strategy: Strategy, homes: Sequence[Home], saver: RunSaver | None, *,
    total_steps: int | None, steps: Callable[[], int],
    go_back: Callable[[], Kept | None] | None, tell: Callable[[str, dict[str, Any]], None],
    clock: Clock,
) -> Recoverer | None:  # fmt: skip
    """What a strategy asks for, with parity started; None without shards or on a rank that does not
    write. What cannot be done for these tables is refused."""
    recovery = strategy.recovery or Recovery()
    if recovery.scope == "partial":
        if total_steps is None or total_steps < 1:
            raise ConfigError(
                "partial recovery counts what is lost as a share of the job: give the keeper "
                "total_steps="
            )
        if not homes:
            raise ConfigError(
                "partial recovery is for tables on shards, and the model has none: use "
                "emberkeep's modules with cluster=, or ek.incremental()"
            )
    if strategy.parity is not None:
        if not homes:
            raise ConfigError(
                "parity is for tables on shards, and the model has none: use emberkeep's "
                "modules with cluster=, or ek.incremental()"
            )
        for home in homes:
            home.cluster.protect(strategy.parity)
    if saver is None or not homes:
        return None
    return Recoverer(
        homes, saver, recovery, total_steps=total_steps, steps=steps, go_back=go_back, tell=tell,
        clock=clock,
    )  # fmt: skip
