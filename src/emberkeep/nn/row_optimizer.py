"""The optimizer of the rows of one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn


class TrainsRows(Protocol):
    """A module whose row gradients wait for a step."""

    def _step(self, lr: float) -> None: ...
    def _drop_gradients(self) -> None: ...


class RowOptimizer(torch.optim.Optimizer):
    """Trains the rows of one module. Its only setting that may change is `lr`.

    `step()` applies everything that was accumulated since the last step, each row once, and clears
    it; `zero_grad()` drops it.
    """

    def __init__(self, module: TrainsRows, handle: nn.Parameter, lr: float) -> None:
        self._rows = [module]  # in a list: the optimizer must not own the module's submodules
        super().__init__([handle], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._rows[0]._step(float(self.param_groups[0]["lr"]))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._rows[0]._drop_gradients()
