"""How well the cache of a tier serves: its files one by one, and all of a run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberkeep.runtime.metrics import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """One file of a tier, and the cache before it.

    `batch` is durable; `direct` says whether reads and writes pass by the page cache, `deep`
    whether many are under way from one thread. `waits` counts how often a caller had to make room
    itself, `reads` and `appended` records, `damaged` segments that hold rows and cannot be read,
    `unchecked` those that opening took from the index and nobody has read yet.
    Of `pulled` rows `missed` were not in memory; callers stood still for `wait_seconds` until rows
    were read or had made room. All of them count since the file was opened.
    """

    path: str
    batch: int | None
    direct: bool
    deep: bool
    frames: int
    waits: int
    reads: int
    appended: int
    segments: int
    damaged: int
    pulled: int
    missed: int
    wait_seconds: float
    unchecked: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of pulled rows that were in memory when they were asked for; 1.0 of none."""
        return hit_rate(self.pulled, self.missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """What the caches of all tiers of one run have done together."""

    pulled: int
    """Rows that batches have pulled, each batch's unique ones."""
    missed: int
    """Those that were read from a file, ahead of the pull or by it."""
    hit_rate: float
    """The share of pulled rows that were in memory when they were first asked for."""
    waits: int
    """How often a pull or push had to make room itself."""
    wait_seconds: float
    """How long pulls and pushes stood still until rows were read, or had made room."""

    @classmethod
    def of(cls, files: Sequence[TierStatus]) -> TierUse | None:
        """The sum over files; None if there are none."""
        if not files:
            return None
        pulled, missed = sum(file.pulled for file in files), sum(file.missed for file in files)
        return cls(
            pulled=pulled,
            missed=missed,
            hit_rate=hit_rate(pulled, missed),
            waits=sum(file.waits for file in files),
            wait_seconds=sum(file.wait_seconds for file in files),
        )

    def samples(self) -> list[Sample]:
        """The same for Prometheus, which makes rates of counters itself."""
        return [
            ("tier_pulled_rows_total", "counter", "rows that batches pulled", self.pulled),
            ("tier_missed_rows_total", "counter", "of these, read from a file", self.missed),
            ("tier_hit_rate", "gauge", "share of pulled rows that were in memory", self.hit_rate),
            ("tier_waits_total", "counter", "pulls and pushes that made room", self.waits),
            ("tier_wait_seconds_total", "counter", "pulls and pushes stood still for a tier",
             self.wait_seconds),
        ]  # fmt: skip


def hit_rate(pulled: int, missed: int) -> float:
    """Rows that were read ahead and never pulled would make it negative: it ends at 0."""
    return max(0.0, 1.0 - missed / pulled) if pulled else 1.0
