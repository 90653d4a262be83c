"""What happened in a run, step by step, for the report afterwards."""

from __future__ import annotations

from typing import Any

from emberkeep.train.hooks import Hook, Step
from emberkeep.train.result import Result


class Recording(Hook):
    """Losses, versions and recoveries of one run. Steps that are taken again replace the first."""

    result: Result

    def __init__(self, name: str) -> None:
        self.name = name
        self.losses: dict[int, float] = {}
        self.saves: list[dict[str, Any]] = []
        self.recoveries: list[dict[str, Any]] = []

    def on_step(self, step: Step) -> None:
        if step.phase == "embeddings":
            self.losses[step.number] = step.loss

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        if event == "saved":
            self.saves.append(details)
        elif event == "recovered":
            self.recoveries.append(details)

    def on_end(self, result: Result) -> None:
        self.result = result
