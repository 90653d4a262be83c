"""What a keeper does about lost shards: partial recoveries on the spot, full ones when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from emberkeep.checkpoint.overheads import pls_of_loss
from emberkeep.checkpoint.recovery import (
    Home,
    Losses,
    Plan,
    Recovery,
    Scope,
    edited,
    plan,
    steps_of,
)
from emberkeep.cluster.base import PATIENCE
from emberkeep.errors import ConfigError, NoVersionError, RecoveryError, ShardLostError
from emberkeep.keeper.adopted_rows import STEPS_APPLIED_TWICE
from emberkeep.keeper.run_saver import Kept, RunSaver, version_number
from emberkeep.keeper.tiered_saver import TieredSaver
from emberkeep.repository import Manifest
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.metrics import Sample
from emberkeep.runtime.pool import ForkLock
from emberkeep.strategies import Strategy

# Between attempts of one recovery: the first pause, and the longest.
_PAUSE_SECONDS = (0.05, 1.0)
# So many full recoveries may go back to one version before training gets further than it had been.
_MOST_IN_VAIN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One recovery that was made."""

    scope: Scope | Literal["parity"]
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
    """Shards whose rows were lost, each time that one was."""
    full: int
    partial: int
    parity: int
    """Recoveries from the other shards: nothing is taken from the model."""
    pls: float
    """The portion of lost samples: what partial recoveries have taken from the model, over the
    whole job."""
    repeated_steps: int
    samples_applied_twice: int
    """What rows hold twice, because live servers were adopted that were ahead of the version; in
    steps where the reader does not say how many samples a step has."""
    seconds: float
    """In which training stood still for recoveries, from the call that met the loss on."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def samples(self) -> list[Sample]:
        """The same for Prometheus."""
        return [
            ("failures_total", "counter", "shards whose rows were lost", self.failures),
            ("full_recoveries_total", "counter", "everything went back", self.full),
            ("partial_recoveries_total", "counter", "lost shards went back alone", self.partial),
            ("recoveries_from_parity_total", "counter", "nothing was lost", self.parity),
            ("recovery_seconds_total", "counter", "training stood still for recoveries",
             self.seconds),
            ("repeated_steps_total", "counter", "steps taken again", self.repeated_steps),
            ("pls", "gauge", "portion of lost samples", self.pls),
            ("samples_applied_twice_total", "counter", "rows were ahead of the version",
             self.samples_applied_twice),
        ]  # fmt: skip


class Recoverer:
    """Brings lost shards of one model back.

    `go_back` loads the newest whole version: rows, dense state, reader and step; None for one rank
    of several, which cannot go back alone: what only a full recovery helps is raised. `steps` tells
    how many steps have ended. Shards that are lost again while they are recovered are recovered
    again, for as long as the clusters have patience: then it is `RecoveryError`.
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
        samples_per_step: int = 1,
    ) -> None:
        self._clock = clock
        self._homes = homes
        self._samples_per_step, self._applied_twice = samples_per_step, 0
        self._saver = saver
        self._recovery = recovery
        self._total_steps = total_steps
        self._steps = steps
        self._go_back = go_back
        self._tell = tell
        self.losses = Losses()
        self._going_back = False
        # One recovery at a time: threads that meet the same loss wait for it.
        self._lock = ForkLock()
        self._busy = False
        self._pause = _PAUSE_SECONDS[0]
        self._back_at: tuple[int | None, int] | None = None
        self._furthest = self._in_vain = 0
        self._patience = max((home.cluster.patience for home in homes), default=PATIENCE)
        self._failures_before = self._repeated_steps = 0
        self._made: dict[str, int] = {"full": 0, "partial": 0, "parity": 0}
        self._recovered_before: Mapping[int, int] = {}
        if isinstance(saver, TieredSaver):
            saver.on_older = self._older
        self._seconds = 0.0
        first = 0
        for home in homes:
            home.cluster.on_loss = self.on_loss
            home.cluster.on_event = partial(self._heard, first)
            first += home.cluster.shard_count

    def release(self) -> None:
        for home in self._homes:
            home.cluster.on_loss = home.cluster.on_event = None

    def _heard(self, first: int, event: str, details: dict[str, Any]) -> None:
        """What a cluster has to say, whose shards are counted from `first` on. It recovers from
        parity by itself."""
        if "shard" in details:
            details = {**details, "shard": first + details["shard"]}
        if "shards" in details:
            details = {**details, "shards": [first + shard for shard in details["shards"]]}
        if event != "recovered":
            self._tell(event, details)
            return
        made = Recovered(
            scope="parity", shards=tuple(details["shards"]), version=None, step=self._steps(),
            repeated_steps=0, pls=self.losses.pls, seconds=details["seconds"],
            reason="every row came back from the other shards",
        )  # fmt: skip
        self._note(made)

    def _note(self, made: Recovered) -> None:
        self._made[made.scope] += 1
        self._seconds += made.seconds
        self._repeated_steps += made.repeated_steps
        self._tell("recovered", made.to_dict())

    def on_loss(self, lost: ShardLostError) -> bool:
        """Whether the shards serve again. A full recovery is left to the caller, who can rewind."""
        with self._lock:
            if self._busy:
                return False  # a call of the recovery itself, which decides again
            if not self._lost():
                return True  # another thread has met the same loss
            if self._plan(self._clock.monotonic()).scope == "full":
                return False
            try:
                self._recover(None, rewinds=False)
            except ShardLostError:
                return False  # more was lost meanwhile, and it is a full recovery by now
            return not self._lost()

    def recover(self, lost_in: ShardLostError | None = None) -> Recovered | None:
        """Recovers what is lost, however often more is lost meanwhile; None if nothing is.

        `lost_in` is what has ended a step half-way: such a step can only be taken again, so the
        model goes back even if the shards have returned since.
        """
        with self._lock:
            return self._recover(lost_in, rewinds=self._go_back is not None)

    def _recover(self, lost_in: ShardLostError | None, *, rewinds: bool) -> Recovered | None:
        """`rewinds` says whether the caller can go back to a version: one that is in the middle of
        a pull or a push would go on from rows that are not those of its step."""
        if not self._lost() and not self._going_back:
            if lost_in is None:
                return None
            self._going_back = True
        start = self._noticed()
        self._busy, self._pause = True, _PAUSE_SECONDS[0]
        lost: set[int] = set()
        emptied = False  # a full recovery has renewed them all: that alone loses none
        losses_before = [len(home.cluster.losses) for home in self._homes]
        try:
            while True:
                returned = not self._lost() and not self._going_back and lost_in is None
                if returned and not [*self._found_lost(losses_before)]:
                    return None  # with all their rows
                decided = self._plan(start)
                if decided.scope == "partial" and lost_in is not None:
                    self._going_back = True
                    decided = self._plan(start)
                if decided.scope == "full" and not rewinds:
                    raise lost_in or ShardLostError(sorted(lost.union(decided.shards)))
                try:
                    # A version under way may still be committed, and less would be lost.
                    self._saver.learn_outcome()
                    if decided.scope == "partial":
                        decided = self._plan(start)
                        some = decided.shards or [*self._found_lost(losses_before)]
                        if decided.scope == "full" or not some:
                            continue  # more was lost meanwhile, or all came back with their rows
                    if not emptied:
                        lost.update(decided.shards)  # one that came back until now lost nothing
                    emptied |= decided.scope == "full"
                    made = self._carry_out(decided, start)
                except ShardLostError as error:
                    self._must_go_on(start, error)
                    continue  # one more was lost: decide again
                break
        finally:
            self._busy = False
        lost.update(self._found_lost(losses_before))
        made = replace(made, shards=tuple(sorted(lost)))
        for home in self._homes:
            home.cluster.lost_since = None
        self._note(made)
        self._require_progress(made)
        return made

    def _require_progress(self, made: Recovered) -> None:
        """What dies at the same step after each full recovery would do so for ever."""
        if made.scope != "full":
            return
        where, reached = (made.version, made.step), made.step + made.repeated_steps
        if where != self._back_at or reached > self._furthest:
            self._back_at, self._furthest, self._in_vain = where, reached, 0
        self._in_vain += 1
        if self._in_vain > _MOST_IN_VAIN:
            raise RecoveryError(
                f"the run went back to step {made.step} {self._in_vain} times, and never got "
                f"beyond step {self._furthest}: see why shards end there, or save more often; then "
                "start the run again to resume its newest version"
            )

    def _noticed(self) -> float:
        """When the call began that met the loss."""
        since = [home.cluster.lost_since for home in self._homes]
        return min((at for at in since if at is not None), default=self._clock.monotonic())

    def _found_lost(self, before: Sequence[int]) -> Iterator[int]:
        """The shards, counted through, that have lost their rows since."""
        first = 0
        for home, count in zip(self._homes, before, strict=True):
            yield from (first + shard for shard in home.cluster.losses[count:])
            first += home.cluster.shard_count

    def _carry_out(self, decided: Plan, start: float) -> Recovered:
        step, kept = self._steps(), None
        if decided.scope == "partial":
            still = self._unchanged if decided.exact else None
            kept = self._saver.recover_shards(self._losing(decided), still)
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
            shards=decided.shards,
            version=version_number(kept),
            step=self._steps(),
            repeated_steps=step - self._steps(),
            pls=self.losses.pls,
            seconds=self._clock.monotonic() - start,
            reason=decided.reason,
        )

    def _losing(self, decided: Plan) -> Iterator[tuple[Home, list[int]]]:
        """The shards of each cluster, which are counted as lost when their turn comes."""
        exact = decided.losses == self.losses
        for home, first, shards in self._by_home(decided.shards):
            if not exact:
                self._count([first + shard for shard in shards])
            yield home, shards

    def _count(self, shards: Sequence[int]) -> None:
        """Counts what a partial recovery takes from these shards, before it begins: if it ends
        half-way, some of them serve, and nobody would know later what they are without. A shard
        that is recovered again at the same step loses nothing more."""
        whole = self._saver.whole
        assert whole is not None
        assert self._total_steps is not None
        self._recovered_before = self.losses.recovered_at
        self.losses = self.losses.after(
            shards, step=self._steps(), saved=whole.step, total=self._total_steps,
            shards=self.shard_count,
        )  # fmt: skip

    def _older(self, home: Home, shards: Sequence[int], saved: int) -> None:
        """Shards whose files are gone come back from an older step than was counted."""
        whole = self._saver.whole
        assert whole is not None
        assert self._total_steps is not None
        first = sum(h.cluster.shard_count for h in self._homes[: self._homes.index(home)])
        known = [max(saved, self._recovered_before.get(first + shard, 0)) for shard in shards]
        pls = pls_of_loss(
            lost_samples=sum(max(0, whole.step - step) for step in known),
            total_samples=self._total_steps, shards=self.shard_count,
        )  # fmt: skip
        self.losses = replace(self.losses, pls=self.losses.pls + pls)

    @property
    def shard_count(self) -> int:
        return sum(home.cluster.shard_count for home in self._homes)

    def _plan(self, start: float) -> Plan:
        while True:
            try:
                return self._plan_once()
            except ShardLostError as error:
                # One that was asked is gone too, which is known from here on.
                self._must_go_on(start, error)

    def _must_go_on(self, start: float, error: ShardLostError) -> None:
        """Returns after a pause, longer each time; raises when a recovery that began at `start` has
        lost shards for too long. One that is only unreachable keeps its rows."""
        if self._clock.monotonic() - start > self._patience.total_seconds():
            named = ", ".join(map(str, error.shards))
            raise RecoveryError(
                f"shards keep being lost while they are recovered, for {self._patience} by now, "
                f"the last time {named}: see why they end, then start the run again to resume its "
                "newest version"
            ) from error
        # A server that refuses at once would be asked, or started again, thousands of times.
        named = ", ".join(map(str, error.shards))
        for home in self._homes:
            home.cluster.stop.look(f"shards that are lost again and again, the last time {named}")
        self._clock.sleep(self._pause)
        self._pause = min(_PAUSE_SECONDS[1], 2 * self._pause)
        for home in self._homes:
            home.cluster.await_silent()

    def _plan_once(self) -> Plan:
        whole = self._saver.whole
        return plan(
            self._recovery,
            self.losses,
            self._lost(),
            shards=self.shard_count,
            step=self._steps(),
            saved=None if whole is None else whole.step,
            total=self._total_steps,
            unchanged=self._unchanged(),
            lossy=isinstance(whole, Manifest)
            and bool(whole.layout.get("lossy", whole.layout.get("codecs"))),
            going_back=self._going_back,
        )

    def follow(self, recovery: Recovery) -> None:
        """What is lost from here on is recovered that way."""
        self._recovery = recovery

    def risk(self) -> int | None:
        """So many steps after a version a failure may lose what is left of the bound; None without
        one."""
        if self._recovery.scope != "partial" or self._total_steps is None:
            return None
        return self._recovery.steps_at_risk(
            self.losses, total=self._total_steps, shards=self.shard_count
        )

    def _unchanged(self) -> bool:
        """Whether nothing was applied since the newest whole version by any cluster that has lost
        shards, but pushes that lost shards will be sent: a push of another worker that only some
        shards of the version hold counts, and so do rows from outside."""
        whole = self._saver.whole
        saved = whole.layout["tables"] if isinstance(whole, Manifest) else {}
        for home in self._homes:
            lost = home.cluster.lost()
            if lost and len(lost) == home.cluster.shard_count:
                return False  # nobody is left who would know
            steps = steps_of(home.cluster) if lost else {}
            if any(
                steps.get(own) != saved.get(name, {}).get("steps")
                for name, own in home.names.items()
                if lost
            ) or not all(home.cluster.saved_all(shard) for shard in lost):
                return False
            if lost and edited(home, lost, saved):
                return False
        return whole is not None

    def _lost(self) -> list[int]:
        """Shards that do not serve, counted through all clusters."""
        found, first = [], 0
        for home in self._homes:
            found += [first + shard for shard in home.cluster.lost()]
            first += home.cluster.shard_count
        return found

    def _by_home(self, shards: Sequence[int]) -> list[tuple[Home, int, list[int]]]:
        """Each cluster that has some of them, the number of its first shard, and its own
        numbers of those."""
        found, first = [], 0
        for home in self._homes:
            count = home.cluster.shard_count
            own_shards = [shard - first for shard in shards if first <= shard < first + count]
            if own_shards:
                found.append((home, first, own_shards))
            first += count
        return found

    # -- figures ---------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """For the next version: what the model has lost, and how often shards failed."""
        twice = {"samples_applied_twice": self._applied_twice} if self._applied_twice else {}
        return {**self.losses.to_dict(), "failures": self._failures, **twice}

    @property
    def _failures(self) -> int:
        return self._failures_before + sum(len(home.cluster.losses) for home in self._homes)

    def load(self, counters: dict[str, Any]) -> dict[str, int]:
        """The losses of a version that was brought back, as a share of the job as long as it is to
        be now; failures of a run are counted on. Returns what is to be said of rows that stayed
        where they were, beside that version."""
        self.losses = Losses.from_dict(counters)
        if self._total_steps is not None:
            self.losses = self.losses.of_job(self._total_steps)
        self._failures_before += max(0, counters.get("failures", 0) - self._failures)
        again = int(counters.get(STEPS_APPLIED_TWICE, 0)) * self._samples_per_step
        self._applied_twice = int(counters.get("samples_applied_twice", 0)) + again
        return {"samples_applied_twice": again} if STEPS_APPLIED_TWICE in counters else {}

    def summary(self) -> Recoveries:
        return Recoveries(
            failures=self._failures,
            full=self._made["full"],
            partial=self._made["partial"],
            parity=self._made["parity"],
            pls=self.losses.pls,
            repeated_steps=self._repeated_steps,
            samples_applied_twice=self._applied_twice,
            seconds=self._seconds,
        )


def make_recoverer(
    strategy: Strategy, homes: Sequence[Home], saver: RunSaver | None, *,
    total_steps: int | None, steps: Callable[[], int],
    go_back: Callable[[], Kept | None] | None, tell: Callable[[str, dict[str, Any]], None],
    clock: Clock, reader: Any = None,
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
        clock=clock, samples_per_step=getattr(reader, "samples_per_step", 1),
    )  # fmt: skip
