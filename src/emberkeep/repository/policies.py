"""What the next version holds: pure decisions from the history of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from emberkeep.errors import ConfigError

Layout = Literal["full", "one_shot", "intermittent", "consecutive", "grid"]
LAYOUTS: tuple[Layout, ...] = ("full", "one_shot", "intermittent", "consecutive", "grid")
Predictor = Literal["growth", "paper"]

# Up to how many restores each bit-width keeps the loss of accuracy negligible (Check-N-Run, 6.2).
RESTORES_OF_BITS = ((1, 2), (3, 3), (20, 4))


# So many increments may follow a baseline: manifests list their sizes, and each consecutive one
# needs all before it.
_MOST_INCREMENTS: dict[Layout, int] = {"intermittent": 1000, "consecutive": 100}
ENDLESS: tuple[Layout, ...] = ("one_shot", "grid")
"""Any number of increments may follow a baseline, and no sizes of them are listed."""


def needs_baseline(layout: Layout, sizes: Sequence[float], predictor: Predictor = "growth") -> bool:
    """Whether the next version is a new baseline.

    `sizes` are the increments since the baseline, oldest first, each as a fraction of the
    baseline. A consecutive layout starts over when they are together as large as the baseline: a
    restore reads at most about twice what a baseline takes, and versions that retention lets go
    are not needed for ever. An intermittent layout starts over when what a fresh start costs by
    the same point next time, 1 + ΣS, is no more than going on, (i + 1)·S. The "paper" takes the
    last increment for S, and so waits longer than pays. Increments grow: "growth" expects the next
    to be larger by as much as the last one was. Either starts over after so many increments that
    manifests stay small.
    """
    if layout == "full":
        return True
    if layout in ENDLESS or not sizes:
        return False
    if len(sizes) >= _MOST_INCREMENTS[layout]:
        return True
    if layout == "consecutive":
        return sum(sizes) >= 1.0
    growth = sizes[-1] - sizes[-2] if len(sizes) > 1 and predictor == "growth" else 0.0
    expected = sizes[-1] + max(growth, 0.0)
    return 1.0 + sum(sizes) <= (len(sizes) + 1) * expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How a grid is kept.

    - `ratio` (the paper's R): rows are moved when so many of those in living pieces have died. 0
      moves them at once and reads least, 1 never before all are dead and writes least.
    - `concatenate` puts the halves of a round into two files; without it each piece gets its own.
    - `most_behind`: so many versions extraction may be behind a save. Beyond, they are taken in
      without splitting anything, which the next round does (`behind="skip"`), or the save waits
      (`"wait"`).
    - A new baseline is taken when that makes saving and restoring faster together (`resets`), when
      a restore would take longer than `restore_budget`, or when the grid holds more than
      `storage_budget_nbytes`.
    """

    ratio: float = 0.15
    concatenate: bool = True
    most_behind: int = 8
    behind: str = "skip"
    resets: bool = True
    restore_budget: timedelta | None = None
    storage_budget_nbytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"ratio must be from 0 to 1, not {self.ratio}")
        if self.most_behind < 1:
            raise ConfigError(f"most_behind must be 1 or more, not {self.most_behind}")
        if self.behind not in ("wait", "skip"):
            raise ConfigError(f"behind must be 'wait' or 'skip', not {self.behind!r}")
        if self.restore_budget is not None and self.restore_budget <= timedelta(0):
            raise ConfigError(f"restore_budget must be above 0, not {self.restore_budget}")
        if self.storage_budget_nbytes is not None and self.storage_budget_nbytes < 1:
            raise ConfigError(
                f"storage_budget_nbytes must be above 0, not {self.storage_budget_nbytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCosts:
    """What is known when the next version of a grid is started; times in seconds.

    `write_base` and `write_increment`: to save it as a baseline or as an increment. `read_base`: to
    restore a new baseline; `read_more`: what a restore of the grid takes longer than that.
    """

    write_base: float
    write_increment: float
    read_base: float
    read_more: float
    grid_nbytes: int
    base_nbytes: int


def resets(rules: Grid, costs: GridCosts) -> str | None:
    """Why the next version of a grid is a new baseline, or None if it is not.

    The paper's rule assumes a failure right after the save: a baseline pays when saving it and
    restoring it are faster than saving an increment and restoring that. A budget is kept as long as
    a new baseline is within it: one that is not would be followed by another at once.
    """
    with_base = costs.write_base + costs.read_base
    with_increment = costs.write_increment + costs.read_base + costs.read_more
    if rules.resets and with_base < with_increment:
        return "faster"
    if rules.restore_budget is not None:
        budget = rules.restore_budget.total_seconds()
        if costs.read_base <= budget < costs.read_base + costs.read_more:
            return "restore_budget"
    budget_nbytes = rules.storage_budget_nbytes
    if budget_nbytes is not None and costs.base_nbytes <= budget_nbytes < costs.grid_nbytes:
        return "storage_budget"
    return None


def bits_for(expected_restores: int, restores: int) -> int:
    """The narrowest codec for a run that expects this many restores and has had so many.

    A run that was restored more often than it expected falls back to 8 bits.
    """
    if restores > expected_restores:
        return 8
    for most, bits in RESTORES_OF_BITS:
        if expected_restores <= most:
            return bits
    return 8
