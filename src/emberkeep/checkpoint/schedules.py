"""When versions are taken and how long they are kept, from what a user writes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from emberkeep.config import duration
from emberkeep.errors import ConfigError
from emberkeep.repository import KeepAll, KeepFor, KeepLast, KeepNamed, RetentionPolicy
from emberkeep.repository.retention import KeepIntersection, KeepUnion

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
            f"keep_for={keep_for!r} keeps what is younger, and drop_after={drop_after!r} lets go "
            "of it: leave out one of them, or drop later"
        )
    if young is not None:
        policy = KeepUnion(policies=(policy, KeepFor(age=young)))
    if old is not None:
        policy = KeepIntersection(policies=(policy, KeepFor(age=old)))
    as_given = not isinstance(keep, int) and keep_for is None and drop_after is None
    return policy if as_given else KeepUnion(policies=(policy, KeepNamed()))


def _age(what: str, age: timedelta | str) -> timedelta:
    try:
        found = age if isinstance(age, timedelta) else duration(age)
    except (ValueError, AttributeError):
        raise ConfigError(f"{what}={age!r} is no age: write '14d', '36h' or a timedelta") from None
    if found <= timedelta(0):
        raise ConfigError(f"{what}={age!r}: an age is above 0, such as '14d'")
    return found
