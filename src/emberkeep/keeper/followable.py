"""Which tables can be followed row by row: where an optimizer moves the gradient's rows alone.

An increment holds the rows that changed. That is the truth only where a row without a gradient
stays as it is, to the bit; everything else is saved whole, and a warning gives the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Plane names by the name that torch's optimizers use.
PLANES = {"sum": "accumulator", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}

_STATE_OF: dict[type[Any], tuple[str, ...]] = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: ("sum",),
    torch.optim.SparseAdam: ("exp_avg", "exp_avg_sq"),
}


def state_names(optimizer: torch.optim.Optimizer | None) -> tuple[str, ...]:
    """The row-shaped state that an optimizer keeps, as it names it."""
    return () if optimizer is None else _STATE_OF.get(type(optimizer), ())


def why_not(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, group: dict[str, Any]
) -> str | None:
    """Why the rows of a table cannot be followed; None if they can."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.device.type != "cpu":
        return f"it is on {weight.device}, and rows are copied in host memory alone"
    if weight.dtype != torch.float32 or not weight.is_contiguous():
        return f"its weight is {weight.dtype}; rows are float32 and contiguous"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm= changes rows while they are looked up"
    if optimizer is None:
        return None
    name = type(optimizer).__name__
    if type(optimizer) not in _STATE_OF:
        return f"{name} also moves rows that have no gradient, or may"
    return moves_others(name, group)


def moves_others(name: str, group: dict[str, Any]) -> str | None:
    """Why settings of an optimizer make rows without a gradient move."""
    for setting in ("momentum", "weight_decay"):
        if group.get(setting, 0) != 0:
            return f"{name} with {setting}={group[setting]} also moves rows that have no gradient"
    if group.get("maximize"):
        # Minus a zero gradient is minus zero, and adding that turns a weight of -0.0 into 0.0.
        return f"{name} with maximize=True changes the sign of zeros outside the gradient"
    if group.get("eps") == 0:
        return f"{name} with eps=0 divides zero by zero outside the gradient"
    return None


def changed_rows(gradient: Tensor) -> Tensor:
    """The rows that a step with this gradient may change; sparse ones may come twice."""
    if gradient.is_sparse:
        return gradient._indices()[0]
    # Any bit counts, so that -0.0 is not taken for nothing: it can change the sign of a zero.
    return gradient.contiguous().view(torch.int32).any(dim=1).nonzero().flatten()
