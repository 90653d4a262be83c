"""The optimizer of the rows of one module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from emberkeep.errors import ConfigError


class TrainsRows(Protocol):
    """A module whose row gradients wait for a step."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

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
        self._complete = False
        super().__init__(groups, {})
        self._complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_complete", False):
            raise ConfigError(
                "the optimizer of rows trains rows alone: give other parameters to an optimizer of "
                "torch's, and a table its own by Table(optimizer=)"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self._rows, "rates": [group["lr"] for group in self.param_groups]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy trains the copy of the module, which brings groups of its own."""
        if "rows" not in state:
            super().__setstate__(state)
            return
        (module,) = state["rows"]
        groups = [dict(group) for group in module.optimizer.param_groups]
        for group, lr in zip(groups, state["rates"], strict=True):
            group["lr"] = lr
        self.__init__(module, groups)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the settings of each group, which is found by its tables, not by its place."""
        own = [group["tables"] for group in self.param_groups]
        groups = state_dict["param_groups"]
        if len(own) > 1 or len(groups) > 1:
            saved = {tuple(group.get("tables", ())): group for group in groups}
            if sorted(saved) != sorted(map(tuple, own)):
                raise ConfigError(
                    f"the state has groups of tables {[list(tables) for tables in saved]}, this "
                    f"optimizer has {own}: set each group's lr by hand"
                )
            groups = [saved[tuple(tables)] for tables in own]
        named = [
            {**group, "tables": tables, "params": [i]}
            for i, (group, tables) in enumerate(zip(groups, own, strict=True))
        ]
        super().load_state_dict({**state_dict, "param_groups": named})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = [float(group["lr"]) for group in self.param_groups]
        for rate, group in zip(rates, self.param_groups, strict=True):
            if not math.isfinite(rate):
                raise ConfigError(
                    f"lr of tables {', '.join(group['tables'])} is {rate}, which would make every "
                    "row it trains useless; no row was changed"
                )
        self._rows[0]._step(rates)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._rows[0]._drop_gradients()
