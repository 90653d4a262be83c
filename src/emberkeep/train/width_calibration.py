"""Widths of tables for a run from its settings: measured on samples that come next.

These have not been trained on yet, so that the loss is an honest one, and no held-out sample is
spent. Everything is taken back afterwards, and the run trains on them as if nothing had happened.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from emberkeep.data import Batch, Reader, Window
from emberkeep.errors import ConfigError
from emberkeep.keeper import Keeper
from emberkeep.keeper.calibration import calibrate, is_calibrated
from emberkeep.train.checkpoint_settings import CheckpointSettings

# What an optimizer remembers shows after a few steps.
_TRIAL_STEPS = 8

Loss = Callable[[Batch], torch.Tensor]


def check_calibration(given: CheckpointSettings, total: int) -> None:
    """Refuses what would find out at the end of a run of `total` steps, or never, that no samples
    are left to measure on."""
    at = _due_after(given, total)
    if given.accuracy_budget is not None and at + _TRIAL_STEPS >= total:
        raise ConfigError(
            f"widths would be calibrated after step {at} on samples that come then, and the run "
            f"has {total} steps, of which {_TRIAL_STEPS + 1} are needed: set "
            "checkpoint.calibrate_at to an earlier step, or checkpoint.bits instead of "
            "accuracy_budget"
        )


def _due_after(given: CheckpointSettings, total: int) -> int:
    return given.calibrate_at or max(1, total // 10)


def calibrate_when_due(
    keeper: Keeper, given: CheckpointSettings, *, step: int, total: int, samples: Window,
    place: int, batch_size: int, loss_of: Loss, optimizers: Sequence[torch.optim.Optimizer],
) -> None:  # fmt: skip
    """Once, after the step that the settings name, or as soon as a run is beyond it. `place` is
    the next sample of `samples`."""
    due = step >= _due_after(given, total)
    if given.accuracy_budget is None or not due or is_calibrated(keeper):
        return
    if step + _TRIAL_STEPS >= total:  # the run so far had no budget, or another
        warnings.warn(
            "widths for this accuracy_budget would be measured on samples that come next, and too "
            "few are left of them: versions stay exact",
            stacklevel=2,
        )
        return
    steps = max(1, given.calibration_samples // batch_size)
    ahead = Window(source=samples, start=place)
    with Reader(ahead, batch_size=batch_size) as reader:
        batches = list(islice(reader, _TRIAL_STEPS + steps))
    trained, judged = batches[:_TRIAL_STEPS], batches[_TRIAL_STEPS:]

    def validate() -> float:
        with torch.no_grad():
            losses = [loss_of(batch).item() * len(batch) for batch in judged]
        return sum(losses) / sum(map(len, judged))

    def trial() -> None:
        for batch in trained:
            loss_of(batch).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    calibrate(keeper, validate, trial=trial)
