"""How the times between failures are spread around their mean: what an estimate needs of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from emberkeep._types import F64
from emberkeep.errors import ConfigError

Kind = Literal["exponential", "gamma", "weibull", "log-normal", "recorded"]

_LONGEST = 200.0  # mean gaps that the tail is followed for
_POINTS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The shape of the gaps between failures; their mean is the MTBF of the job.

    `shape` is that of the gamma or Weibull distribution, of a log-normal one the deviation of the
    logarithm; 1 or less means bursts. `recorded` are gaps as they were observed, in any unit.
    """

    kind: Kind = "exponential"
    shape: float = 1.0
    recorded: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"gaps are {', '.join(get_args(Kind))}, not {self.kind!r}")
        if not (math.isfinite(self.shape) and self.shape > 0):
            raise ConfigError(f"the shape of gaps must be above 0, not {self.shape:g}")
        if (self.kind == "recorded") != bool(self.recorded):
            raise ConfigError("recorded gaps are for kind='recorded', which needs them")
        if self.recorded and min(self.recorded) <= 0:
            raise ConfigError("recorded gaps must be longer than no time")

    def survival(self, means: F64) -> F64:
        """The chance that a gap is longer than so many mean gaps."""
        x = np.maximum(np.asarray(means, np.float64), 0.0)
        if self.kind == "weibull":
            scale = 1 / math.gamma(1 + 1 / self.shape)
            found: F64 = np.exp(-((x / scale) ** self.shape))
        elif self.kind == "gamma":
            from scipy.special import gammaincc

            found = gammaincc(self.shape, x * self.shape)
        elif self.kind == "log-normal":
            from scipy.special import ndtr

            with np.errstate(divide="ignore"):
                found = ndtr(-(np.log(x) + self.shape**2 / 2) / self.shape)
        elif self.kind == "recorded":
            gaps = np.sort(np.asarray(self.recorded) / np.mean(self.recorded))
            found = 1.0 - np.searchsorted(gaps, x, side="right") / gaps.size
        else:
            found = np.exp(-x)
        return found

    def tail(self, means: F64) -> F64:
        """The mean time by which a gap is longer than so many mean gaps, in mean gaps: also the
        chance that a job which starts at any moment runs so long without a failure."""
        if self.kind == "exponential":
            return np.exp(-np.maximum(np.asarray(means, np.float64), 0.0))
        x, tail = _tail(self)
        found: F64 = np.interp(means, x, tail)
        return found


@lru_cache(maxsize=64)
def _tail(gaps: Gaps) -> tuple[F64, F64]:
    """∫ survival from x on, at points that are dense where it is steep."""
    x: F64 = np.concatenate([[0.0], np.geomspace(1e-6, _LONGEST, _POINTS)])
    survival = gaps.survival(x)
    pieces = np.diff(x) * (survival[1:] + survival[:-1]) / 2
    tail = np.concatenate([np.cumsum(pieces[::-1])[::-1], [0.0]])
    return x, tail / tail[0]  # the mean is 1 whatever the rule of integration makes of it
