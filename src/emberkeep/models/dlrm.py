"""DLRM, and the shapes of it that papers use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from emberkeep.errors import ConfigError
from emberkeep.models.layers import Ids, Pairs, generator, network


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMShape:
    """The layer widths of a DLRM; the last width of `bottom` is the dim of the embeddings."""

    bottom: tuple[int, ...]
    top: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.bottom or not self.top or min(self.bottom + self.top) < 1:
            raise ConfigError(
                f"bottom and top need layer widths of 1 or more, not {self.bottom} and {self.top}"
            )
        if self.top[-1] != 1:
            raise ConfigError(f"the top ends in one logit: its last width is 1, not {self.top[-1]}")

    @property
    def dim(self) -> int:
        return self.bottom[-1]


# The shapes of the CPR paper. Its top networks take 27 × dim inputs (432 and 1728), which is what
# plain concatenation of the 27 vectors gives; the dot interaction gives dim + 27·26/2, so here the
# first layer of the top takes 367 and 415.
KAGGLE = DLRMShape(bottom=(512, 256, 64, 16), top=(512, 256, 1))
TERABYTE = DLRMShape(bottom=(512, 256, 64), top=(512, 512, 256, 1))


class DLRM(nn.Module):
    """Bottom network over dense columns, dot products of all pairs of vectors, top network.

    The pairs are those of the strict lower triangle: the F embedded features and the output of the
    bottom network, each with each, none with itself.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        shape: DLRMShape = KAGGLE,
        *,
        features: int = 26,
        dense: int = 13,
        seed: int = 0,
    ) -> None:
        super().__init__()
        random = generator(seed)
        vectors = features + 1
        self.embeddings = embeddings
        self.bottom = network(dense, shape.bottom, random, activate_last=True)
        self.pairs = Pairs(vectors)
        self.top = network(shape.dim + self.pairs.width, shape.top, random)

    def forward(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        return self.head(dense_BN, self.embeddings(ids))

    def head(self, dense_BN: Tensor, vectors_BFD: Tensor) -> Tensor:
        """Everything but the lookup."""
        x_BD = self.bottom(dense_BN)
        pairs = self.pairs(torch.cat((x_BD.unsqueeze(1), vectors_BFD), dim=1))
        return cast(Tensor, self.top(torch.cat((x_BD, pairs), dim=1))).squeeze(1)
