"""What the next increment of a run builds on."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberkeep.repository import VersionId


@dataclass(slots=True)
class Chain:
    """The baseline that increments count from, and how large they were beside it; the prioritised
    versions since the newest whole one. `grid` says that versions are those of a grid, which the
    baseline began; `lossy` that some of their rows are not what they were."""

    baseline: VersionId | None = None
    newest: VersionId | None = None
    prioritised: list[VersionId] = field(default_factory=list)
    grid: bool = False
    sizes: list[float] = field(default_factory=list)
    nbytes: int = 0
    lossy: bool = False
