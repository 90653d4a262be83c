"""How long a cluster of servers waits for what."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from emberkeep.cluster.base import PATIENCE
from emberkeep.errors import ConfigError

# What a network carries at the least: below that it counts as one that carries nothing.
_NBYTES_PER_SECOND = 10 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a cluster waits.

    - `deadline`: for a pull, a push or a small question; more for many bytes (`moving`).
    - `lease`: how long a server answers without hearing from its coordinator, and how long one that
      does not answer is waited for where another can take its place. At least `deadline`.
    - `bulk`: for moving many rows at once.
    - `patience`: for whatever needs somebody else to act: a server that shall be started, or
      started again, a recovery that other ranks wait for, a rank whose part of a step is missing.
      After that the run ends.
    """

    deadline: timedelta = timedelta(seconds=10)
    lease: timedelta = timedelta(seconds=15)
    bulk: timedelta = timedelta(minutes=5)
    patience: timedelta = PATIENCE

    def __post_init__(self) -> None:
        for name in ("deadline", "lease", "bulk", "patience"):
            if getattr(self, name) <= timedelta(0):
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.lease < self.deadline:
            raise ConfigError(
                f"lease ({self.lease}) must not be below deadline ({self.deadline}): a server that "
                "was stopped could answer a request after it was replaced"
            )

    def moving(self, nbytes: int) -> timedelta:
        """The deadline of a request that moves so many bytes, at most `bulk`. A server that is
        replaced meanwhile looks at its lease before it answers, however long that is after it was
        asked."""
        taken = self.deadline + timedelta(seconds=nbytes / _NBYTES_PER_SECOND)
        return max(self.deadline, min(self.bulk, taken))
