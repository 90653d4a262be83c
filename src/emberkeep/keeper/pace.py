"""When a version is due, and how many batches the reader may hand out until that is asked again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from emberkeep.errors import ConfigError
from emberkeep.keeper.ranks import Ranks
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Every


class Pace:
    """Asks the schedule as seldom as it allows; all ranks at the same steps.

    `risk` tells so many steps after a whole version a failure may lose what the run may: another is
    due by then, if the last one is as old as `least` says.
    """

    def __init__(
        self, schedule: Every, ranks: Ranks, reader: Any, *, batches_per_step: int, clock: Clock,
        least: Every | None = None, risk: Callable[[], int | None] = lambda: None,
    ) -> None:  # fmt: skip
        if batches_per_step < 1:
            raise ConfigError(f"batches_per_step must be 1 or more, not {batches_per_step}")
        self._clock = clock
        self._ranks = ranks
        self._reader = reader
        self._batches_per_step = batches_per_step
        self._risk = risk
        self.follow(schedule, least)
        self.restart(0)

    def follow(self, schedule: Every, least: Every | None) -> None:
        """From here on; the version that is due next is so by the new schedule."""
        self._schedule, self._least = schedule, least

    def restart(self, step: int) -> None:
        """The state is that of `step`, as if it had just been saved."""
        self._saved_at = self._looked_at = self._clock.monotonic()
        self._saved_step = self._whole_step = self._looked_step = self._next_look = step
        self._again = self._soon = False

    def look_soon(self) -> None:
        """The schedule is asked again after the next step, whatever it says."""
        self._soon = True

    def saved(self, step: int, *, whole: bool) -> None:
        self._saved_at = self._clock.monotonic()
        self._saved_step = step
        if whole:
            self._whole_step = step
        self._again = False

    def save_again(self) -> None:
        """The last save came to nothing: the next step makes it. From any thread."""
        self._again = True

    def looks(self, step: int) -> bool:
        """Whether the schedule is asked after this step; then `look_ahead` ends the step."""
        return step >= self._next_look

    def due(self, step: int) -> bool:
        # What a recovery leaves of the bound is known after the last look: asked at every step.
        if self._again or self.at_risk(step):
            return True
        return self.looks(step) and self._schedule.due(step, self._since_saved())

    def due_whole(self, step: int) -> bool:
        """Whether a version that is due now has to be a whole one."""
        return self._schedule.due_whole(step) or self.at_risk(step)

    def at_risk(self, step: int) -> bool:
        """Whether a failure after the next step would lose too much, and the last version is old
        enough for another."""
        at = self._risky_step()
        if at is None or step < at or self._least is None:
            return False
        if self._least.steps is not None:
            return step - self._saved_step >= self._least.steps
        assert self._least.time is not None
        return self._since_saved() >= self._least.time

    def look_ahead(self, step: int) -> None:
        """Decides when to decide next, and tells the reader: nothing is read past that point."""
        now, taken = self._clock.monotonic(), step - self._looked_step
        per_step = timedelta(seconds=(now - self._looked_at) / taken) if taken else None
        ahead = self._schedule.steps_ahead(step, self._since_saved(), per_step)
        risky = self._risky_step()
        if risky is not None:
            ahead = max(1, min(ahead, risky - step))
        if self._soon:
            ahead, self._soon = 1, False
        (ahead,) = self._ranks.largest([ahead if self._ranks.leads else 0])
        self._looked_at, self._looked_step = now, step
        self._next_look = step + ahead
        if hasattr(self._reader, "lend"):
            each = self._batches_per_step
            self._reader.lend(
                ahead * each,
                f"the loop has taken {ahead * each} batches since step {step} and called "
                f"keeper.step() fewer than {ahead} times, so no further batch was handed out: call "
                "keeper.step() after every batch, also after one that you skip, or give the keeper "
                f"batches_per_step= (it is {each}) if your loop takes several for a step",
            )

    def _risky_step(self) -> int | None:
        ahead = self._risk() if self._least is not None else None
        return None if ahead is None else self._whole_step + ahead

    def release(self) -> None:
        if hasattr(self._reader, "lend"):
            self._reader.lend(None)

    def _since_saved(self) -> timedelta:
        return timedelta(seconds=self._clock.monotonic() - self._saved_at)
