"""DeepFM: a factorization machine and a deep network over the same fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from emberkeep.models.layers import DenseFields, Ids, generator, network


class DeepFM(nn.Module):
    """First-order weights, a factorization machine and a deep network over the same fields.

    The embedding module is `dim + 1` wide: the last column is the first-order weight of the id, so
    that one lookup serves both terms. (An optimizer that keeps one value per row, such as row-wise
    Adagrad, shares it between that weight and the vector.) A dense column is a field too: its
    vector and its weight are scaled by its value.
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
        self.embeddings = embeddings
        self.fields = DenseFields(dense, dim + 1, random)
        self.deep = network((features + dense) * dim, (*hidden, 1), random)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        return self.head(dense_BN, self.embeddings(ids))

    def head(self, dense_BN: Tensor, vectors_BFD: Tensor) -> Tensor:
        """Everything but the lookup."""
        fields = torch.cat((vectors_BFD, self.fields(dense_BN)), dim=1)
        vectors, weights = fields[:, :, :-1], fields[:, :, -1]
        # Sum over pairs of dot products, in linear time: half of (square of sum - sum of squares).
        second = 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)
        deep = cast(Tensor, self.deep(vectors.flatten(1))).squeeze(1)
        return self.bias + weights.sum(dim=1) + second + deep
