"""The scalars through which torch sees the rows of one module.

*Handles* are the parameters of the module's own optimizer, one for each of its groups: the gradient
of a handle is the norm of the gradients of the group's rows. The *stand-in* is what the rows are
among `module.parameters()`: its gradient is the norm over all rows. Neither value means anything.
Whatever scales these gradients before a step (`GradScaler.unscale_`, `clip_grad_norm_`) scales the
gradients of the rows with them, and `requires_grad` of the stand-in says whether rows are trained.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

# Steps of other optimizers, while gradients of rows wait, after which nobody is going to apply
# them: one that was given the stand-in counts twice, because it was meant to train the rows.
_FOREIGN_STEPS = 2
# Gradients that another optimizer used and the rows' own did not, dropped so often in a row. A
# GradScaler drops some now and then.
_DROPPED = 3


class RowHandles:
    """Handles and stand-in of one module, their norms, and what others have done to them."""

    def __init__(self, groups: int, owner: nn.Module, *, copied: bool) -> None:
        # Any value that nobody would write. That of a copy is another, so that an average of the
        # two differs from both; those of the ranks of a job are the same, as DDP makes them.
        self.stand_in = nn.Parameter(torch.tensor(-0.375 if copied else 0.375, device="cpu"))
        self.handles = [nn.Parameter(torch.zeros((), device="cpu")) for _ in range(groups)]
        self._norms = [0.0] * groups
        self._total = 0.0
        self._foreign = self._dropped = 0
        self._warned: set[str] = set()
        self._owner = weakref.ref(owner)
        # Weakly: torch holds hooks where Python's collector does not look, and the tables would
        # never be freed.
        itself = weakref.ref(self)
        for index, handle in enumerate(self.handles):

            def hook(handle: Tensor, index: int = index) -> None:
                if (own := itself()) is not None:
                    own._show_norm(handle, index)

            handle.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._waits = self._shown = self._unseen = False
        self._squares: Callable[[], Sequence[float]] = list
        self.seal()
        _listen(self)

    def follow(self, squares: Callable[[], Sequence[float]]) -> None:
        """`squares` are the square norms of the waiting gradients, by group."""
        self._squares = squares

    def _show_norm(self, handle: Tensor, index: int) -> None:
        """After a backward pass: gradients are the norms of the rows' gradients."""
        squares = self._squares()
        self._norms[index] = _norm(squares[index])
        assert handle.grad is not None
        handle.grad.fill_(self._norms[index])
        self._total, self._shown = _norm(sum(squares)), True
        if self.stand_in.requires_grad:
            self.stand_in.grad = torch.full_like(self.stand_in, self._total)

    def factors(self) -> list[float]:
        """By how much others scaled the gradients of each group since the last backward pass."""
        shared = _scaled(self.stand_in.grad, self._total)
        factors = []
        for handle, norm in zip(self.handles, self._norms, strict=True):
            own = _scaled(handle.grad, norm)
            if own != 1.0 and shared != 1.0:
                if own == shared and math.frexp(own)[0] != 0.5:
                    self._warn(
                        "clip",
                        "gradients of rows were scaled twice by one factor: clip_grad_norm_ over "
                        "model.parameters() counts the rows already; leave the parameters of the "
                        "rows' optimizer out of it",
                    )
                # A GradScaler unscales both; what is clipped besides is the smaller.
                factors.append(min(own, shared))
            else:
                factors.append(shared if own == 1.0 else own)
        return factors

    def applied(self) -> None:
        """The factors are part of the waiting gradients now."""
        self._norms, self._total = [0.0] * len(self.handles), 0.0

    # -- gradients that nobody applies -----------------------------------------------------------

    @property
    def zeroed(self) -> bool:
        """Whether somebody has zeroed the gradients of all parameters, and no optimizer has stepped
        since they came: then they are not wanted."""
        return self._shown and self.stand_in.grad is None and not self._foreign

    def arrived(self, *, again: bool) -> None:
        """Gradients have come; `again` if others of a pass before are still waiting."""
        if again and self._foreign >= _FOREIGN_STEPS:
            self._warn_untrained()
        self._waits, self._shown, self._unseen = True, False, False

    def looked_up(self, *, graph: bool) -> None:
        """Rows were looked up and will get no gradient; with a `graph` others would."""
        self._unseen |= graph

    def idle_step(self) -> None:
        """A step has found no gradient: warns if rows were looked up after eval() alone."""
        if self._unseen:
            self._warn(
                "eval",
                "a step found no gradients, because rows were looked up in evaluation mode: after "
                "eval() rows do not train, unlike torch's; call train() first, or look up under "
                "no_grad if they are not meant to",
            )
        self._unseen = False

    def dropped(self, *, trained: bool) -> None:
        """No gradient waits any more: `trained` if a step has applied them."""
        if trained:
            self._dropped = 0
        elif self._waits and self._foreign >= _FOREIGN_STEPS:
            self._dropped += 1
            if self._dropped >= _DROPPED:
                self._warn_untrained()
        self._waits, self._shown, self._foreign = False, False, 0
        for handle in self.handles:
            handle.grad = None
        self.stand_in.grad = None
        self.applied()

    def heard_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer has stepped."""
        if any(p is self.handles[0] for p in optimizer.param_groups[0]["params"]):
            return
        holds = any(p is self.stand_in for group in optimizer.param_groups for p in group["params"])
        if holds:
            self.seal()
        if self._waits:
            self._foreign += 2 if holds else 1

    def _warn_untrained(self) -> None:
        self._warn(
            "untrained",
            "rows got gradients and no step, while another optimizer stepped: they do not train. "
            "Rows have an optimizer of their own: call `.optimizer.step()` of this module beside "
            "the other one (requires_grad_(False) if rows are meant to stay as they are)",
        )

    # -- writes past every optimizer -------------------------------------------------------------

    def seal(self) -> None:
        """From here on a change of the stand-in is one that was meant for the rows."""
        self._value = self._read()

    def check(self) -> None:
        """Warns if the stand-in was written by something else than an optimizer."""
        before, now = self._value, self._read()
        if now == before or (now != now and before != before):  # NaN is as it was, too
            return
        self.seal()
        self._warn(
            "written",
            "something wrote to the parameters in place (nn.init, an average of models, .data), "
            "which changes no row: use init= of the Table, emberkeep.nn.AveragedModel, or install "
            "rows by load_state_dict",
        )

    def _read(self) -> float | None:
        # What is on a device would have to be waited for in every forward pass.
        return float(self.stand_in.detach()) if self.stand_in.device.type == "cpu" else None

    def _warn(self, what: str, text: str) -> None:
        if what in self._warned:
            return
        self._warned.add(what)
        owner = self._owner()
        tables = getattr(owner, "tables", ())
        names = ", ".join(repr(table.name) for table in tables[:3])
        more = f" and {len(tables) - 3} more" if len(tables) > 3 else ""
        warnings.warn(f"{type(owner).__name__} of {names}{more}: {text}", stacklevel=3)


def _norm(square: float) -> float:
    return float(np.float32(math.sqrt(square)))


def _scaled(gradient: Tensor | None, norm: float) -> float:
    if gradient is None or norm == 0.0 or not math.isfinite(norm):
        return 1.0
    now = float(gradient)
    return 1.0 if now == norm else now / norm


_listening: weakref.WeakSet[RowHandles] = weakref.WeakSet()
_hooked: list[Any] = []


def _listen(handles: RowHandles) -> None:
    """Torch tells of every optimizer's step; it is asked to once there are rows."""
    if not _hooked:
        _hooked.append(register_optimizer_step_post_hook(_stepped))
    _listening.add(handles)


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for handles in list(_listening):
        handles.heard_step(optimizer)
