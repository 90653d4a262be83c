"""Strategies: what versions hold, when they are taken and how long they are kept, under one name.

A strategy is named by what a user wants; the name of the paper that it comes from is an alias with
that paper's defaults. It is plain data, composed of parts that work alone as well, and refuses
what cannot be combined when it is written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal, TypeAlias

from emberkeep.checkpoint.overheads import Job, check_job, partial_pays
from emberkeep.checkpoint.recovery import Recovery, Scope
from emberkeep.checkpoint.run_plan import DEFAULT_PLS, Target, target_from
from emberkeep.checkpoint.schedules import Every as Every
from emberkeep.checkpoint.schedules import Interval as Interval
from emberkeep.checkpoint.schedules import Keep as Keep
from emberkeep.checkpoint.schedules import retention as retention
from emberkeep.checkpoint.schedules import schedule as schedule
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.checkpoint.widths import Width, Widths
from emberkeep.config import duration
from emberkeep.erasure.codes import Parity, Unprotected
from emberkeep.errors import ConfigError
from emberkeep.repository import DEFAULT_RETENTION, RetentionPolicy
from emberkeep.repository.policies import Grid, Layout, Predictor
from emberkeep.rows.priority import Kind, Priority

Bits: TypeAlias = "int | Mapping[str, int] | None"

DEFAULT_PRIORITY: Kind | None = None
"""Prioritised versions cost up to another model for each whole one: who wants them says so."""


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
        check_job(job)
        if expected_restores is not None:
            raise ConfigError(
                f"job= expects {job.expected_restores} restores: leave out expected_restores=, or "
                "job="
            )
        if bits is not None and not isinstance(bits, Mapping):
            raise ConfigError(
                f"job= expects {job.expected_restores} restores, which choose the bits: leave out "
                "bits=, or job="
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
    predictor: Predictor = "growth",
    bits: Bits = None,
    quantize_optimizer: bool = False,
    bins: int | None = None,
    range_ratio: float | None = None,
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
    spec = _spec(
        layout, bits, None, None, None, quantize_optimizer, bins, range_ratio, predictor=predictor
    )  # fmt: skip
    target = Target(pls=pls, accuracy_loss=accuracy_loss, slope=slope)
    wanted = target.most_pls
    ranked = None if priority is None else Priority(kind=priority, fraction=fraction, period=period)
    reason = ""
    together = 1
    if job is not None:
        check_job(job)
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
                spec=spec,
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
        spec=replace(spec, priority=ranked),
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
    predictor: Predictor = "growth",
    bits: Bits = None,
    quantize_optimizer: bool = False,
    bins: int | None = None,
    range_ratio: float | None = None,
    keep: Keep = 3,
    recovery: Scope = "full",
) -> Strategy:
    """Up to `r` lost shards come back from the others with every row as it was, while training
    goes on; `Parity` explains the choices.

    Two levels: when more shards are lost at once than parity can bring back, `recovery` is made
    from the newest version. As that is rare, so are versions.
    """
    spec = _spec(
        layout, bits, None, None, None, quantize_optimizer, bins, range_ratio, predictor=predictor
    )  # fmt: skip
    return Strategy(
        spec=spec,
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
