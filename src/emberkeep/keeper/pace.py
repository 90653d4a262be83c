"""When a version is due, and how many batches the reader may hand out until that is asked again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from emberkeep.errors import ConfigError
from emberkeep.keeper.ranks import Ranks
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Every


class Pace:
    """Asks the schedule as seldom as it allows; all ranks at the same steps."""

    def __init__(
        self, schedule: Every, ranks: Ranks, reader: Any, *, batches_per_step: int, clock: Clock
    ) -> None:
        if batches_per_step < 1:
            raise ConfigError(f"batches_per_step must be 1 or more, not {batches_per_step}")
        self._clock = clock
        self._schedule = schedule
        self._ranks = ranks
        self._reader = reader
        self._batches_per_step = batches_per_step
        self.restart(0)

    def restart(self, step: int) -> None:
        """The state is that of `step`, as if it had just been saved."""
        self._saved_at = self._looked_at = self._clock.monotonic()
        self._looked_step = self._next_look = step

    def saved(self) -> None:
        self._saved_at = self._clock.monotonic()

    def looks(self, step: int) -> bool:
        """Whether the schedule is asked after this step; then `look_ahead` ends the step."""
        return step >= self._next_look

    def due(self, step: int) -> bool:
        return self.looks(step) and self._schedule.due(step, self._since_saved())

    def look_ahead(self, step: int) -> None:
        """Decides when to decide next, and tells the reader: nothing is read past that point."""
        now, taken = self._clock.monotonic(), step - self._looked_step
        per_step = timedelta(seconds=(now - self._looked_at) / taken) if taken else None
        ahead = self._schedule.steps_ahead(step, self._since_saved(), per_step)
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

    def release(self) -> None:
        if hasattr(self._reader, "lend"):
            self._reader.lend(None)

    def _since_saved(self) -> timedelta:
        return timedelta(seconds=self._clock.monotonic() - self._saved_at)
