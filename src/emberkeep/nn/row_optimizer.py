"""The optimizer of the rows of one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class TrainsRows(Protocol):
    """A module whose row gradients wait for a step."""

    def _step(self, lr_G: Sequence[float]) -> None: ...
    def _drop_gradients(self) -> None: ...


class RowOptimizer(torch.optim.Optimizer):
    """Trains the rows of one module. Its only setting that may change is `lr`.

    There is one group for all tables of one optimizer, which `group["tables"]` names. `step()`
    applies everything that was accumulated since the last step, each row once, and clears it;
    `zero_grad()` drops it.
    """

    def __init__(self, module: TrainsRows, groups: Sequence[dict[str, Any]]) -> None:
        self._rows = [module]  # in a list: the optimizer must not own the module's submodules
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._rows[0]._step([float(group["lr"]) for group in self.param_groups])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._rows[0]._drop_gradients()
