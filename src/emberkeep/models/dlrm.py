"""Click models over an embedding module: DLRM, DeepFM and PNN, and a baseline without embeddings.

Each model takes the embedding module that it looks rows up in: anything that maps ids to
`[batch, features, dim]`, `emberkeep.nn.EmbeddingBags` above all, but a plain torch module does as
well. `model(dense, ids)` returns logits `[batch]`; the sigmoid belongs to the loss.

The initial dense parameters depend on the seed alone: the global generator of torch is neither
read nor moved. Tensor names carry their axes: B batch, F features (embedded), N dense columns,
D dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from emberkeep.errors import ConfigError

Ids = Mapping[str, Tensor | tuple[Tensor, Tensor]]
"""Per feature one id per sample, or `(values, offsets)` as `nn.EmbeddingBag` takes them."""


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
        random = _generator(seed)
        vectors = features + 1
        self.embeddings = embeddings
        self.bottom = _network(dense, shape.bottom, random, activate_last=True)
        self.pairs = _Pairs(vectors)
        self.top = _network(shape.dim + self.pairs.width, shape.top, random)

    def forward(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        return self.head(dense_BN, self.embeddings(ids))

    def head(self, dense_BN: Tensor, vectors_BFD: Tensor) -> Tensor:
        """Everything but the lookup."""
        x_BD = self.bottom(dense_BN)
        pairs = self.pairs(torch.cat((x_BD.unsqueeze(1), vectors_BFD), dim=1))
        return cast(Tensor, self.top(torch.cat((x_BD, pairs), dim=1))).squeeze(1)


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
        random = _generator(seed)
        self.embeddings = embeddings
        self.fields = _DenseFields(dense, dim + 1, random)
        self.deep = _network((features + dense) * dim, (*hidden, 1), random)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        fields = torch.cat((self.embeddings(ids), self.fields(dense_BN)), dim=1)
        vectors, weights = fields[:, :, :-1], fields[:, :, -1]
        # Sum over pairs of dot products, in linear time: half of (square of sum - sum of squares).
        second = 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)
        deep = cast(Tensor, self.deep(vectors.flatten(1))).squeeze(1)
        return self.bias + weights.sum(dim=1) + second + deep


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
        random = _generator(seed)
        fields = features + dense
        self.embeddings = embeddings
        self.fields = _DenseFields(dense, dim, random)
        self.pairs = _Pairs(fields)
        self.deep = _network(fields * dim + self.pairs.width, (*hidden, 1), random)

    def forward(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        vectors = torch.cat((self.embeddings(ids), self.fields(dense_BN)), dim=1)
        signals = torch.cat((vectors.flatten(1), self.pairs(vectors)), dim=1)
        return cast(Tensor, self.deep(signals)).squeeze(1)


class DenseOnly(nn.Module):
    """What is left of a DLRM without embeddings: the yardstick for what the tables bring."""

    def __init__(self, shape: DLRMShape = KAGGLE, *, dense: int = 13, seed: int = 0) -> None:
        super().__init__()
        self.network = _network(dense, (*shape.bottom, *shape.top), _generator(seed))

    def forward(self, dense_BN: Tensor, ids: Ids) -> Tensor:
        return cast(Tensor, self.network(dense_BN)).squeeze(1)


class _Pairs(nn.Module):
    """Dot products of all pairs among V vectors: `[B, V, D]` to `[B, V·(V-1)/2]`."""

    chosen: Tensor

    def __init__(self, vectors: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        # Derived from the shape, so it is not part of the model's state.
        self.register_buffer("chosen", row * vectors + column, persistent=False)
        self.width = len(row)

    def forward(self, vectors_BVD: Tensor) -> Tensor:
        products = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        return products.flatten(1).index_select(1, self.chosen)


class _DenseFields(nn.Module):
    """One vector per dense column, scaled by the column's value: `[B, N]` to `[B, N, D]`."""

    def __init__(self, columns: int, dim: int, random: torch.Generator) -> None:
        super().__init__()
        spread = 1.0 / dim**0.5
        self.vectors = nn.Parameter(
            torch.empty(columns, dim).uniform_(-spread, spread, generator=random)
        )

    def forward(self, dense_BN: Tensor) -> Tensor:
        return dense_BN.unsqueeze(2) * self.vectors


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _network(
    width: int, layers: Sequence[int], random: torch.Generator, *, activate_last: bool = False
) -> nn.Sequential:
    """Linear layers with ReLU between them; weights are normal, scaled by fan-in and fan-out."""
    modules: list[nn.Module] = []
    for i, wide in enumerate(layers):
        # On the meta device nothing is drawn from torch's global generator.
        linear = nn.Linear(width, wide, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            linear.weight.normal_(0.0, (2.0 / (width + wide)) ** 0.5, generator=random)
            linear.bias.normal_(0.0, (1.0 / wide) ** 0.5, generator=random)
        modules.append(linear)
        if activate_last or i + 1 < len(layers):
            modules.append(nn.ReLU())
        width = wide
    return nn.Sequential(*modules)
