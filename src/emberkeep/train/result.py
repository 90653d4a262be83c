"""What a training run came to, as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from emberkeep.keeper import Costs, Recoveries
from emberkeep.tiers.tier_use import TierUse
from emberkeep.train.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to. Everything but times, memory and what checkpoints, recoveries and tiers
    cost follows from the settings, to the bit, however often the run was stopped and resumed, and
    however often shards failed if recovery is full."""

    settings: RunConfig
    samples: int
    steps: int
    seconds: float
    """Of training alone, in this process: reading, forward, backward and updates."""
    samples_per_second: float
    loss: float
    """Mean training loss over the last tenth of the steps."""
    test_samples: int
    auc: float
    log_loss: float
    baseline_auc: float | None
    """Of the network without embeddings, trained on the same samples; None if not asked for."""
    baseline_log_loss: float | None
    best_auc: float | None
    """What the true probabilities reach on the held-out samples; known for synthetic data alone."""
    rows: int
    """Rows that the tables can hold."""
    rows_trained: int
    """Rows that were updated at least once."""
    peak_memory_nbytes: int
    """The most memory that the process has taken."""
    digest: str
    """Of all trained rows with their optimizer state and of all dense parameters."""
    resumed_step: int | None = None
    """The step after which a version was resumed; None if the run began here."""
    checkpoints: Costs | None = None
    """What this process spent on versions; None if nothing was saved."""
    recoveries: Recoveries | None = None
    """What failing shards cost; None if nothing was saved."""
    tier: TierUse | None = None
    """How often rows were in memory, and how long training waited for those that were not; None
    without a tier."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: a metric that does not exist (one class only) is None, not NaN."""
        document = {**asdict(self), "settings": self.settings.to_dict()}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in document.items()
        }
