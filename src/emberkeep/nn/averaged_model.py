"""Averages of whole models, rows included."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from emberkeep.nn.row_module import RowModule


class AveragedModel(swa_utils.AveragedModel):
    """Torch's `AveragedModel`, with the rows of emberkeep's modules averaged like parameters.

    `update_parameters(model)` reads every trained row: call it as seldom as the average allows.
    Rows that the model has deleted or evicted leave the average, too. Rows must be of this process
    and in memory, because the average holds a copy of them.
    """

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        before = int(self.n_averaged)
        super().update_parameters(model)
        current = {path: m for path, m in model.named_modules() if isinstance(m, RowModule)}
        for path, averaged in self.module.named_modules():
            if isinstance(averaged, RowModule):
                for table in averaged.tables:
                    self._average_table(averaged, current[path], table.name, before)
                averaged._handles[0].seal()

    def _average_table(
        self, averaged: RowModule, current: RowModule, table: str, before: int
    ) -> None:
        ids, planes = current.cluster.read_all(table)
        gone = torch.from_numpy(averaged.cluster.touched_ids(table))
        gone = gone[~torch.isin(gone, torch.from_numpy(ids))]
        averaged.cluster.delete(table, gone.numpy())
        if before:
            own = torch.from_numpy(averaged.cluster.read(table, ids)["weight"])
            self._average(
                own, torch.from_numpy(planes["weight"]), torch.tensor(before, device="cpu")
            )
            planes = {**planes, "weight": own.numpy()}
        averaged.cluster.install(table, ids, planes)

    def _average(self, averaged: Tensor, current: Tensor, before: Tensor) -> None:
        if self.avg_fn is not None:
            averaged.copy_(self.avg_fn(averaged, current, before))
            return
        average = self.multi_avg_fn or swa_utils.get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        average([averaged], [current], before)
