"""Modules in loader workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import emberkeep as ek


def _rows_in_worker(index: int) -> Tensor:
    module = _SHARED["module"]
    return module({"t": torch.tensor([index, index + 1])}).detach()[:, 0]


_SHARED: dict[str, Any] = {}


class InWorkers(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return _rows_in_worker(index)


def test_kernels_run_inside_forked_data_loader_workers() -> None:
    module = ek.EmbeddingBags([ek.Table("t", rows=30, dim=4)], optimizer=ek.SGD(lr=0.1))
    module({"t": torch.arange(30)}).sum().backward()
    module.optimizer.step()
    _SHARED["module"] = module
    loader = torch.utils.data.DataLoader(
        InWorkers(), batch_size=5, num_workers=2, multiprocessing_context="fork"
    )
    weights = module.rows("t", torch.arange(30))["weight"]
    seen = torch.cat(list(loader))
    for index in range(20):
        assert torch.equal(seen[index], weights[index : index + 2])
