"""When shards fail: schedules, written down or drawn from a failure model.

Steps are those of the cluster: step n is the one that ends with its n-th push. A failure happens
once, also where a recovery goes back and takes its step again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from emberkeep.errors import ConfigError

When = Literal["pull", "push"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Shards that fail together in a step: before its rows are pulled, or between pull and push."""

    shards: tuple[int, ...]
    step: int
    when: When = "pull"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(sorted(set(self.shards))))
        if not self.shards or self.shards[0] < 0:
            raise ConfigError(f"a failure names shards from 0 up, not {self.shards}")
        if self.step < 1:
            raise ConfigError(f"steps count from 1: no shard can fail at step {self.step}")
        if self.when not in get_args(When):
            raise ConfigError(f"a shard fails before a 'pull' or a 'push', not {self.when!r}")


Failures: TypeAlias = Sequence[Failure]


def fail_at(*shards: int, step: int, when: When = "pull") -> Failure:
    """`fail_at(2, step=40)`: shard 2 fails at step 40; several shards fail together."""
    return Failure(shards=shards, step=step, when=when)


def random_failures(
    *,
    shards: int,
    steps: int,
    seed: int,
    count: int | None = None,
    mean_steps: float | None = None,
    together: int = 1,
    shape: float = 1.0,
) -> tuple[Failure, ...]:
    """Failures of a run of so many steps, in order; the same seed gives the same ones.

    Either `count` of them, at any step with equal probability, or one every `mean_steps` steps on
    average: gaps are gamma distributed with that mean and `shape` (1: exponential, below 1:
    bursts). Each takes `together` shards.
    """
    if (count is None) == (mean_steps is None):
        raise ConfigError("random failures need a count or mean_steps between them: give one")
    if not 1 <= together <= shards:
        raise ConfigError(f"of {shards} shards 1 to {shards} can fail together, not {together}")
    if (count is not None and count < 0) or (mean_steps is not None and not mean_steps > 0):
        raise ConfigError("random failures need a count of 0 or more, or mean_steps above 0")
    if not (shape > 0 and math.isfinite(shape)):
        raise ConfigError(f"the shape of a gamma distribution is above 0, not {shape:g}")
    random = np.random.default_rng(seed)
    if count is not None:
        at = np.sort(random.integers(1, steps + 1, count)).tolist()
    else:
        assert mean_steps is not None
        at, time = [], 0.0
        while True:
            time += random.gamma(shape, mean_steps / shape)
            if time >= steps:
                break
            at.append(math.floor(time) + 1)
    return tuple(
        Failure(
            shards=tuple(random.choice(shards, together, replace=False).tolist()),
            step=step,
            when="push" if random.random() < 0.5 else "pull",
        )
        for step in at
    )
