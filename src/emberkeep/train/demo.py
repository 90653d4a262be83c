"""The demonstration: one training twice, with shards that are killed half-way and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep import config
from emberkeep.train.checkpoint_settings import CheckpointSettings
from emberkeep.train.hooks import Hook
from emberkeep.train.run_config import (
    DEMO,
    ClusterSettings,
    FailureSettings,
    RunConfig,
)
from emberkeep.train.run_trace import Recording

if TYPE_CHECKING:
    from emberkeep.train.killed_shards import Loss

_REPOSITORY = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """The two runs, and what became of the shards that were killed in the second."""

    alone: Recording
    failing: Recording
    losses: tuple[Loss, ...]

    @property
    def auc_lost(self) -> float:
        return self.alone.result.auc - self.failing.result.auc


def settings(directory: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Training over 8 shards, saved into `directory`, of which two are killed."""
    failing = replace(
        DEMO,
        cluster=ClusterSettings(shards=8),
        failures=FailureSettings(at=("2, 5 at 420",)),
        checkpoint=CheckpointSettings(
            path=str(directory / _REPOSITORY), every="120 steps", recovery="partial", priority="ssu"
        ),
    )
    return config.parse(RunConfig, config.to_toml(failing), source="demo", overrides=overrides)


def demonstrate(
    given: RunConfig, *, hooks: Callable[[], Sequence[Hook]], tell: Callable[[str], object]
) -> Demonstration:
    """Trains without failures and versions, and without embeddings; then with everything."""
    from emberkeep.train.killed_shards import ShardWatch
    from emberkeep.train.loop import run

    alone, failing = Recording("without failures"), Recording("with failures")
    plain = replace(given, failures=FailureSettings(), checkpoint=CheckpointSettings())
    shards = given.cluster.shards
    tell(f"training over {shards} shards; then the same network without embeddings")
    run(plain, hooks=[alone, *hooks()])
    tell("the same again: versions are saved, and shards are killed on the way")
    with_versions = replace(given, run=replace(given.run, compare=False))
    watch = ShardWatch()
    run(with_versions, hooks=[failing, watch, *hooks()], fresh=True)
    tell("judging the killed shards: as they were, as they came back, and empty")
    return Demonstration(alone=alone, failing=failing, losses=watch.judge())
