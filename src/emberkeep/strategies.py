"""Strategies: what versions hold, when they are taken and how long they are kept, under one name.

A strategy is named by what a user wants; the name of the paper that it comes from is an alias with
that paper's defaults. It is plain data, composed of parts that work alone as well, and refuses
what cannot be combined when it is written down.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal, TypeAlias

from emberkeep.checkpoint.overheads import Job, partial_pays
from emberkeep.checkpoint.recovery import Recovery, Scope
from emberkeep.checkpoint.run_plan import DEFAULT_PLS, Target, target_from
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.checkpoint.widths import Width, Widths
from emberkeep.config import duration
from emberkeep.erasure.codes import Parity, Unprotected
from emberkeep.errors import ConfigError
from emberkeep.repository import (
    DEFAULT_RETENTION,
    KeepAll,
    KeepFor,
    KeepLast,
    KeepNamed,
    RetentionPolicy,
)
from emberkeep.repository.policies import Grid, Layout, Predictor
from emberkeep.repository.retention import KeepIntersection, KeepUnion
from emberkeep.rows.priority import Kind, Priority

Keep: TypeAlias = 'int | Literal["all"] | RetentionPolicy'
Interval: TypeAlias = "int | timedelta | str"
Bits: TypeAlias = "int | Mapping[str, int] | None"

DEFAULT_PRIORITY: Kind | None = None
"""Prioritised versions cost up to another model for each whole one: who wants them says so."""

# The most batches that a reader may hand out before time is looked at again.
_MOST_BATCHES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """When versions are taken: every so many steps, or whenever so much time has passed.

    Pure: what it says depends on its arguments alone.
    """

    steps: int | None = None
    time: timedelta | None = None
    parts: int = 1
    """Versions in so long, evenly spread; the last of them is a whole one."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.time is None):
            raise ConfigError("a schedule counts steps or time: give one of the two")
        whole = all(type(count) is int for count in (self.steps, self.parts) if count is not None)
        if not whole or not isinstance(self.time, timedelta | None):
            raise ConfigError(
                "a schedule takes whole numbers of steps and parts, and a timedelta, not "
                f"steps={self.steps!r}, time={self.time!r}, parts={self.parts!r}"
            )
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"every= must be 1 step or more, not {self.steps}")
        if self.time is not None and self.time <= timedelta(0):
            raise ConfigError(f"every= must be longer than no time, not {self.time}")
        if self.parts < 1:
            raise ConfigError(f"a schedule has 1 part or more, not {self.parts}")

    @property
    def saves(self) -> int:
        """Versions for each whole one: fewer than `parts` where there are fewer steps."""
        return self.parts if self.steps is None else min(self.parts, self.steps)

    def due(self, step: int, since_last: timedelta) -> bool:
        """Whether a version is due after `step`, so long after the last one.

        Steps are counted from the start of the run, so a resumed run saves at the same ones.
        """
        if self.steps is not None:
            return self._part(step) > self._part(step - 1)
        assert self.time is not None
        return since_last >= self.time / self.parts

    def due_whole(self, step: int) -> bool:
        """Whether the version that is due after `step` is a whole one, as far as steps tell."""
        return self.steps is not None and step % self.steps == 0

    def steps_ahead(self, step: int, since_last: timedelta, per_step: timedelta | None) -> int:
        """So many steps may be taken before `due` is asked again.

        By time this is half of what fits into the time that is left, so that the moment is met
        closely although steps vary; without an idea of how long a step takes, one.
        """
        if self.steps is not None:
            return -(-(self._part(step) + 1) * self.steps // self.parts) - step
        assert self.time is not None
        if not per_step:
            return 1
        fitting = (self.time / self.parts - since_last) / per_step / 2
        return max(1, min(_MOST_BATCHES, math.floor(fitting)))

    def _part(self, step: int) -> int:
        assert self.steps is not None
        return step * self.parts // self.steps


def schedule(every: Interval, *, name: str = "every") -> Every:
    """A schedule from what a user writes: `500`, `"500 steps"`, `"30min"`, `"1h 30min"`, or a
    timedelta. `name` is what it is called where the user writes it."""
    try:
        return _schedule(every)
    except ConfigError as error:
        raise ConfigError(str(error).replace("every=", f"{name}=", 1)) from None


def _schedule(every: Interval) -> Every:
    if isinstance(every, bool) or not isinstance(every, int | timedelta | str):
        raise ConfigError(_interval_message(every))
    if isinstance(every, int):
        return Every(steps=every)
    if isinstance(every, timedelta):
        return Every(time=every)
    text = every.strip().lower()
    steps = re.fullmatch(r"(\d+)\s*steps?", text)
    if steps:
        return Every(steps=int(steps[1]))
    try:
        return Every(time=duration(text))
    except ValueError:
        raise ConfigError(_interval_message(every)) from None


def _interval_message(given: object) -> str:
    return (
        f"every={given!r} is no interval: write steps as 500 or '500 steps', time as '30min', "
        "'2h', '1h 30min' or a timedelta"
    )


def retention(
    keep: Keep,
    *,
    keep_for: timedelta | str | None = None,
    drop_after: timedelta | str | None = None,
) -> RetentionPolicy:
    """`3`: the last three and every named one; `"all"`: everything; or a policy as it is.

    `keep_for` keeps younger ones as well, however many they are. `drop_after` lets older ones go,
    however few there are, but for the newest and those with a name: no sooner than `keep_for`.
    """
    policy: RetentionPolicy
    if isinstance(keep, str) and keep == "all":
        policy = KeepAll()
    elif isinstance(keep, bool | type) or not (isinstance(keep, int) or hasattr(keep, "keep")):
        raise ConfigError(f"keep= takes a number of versions, 'all' or a policy, not {keep!r}")
    else:
        policy = KeepLast(n=keep) if isinstance(keep, int) else keep
    young = None if keep_for is None else _age("keep_for", keep_for)
    old = None if drop_after is None else _age("drop_after", drop_after)
    if young is not None and old is not None and young > old:
        raise ConfigError(
            f"keep_for= keeps what is younger than {young}, and drop_after= lets go of it after "
            f"{old}: leave out one of them, or drop later"
        )
    if young is not None:
        policy = KeepUnion(policies=(policy, KeepFor(age=young)))
    if old is not None:
        policy = KeepIntersection(policies=(policy, KeepFor(age=old)))
    as_given = not isinstance(keep, int) and keep_for is None and drop_after is None
    return policy if as_given else KeepUnion(policies=(policy, KeepNamed()))


def _age(what: str, age: timedelta | str) -> timedelta:
    if isinstance(age, timedelta):
        return age
    try:
        return duration(age)
    except (ValueError, AttributeError):
        raise ConfigError(f"{what}={age!r} is no age: write '14d', '36h' or a timedelta") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What versions hold and how, when they are taken, which are kept, and what is done when shards
    are lost.

    With `recovery` a version is taken at the very beginning, so that there always is one to go
    back to. With `parity`, lost shards come back from the others first; `recovery` is for when
    too many are lost at once.
    """

    spec: VersionSpec = field(default_factory=VersionSpec)
    schedule: Every = field(default_factory=lambda: Every(time=timedelta(minutes=30)))
    retention: RetentionPolicy = DEFAULT_RETENTION
    recovery: Recovery | None = None
    parity: Parity | None = None
    least: Every | None = None
    """How long after a version the next may be taken early, because a failure would lose more than
    `recovery.most_pls`; None: none is."""
    remote: Every | None = None
    """When a version is taken, if `schedule` is for batches in the tiers of all tables; None: every
    save is a version."""
    auto: Target | None = None
    """What the run plans for by itself as it goes; None: all of this stays as it is."""

    def __post_init__(self) -> None:
        if self.spec.priority is not None and (
            self.recovery is None or self.recovery.scope != "partial"
        ):
            raise ConfigError(
                "prioritised versions hold no instant, so they can only bring single shards back: "
                "they need partial recovery"
            )
        if self.remote is not None and (
            self.spec.priority is not None or self.parity is not None or self.auto is not None
        ):
            raise ConfigError(
                "batches in tiers are exact and of all rows: they go neither with prioritised "
                "versions, nor with parity, nor with ek.auto"
            )


def _spec(
    layout: Layout, bits: Bits, expected_restores: int | None, job: Job | None,
    accuracy_budget: float | None, quantize_optimizer: bool, bins: int | None,
    range_ratio: float | None, *, predictor: Predictor = "growth", grid: Grid | None = None,
) -> VersionSpec:  # fmt: skip
    """`bits` of all tables, or of each; `job` says how many restores are expected."""
    if job is not None:
        if expected_restores is not None:
            raise ConfigError(
                f"job= expects {job.expected_restores} restores: leave out expected_restores=, or "
                "job="
            )
        expected_restores = job.expected_restores
    widths = None
    if isinstance(bits, Mapping):
        if accuracy_budget is not None:
            raise ConfigError(
                "accuracy_budget= measures the width of every table: leave out bits= of single ones"
            )
        widths = Widths(tables={table: Width(bits=each) for table, each in bits.items()})
        bits = None
    return VersionSpec(
        layout=layout, bits=bits, expected_restores=expected_restores, widths=widths,
        accuracy_budget=accuracy_budget, quantize_optimizer=quantize_optimizer, bins=bins,
        range_ratio=range_ratio, predictor=predictor, grid=grid,
    )  # fmt: skip


def incremental(
    *,
    every: Interval = "30min",
    layout: Layout = "intermittent",
    predictor: Predictor = "growth",
    bits: Bits = None,
    expected_restores: int | None = None,
    job: Job | None = None,
    accuracy_budget: float | None = None,
    quantize_optimizer: bool = False,
    bins: int | None = None,
    range_ratio: float | None = None,
    keep: Keep = 3,
    keep_for: timedelta | str | None = None,
    drop_after: timedelta | str | None = None,
    recovery: Literal["full"] | None = None,
) -> Strategy:
    """Versions that hold the rows that changed. Nothing is lost unless `bits=`,
    `expected_restores=`, a `job=` that expects them, or `accuracy_budget=` says so; `VersionSpec`
    explains the choices, `retention` what is kept. With `recovery="full"` lost shards take
    everybody back to the newest version, the first of which is taken at once."""
    return Strategy(
        spec=_spec(
            layout,
            bits,
            expected_restores,
            job,
            accuracy_budget,
            quantize_optimizer,
            bins,
            range_ratio,
            predictor=predictor,
        ),
        schedule=schedule(every),
        retention=retention(keep, keep_for=keep_for, drop_after=drop_after),
        recovery=None if recovery is None else Recovery(scope=recovery),
    )


def all_versions(
    *,
    every: Interval = "30min",
    ratio: float = 0.15,
    concatenate: bool = True,
    most_behind: int = 8,
    behind: Literal["skip", "wait"] = "skip",
    restore_budget: timedelta | str | None = None,
    storage_budget_nbytes: int | None = None,
    bits: Bits = None,
    expected_restores: int | None = None,
    job: Job | None = None,
    accuracy_budget: float | None = None,
    quantize_optimizer: bool = False,
    bins: int | None = None,
    range_ratio: float | None = None,
    keep: Keep = "all",
    keep_for: timedelta | str | None = None,
    drop_after: timedelta | str | None = None,
) -> Strategy:
    """Every version kept, in little more than the space of what changed, and any of them restored
    about as fast as if it had been saved whole; `Grid` explains the choices."""
    return Strategy(
        spec=_spec(
            "grid",
            bits,
            expected_restores,
            job,
            accuracy_budget,
            quantize_optimizer,
            bins,
            range_ratio,
            grid=Grid(
                ratio=ratio,
                concatenate=concatenate,
                most_behind=most_behind,
                behind=behind,
                restore_budget=_time_of("restore_budget", restore_budget),
                storage_budget_nbytes=storage_budget_nbytes,
            ),
        ),
        schedule=schedule(every),
        retention=retention(keep, keep_for=keep_for, drop_after=drop_after),
    )


incr_cp = all_versions
"""The name of the paper that `all_versions` comes from."""


def check_n_run(
    *,
    every: Interval = "30min",
    layout: Layout = "intermittent",
    predictor: Predictor | None = None,
    bits: Bits = None,
    expected_restores: int | None = None,
    job: Job | None = None,
    accuracy_budget: float | None = None,
    quantize_optimizer: bool = False,
    bins: int | None = None,
    range_ratio: float | None = None,
    keep: Keep = 1,
    drop_after: timedelta | str | None = "14d",
) -> Strategy:
    """`incremental` with the defaults of the Check-N-Run paper: its predictor, quantized, and only
    the newest version is kept; of several that you `keep`, those of the last 14 days. Unless `job=`
    or something else says otherwise one restore is expected, which means 2 bits until a second one
    happens and 8 bits from then on."""
    if bits is None and expected_restores is None and job is None and accuracy_budget is None:
        expected_restores = 1
    return incremental(
        every=every,
        layout=layout,
        predictor=predictor or ("paper" if layout == "intermittent" else "growth"),
        bits=bits,
        expected_restores=expected_restores,
        job=job,
        accuracy_budget=accuracy_budget,
        quantize_optimizer=quantize_optimizer,
        bins=bins,
        range_ratio=range_ratio,
        keep=keep,
        drop_after=drop_after,
    )


def partial(
    *,
    every: Interval | None = None,
    pls: float | None = None,
    accuracy_loss: float | None = None,
    slope: float | None = None,
    job: Job | None = None,
    priority: Kind | None = DEFAULT_PRIORITY,
    fraction: float = 1 / 8,
    period: int = 2,
    layout: Layout = "intermittent",
    bits: int | None = None,
    most_pls: float | None = None,
    keep: Keep = 3,
) -> Strategy:
    """Lost shards come back alone, with their newest saved rows, and training goes on.

    How much that may lose is `pls`, the portion of lost samples, or `accuracy_loss` with the
    `slope` between the two; from it and the `job` follows how often a version must be taken, and
    whether partial recovery pays at all; where it does not, this is full recovery at its best
    interval, and `recovery.reason` says why. Or give `every`, and it is taken as it is.

    The target is kept: a version is taken early when a failure would exceed it, and what exceeds
    it all the same is recovered fully. `most_pls` is another bound than the target; 1.0 leaves the
    target to the average. With `every` alone there is no target, and 1.0 is the bound.

    With `priority`, the `fraction` of the rows that matters most is saved that much more often
    between whole versions, unless only versions without that pay; `period` is that of sub-sampled
    use. `keep` counts whole versions.
    """
    if (every is None) == (job is None):
        raise ConfigError(
            "partial recovery needs every=, or job= from which it follows: give one of the two"
        )
    target = Target(pls=pls, accuracy_loss=accuracy_loss, slope=slope)
    wanted = target.most_pls
    ranked = None if priority is None else Priority(kind=priority, fraction=fraction, period=period)
    reason = ""
    together = 1
    if job is not None:
        together = job.failing_together
        wanted = DEFAULT_PLS if wanted is None else wanted
        verdict = partial_pays(job, wanted, most_pls=most_pls, prioritised=_more_models(ranked))
        if ranked is not None and not verdict.pays:
            plain = partial_pays(job, wanted, most_pls=most_pls)
            if plain.pays:
                reason = (
                    f"prioritised versions do not pay: they would cost "
                    f"{100 * verdict.partial.total:.2f}% of the job; "
                )
                ranked, verdict = None, plain
        if not verdict.pays:
            return Strategy(
                spec=VersionSpec(layout=layout, bits=bits),
                schedule=Every(time=verdict.full_interval),
                retention=retention(keep),
                recovery=Recovery(scope="full", reason=verdict.reason),
            )
        every, reason = verdict.partial_interval, reason + verdict.reason
        least = Every(time=min(verdict.full_interval, verdict.partial_interval))
    else:
        assert every is not None
        least = _eighth(schedule(every))
    if most_pls is None:
        most_pls = 1.0 if wanted is None else wanted
    times = replace(schedule(every), parts=1 if ranked is None else ranked.rounds)
    return Strategy(
        spec=VersionSpec(layout=layout, bits=bits, priority=ranked),
        schedule=times,
        retention=retention(keep * times.saves if type(keep) is int else keep),
        recovery=Recovery(scope="partial", most_pls=most_pls, together=together, reason=reason),
        least=least if most_pls < 1 else None,
    )


def _more_models(ranked: Priority | None) -> float:
    """What prioritised versions write for each whole version, in models."""
    return 0.0 if ranked is None else (ranked.rounds - 1) * ranked.fraction


def _eighth(given: Every) -> Every:
    if given.steps is not None:
        return Every(steps=-(-given.steps // 8))
    assert given.time is not None
    return Every(time=given.time / 8)


cpr = partial
"""The name of the paper; its defaults are `partial`'s."""


def parity(
    *,
    k: int = 4,
    r: int = 1,
    background: bool = False,
    chunk_rows: int = 32768,
    rebuild_share: float = 0.2,
    unprotected: Unprotected = "go_on",
    every: Interval = "6h",
    layout: Layout = "intermittent",
    bits: int | None = None,
    keep: Keep = 3,
    recovery: Scope = "full",
) -> Strategy:
    """Up to `r` lost shards come back from the others with every row as it was, while training
    goes on; `Parity` explains the choices.

    Two levels: when more shards are lost at once than parity can bring back, `recovery` is made
    from the newest version. As that is rare, so are versions.
    """
    return Strategy(
        spec=VersionSpec(layout=layout, bits=bits),
        schedule=schedule(every),
        retention=retention(keep),
        recovery=Recovery(scope=recovery),
        parity=Parity(
            k=k,
            r=r,
            background=background,
            chunk_rows=chunk_rows,
            rebuild_share=rebuild_share,
            unprotected=unprotected,
        ),
    )


ecrm = parity
"""The name of the paper that `parity` comes from."""


def tiered(
    *,
    every: Interval = "5min",
    remote: Interval = "6h",
    layout: Layout = "intermittent",
    bits: Bits = None,
    keep: Keep = 3,
    recovery: Scope = "full",
    most_pls: float = 1.0,
) -> Strategy:
    """Two levels for tables that all have a tier: a batch becomes durable where rows live, `every`
    so often, and a version in the repository `remote` so often, with a batch: no sooner than one.

    A run goes on from whichever is newer. A shard that is lost comes back from its own files: with
    `recovery="full"` all of them go back to the batch, with `"partial"` that shard alone, while the
    others go on, as long as PLS stays below `most_pls`. Where files are gone it is the version.
    """
    return Strategy(
        spec=_spec(layout, bits, None, None, None, False, None, None),
        schedule=schedule(every),
        remote=schedule(remote, name="remote"),
        retention=retention(keep),
        recovery=Recovery(scope=recovery, most_pls=most_pls),
    )


def auto(
    *,
    target: str = f"PLS {DEFAULT_PLS:g}",
    mtbf: timedelta | str | None = None,
    slope: float | None = None,
    together: int = 1,
    reschedule: timedelta | str = timedelta(0),
    first: Interval = "10min",
    max_interval: timedelta | str | None = None,
    keep: Keep = 3,
) -> Strategy:
    """A run that plans itself, for a `target` such as `"accuracy loss 0.01%"` or `"PLS 0.1"`.

    It starts with full recovery and a version after `first`, or after `max_interval` if that is
    shorter: no version comes later after another. From then on it measures how long
    training stands still for a version, how long loading takes, and how often shards and processes
    fail, across restarts; `mtbf` is what to believe until failures were seen. When that moves it
    plans again: full or partial recovery, the interval, the layout, and where accuracy may be lost
    and writing is slow the bits. The target is a bound on what the whole job loses. Each decision
    is an event, "planned", and stands with its reason in every version from then on.
    """
    longest = _time_of("max_interval", max_interval)
    wanted = Target(
        **target_from(target),
        slope=slope,
        mtbf=_time_of("mtbf", mtbf),
        together=together,
        reschedule=_time_of("reschedule", reschedule) or timedelta(0),
        max_interval=longest,
    )
    return Strategy(
        schedule=_first(first, longest),
        retention=retention(keep),
        recovery=Recovery(scope="full", reason="nothing was measured yet"),
        auto=wanted,
    )


def _first(first: Interval, longest: timedelta | None) -> Every:
    """The schedule until something was measured."""
    found = schedule(first, name="first")
    if longest is None or (found.time is not None and found.time <= longest):
        return found
    if found.time is None:
        raise ConfigError("first= counts steps and max_interval= time: give first= as a time, too")
    return Every(time=longest)


def _time_of(name: str, given: timedelta | str | None) -> timedelta | None:
    if given is None or isinstance(given, timedelta):
        return given
    try:
        return duration(given)
    except (ValueError, AttributeError):
        raise ConfigError(
            f"{name}={given!r} is no duration: write '28h', '5min' or '90s'"
        ) from None
