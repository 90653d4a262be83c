"""The seam of the training loop: what may act at the end of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberkeep.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from torch import nn

    from emberkeep.nn.embeddings import EmbeddingBags
    from emberkeep.train.build import Inputs
    from emberkeep.train.result import Result
    from emberkeep.train.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that has ended: rows and dense parameters are updated, nothing is in flight."""

    phase: str
    """Which model is trained: "embeddings", or "baseline" for the one without them."""
    number: int
    """Counts from 1."""
    steps: int
    samples: int
    """Samples trained on so far."""
    loss: float
    cut: bool = False
    """Whether a version was cut after it, which may still be written."""
    at: float = field(default_factory=time.perf_counter)
    """When it ended, in seconds of the process that trains; only differences mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is about to be trained."""

    settings: RunConfig
    inputs: Inputs
    bags: EmbeddingBags
    network: nn.Module


class Hook:
    """Does nothing; override what is of interest. An error in a hook ends the run."""

    def on_start(self, start: Start) -> None:
        """Once, before the first step, and before anything is resumed."""

    def on_begin(self, stop: Callable[[int], object]) -> None:
        """Before the first step of a run that is kept. `stop(number)`, from any thread, has it
        stop after a step as the signal of that number does."""

    def on_step(self, step: Step) -> None:
        """After every step, in the order of the hooks, before the next batch is taken."""

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        """What the keeper tells, "started_over", and "finished" where there is nothing left to
        train; may come from the thread that saves."""

    def on_trained(self) -> None:
        """After the last step, when everything is saved; evaluation follows."""

    def on_end(self, result: Result) -> None:
        """After evaluation."""

    def close(self) -> None:
        """Always, whether the run succeeded or not."""


class TensorBoard(Hook):
    """Writes loss by samples, and the final metrics, as TensorBoard events."""

    def __init__(self, directory: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoard is not installed: run pip install 'emberkeep[tensorboard]'"
            ) from None
        if Path(directory).is_file():
            raise ConfigError(
                f"{directory} is a file; TensorBoard needs a directory for its events"
            )
        try:
            self._writer = SummaryWriter(str(directory))
        except OSError as error:
            raise StorageError(
                f"TensorBoard cannot write to {directory}: {error.strerror or error}; name another "
                "directory"
            ) from error

    def on_step(self, step: Step) -> None:
        self._writer.add_scalar(f"loss/{step.phase}", step.loss, step.samples)

    def on_end(self, result: Result) -> None:
        for name, value in (("auc", result.auc), ("log_loss", result.log_loss)):
            self._writer.add_scalar(f"test/{name}", value, result.samples)

    def close(self) -> None:
        self._writer.close()
