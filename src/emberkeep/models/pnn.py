"""PNN: a deep network over vectors and their products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from emberkeep.models.layers import DenseFields, Ids, Pairs, generator, network


class PNN(nn.Module):
    """Product-based network, inner products: the deep part sees all vectors and all pair products.

    Dense columns are fields, as in `DeepFM`.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        dim: int,
        features: int = 26,
        dense: int = 13,
        hidden: Sequence[int] = (400, 400, 400),
        seed: int = 0,
    ) -> None:
        super().__init__()
        random = generator(seed)
        fields = features + dense
        self.embeddings = embeddings
        self.fields = DenseFields(dense, dim, random)
        self.pairs = Pairs(fields)
        self.deep = network(fields * dim + self.pairs.width, (*hidden, 1), random)

    def forward(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        vectors = torch.cat((self.embeddings(ids), self.fields(dense_BN)), dim=1)
        signals = torch.cat((vectors.flatten(1), self.pairs(vectors)), dim=1)
        return cast(Tensor, self.deep(signals)).squeeze(1)
