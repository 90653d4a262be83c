"""A model without embeddings."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from emberkeep.models.dlrm import KAGGLE, DLRMShape
from emberkeep.models.layers import Ids, generator, network


class DenseOnly(nn.Module):
    """What is left of a DLRM without embeddings: the yardstick for what the tables bring."""

    def __init__(self, shape: DLRMShape = KAGGLE, *, dense: int = 13, seed: int = 0) -> None:
        super().__init__()
        self.network = network(dense, (*shape.bottom, *shape.top), generator(seed))

    def forward(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        return cast(Tensor, self.network(dense_BN)).squeeze(1)
