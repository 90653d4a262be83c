"""Strategies: what versions hold, when they are taken and how long they are kept, under one name.

A strategy is named by what a user wants; the name of the paper that it comes from is an alias with
that paper's defaults. It is plain data, composed of parts that work alone as well, and refuses
what cannot be combined when it is written down.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

from emberkeep.checkpoint.overheads import Job, partial_pays
from emberkeep.checkpoint.recovery import Recovery, Scope
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.config import duration
from emberkeep.erasure.codes import Parity, Unprotected
from emberkeep.errors import ConfigError
from emberkeep.repository import DEFAULT_RETENTION, KeepAll, KeepLast, KeepNamed, RetentionPolicy
from emberkeep.repository.policies import Grid, Layout
from emberkeep.rows.priority import Kind, Priority

Keep: TypeAlias = 'int | Literal["all"] | RetentionPolicy'
Interval: TypeAlias = "int | timedelta | str"

# The most batches that a reader may hand out before time is looked at again.
_MOST_BATCHES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """When versions are taken: every so many steps, or whenever so much time has passed.

    Pure: what it says depends on its arguments alone.
    """

    steps: int | None = None
    time: timedelta | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.time is None):
            raise ConfigError("a schedule counts steps or time: give one of the two")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"every= must be 1 step or more, not {self.steps}")
        if self.time is not None and self.time <= timedelta(0):
            raise ConfigError(f"every= must be longer than no time, not {self.time}")

    def divided(self, parts: int) -> Every:
        """So many times as often."""
        if self.steps is not None:
            return Every(steps=max(1, round(self.steps / parts)))
        assert self.time is not None
        return Every(time=self.time / parts)

    def due(self, step: int, since_last: timedelta) -> bool:
        """Whether a version is due after `step`, so long after the last one.

        Steps are counted from the start of the run, so a resumed run saves at the same ones.
        """
        if self.steps is not None:
            return step % self.steps == 0
        assert self.time is not None
        return since_last >= self.time

    def steps_ahead(self, step: int, since_last: timedelta, per_step: timedelta | None) -> int:
        """So many steps may be taken before `due` is asked again.

        By time this is half of what fits into the time that is left, so that the moment is met
        closely although steps vary; without an idea of how long a step takes, one.
        """
        if self.steps is not None:
            return self.steps - step % self.steps
        assert self.time is not None
        if not per_step:
            return 1
        fitting = (self.time - since_last) / per_step / 2
        return max(1, min(_MOST_BATCHES, math.floor(fitting)))


def schedule(every: Interval) -> Every:
    """A schedule from what a user writes: `500`, `"500 steps"`, `"30min"`, `"1h 30min"`, or a
    timedelta."""
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


def retention(keep: Keep) -> RetentionPolicy:
    """`3`: the last three and every named one; `"all"`: everything; or a policy as it is."""
    if keep == "all":
        return KeepAll()
    if isinstance(keep, bool | str):
        raise ConfigError(f"keep= takes a number of versions, 'all' or a policy, not {keep!r}")
    if isinstance(keep, int):
        return KeepLast(n=keep) | KeepNamed()
    return keep


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

    def __post_init__(self) -> None:
        if self.spec.priority is not None and (
            self.recovery is None or self.recovery.scope != "partial"
        ):
            raise ConfigError(
                "prioritised versions hold no instant, so they can only bring single shards back: "
                "they need partial recovery"
            )


def incremental(
    *,
    every: Interval = "30min",
    layout: Layout = "intermittent",
    bits: int | None = None,
    expected_restores: int | None = None,
    quantize_optimizer: bool = False,
    keep: Keep = 3,
    recovery: Literal["full"] | None = None,
) -> Strategy:
    """Versions that hold the rows that changed. Nothing is lost unless `bits=` or
    `expected_restores=` says so; `VersionSpec` explains the choices. With `recovery="full"` lost
    shards take everybody back to the newest version, the first of which is taken at once."""
    return Strategy(
        spec=VersionSpec(
            layout=layout,
            bits=bits,
            expected_restores=expected_restores,
            quantize_optimizer=quantize_optimizer,
        ),
        schedule=schedule(every),
        retention=retention(keep),
        recovery=None if recovery is None else Recovery(scope=recovery),
    )


def all_versions(
    *,
    every: Interval = "30min",
    ratio: float = 0.2,
    concatenate: bool = True,
    most_behind: int = 8,
    behind: Literal["skip", "wait"] = "skip",
    restore_budget: timedelta | str | None = None,
    storage_budget_nbytes: int | None = None,
    bits: int | None = None,
    expected_restores: int | None = None,
    quantize_optimizer: bool = False,
    keep: Keep = "all",
) -> Strategy:
    """Every version kept, in little more than the space of what changed, and any of them restored
    about as fast as if it had been saved whole; `Grid` explains the choices."""
    if isinstance(restore_budget, str):
        restore_budget = schedule(restore_budget).time
    return Strategy(
        spec=VersionSpec(
            layout="grid",
            bits=bits,
            expected_restores=expected_restores,
            quantize_optimizer=quantize_optimizer,
            grid=Grid(
                ratio=ratio,
                concatenate=concatenate,
                most_behind=most_behind,
                behind=behind,
                restore_budget=restore_budget,
                storage_budget_nbytes=storage_budget_nbytes,
            ),
        ),
        schedule=schedule(every),
        retention=retention(keep),
    )


incr_cp = all_versions
"""The name of the paper that `all_versions` comes from."""


def check_n_run(
    *,
    every: Interval = "30min",
    layout: Layout = "intermittent",
    bits: int | None = None,
    expected_restores: int | None = None,
    quantize_optimizer: bool = False,
    keep: Keep = 1,
) -> Strategy:
    """`incremental` with the defaults of the Check-N-Run paper: quantized, and only the newest
    version is kept. Unless said otherwise one restore is expected, which means 2 bits until a
    second one happens and 8 bits from then on."""
    if bits is None and expected_restores is None:
        expected_restores = 1
    return incremental(
        every=every,
        layout=layout,
        bits=bits,
        expected_restores=expected_restores,
        quantize_optimizer=quantize_optimizer,
        keep=keep,
    )


def partial(
    *,
    every: Interval | None = None,
    pls: float = 0.1,
    job: Job | None = None,
    priority: Kind | None = "ssu",
    fraction: float = 1 / 8,
    layout: Layout = "intermittent",
    bits: int | None = None,
    most_pls: float = 1.0,
    keep: Keep = 3,
) -> Strategy:
    """Lost shards come back alone, with their newest saved rows, and training goes on.

    How much that loses on average is `pls`, the portion of lost samples: from it and the `job`
    follows how often a version must be taken, and whether partial recovery pays at all; where it
    does not, this is full recovery at its best interval, and `recovery.reason` says why. Or give
    `every`, and it is taken as it is.

    With `priority`, the `fraction` of the rows that matters most is saved that much more often
    between whole versions. `most_pls` is a bound: what would exceed it is recovered fully. `keep`
    counts whole versions.
    """
    if (every is None) == (job is None):
        raise ConfigError(
            "partial recovery needs every=, or job= from which it follows: give one of the two"
        )
    reason = ""
    if job is not None:
        verdict = partial_pays(job, pls)
        if not verdict.pays:
            return Strategy(
                spec=VersionSpec(layout=layout, bits=bits),
                schedule=Every(time=verdict.full_interval),
                retention=retention(keep),
                recovery=Recovery(scope="full", reason=verdict.reason),
            )
        every, reason = verdict.partial_interval, verdict.reason
    assert every is not None
    ranked = None if priority is None else Priority(kind=priority, fraction=fraction)
    rounds = 1 if ranked is None else ranked.rounds
    return Strategy(
        spec=VersionSpec(layout=layout, bits=bits, priority=ranked),
        schedule=schedule(every).divided(rounds),
        retention=retention(keep * rounds if type(keep) is int else keep),
        recovery=Recovery(scope="partial", most_pls=most_pls, reason=reason),
    )


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
