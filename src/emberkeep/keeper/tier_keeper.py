"""`TierKeeper`: a keeper of a run that its tier holds, under the name that it has had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from torch import nn

from emberkeep._types import Json
from emberkeep.keeper.dense import Stateful
from emberkeep.keeper.keeper import Keeper
from emberkeep.keeper.model_parts import Optimizers
from emberkeep.strategies import Interval, incremental, partial


class TierKeeper(Keeper):
    """`ek.Keeper(None, ...)`: keeps a model whose tables all have a tier.

    With `total_steps`, how long the job is, shards that are lost come back from their own files
    while a pull or push waits, as with `strategy=ek.partial(every=..., priority=None)`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        reader: Any = None,
        every: Interval = "20min",
        state: Mapping[str, Stateful] | None = None,
        on_event: Callable[[str, Json], object] | None = None,
        total_steps: int | None = None,
        **options: Any,
    ) -> None:
        strategy = incremental(every=every)
        if total_steps is not None:
            strategy = partial(every=every, priority=None)
        super().__init__(
            None, model, optimizer, reader=reader, strategy=strategy, state=state,
            on_event=on_event, total_steps=total_steps, **options,
        )  # fmt: skip

    def checkpoint(self) -> Future[int]:
        """Declares this step one to come back to. Returns at once; done when it is durable."""
        cut = self.save()
        assert cut is not None
        return cut.committed
