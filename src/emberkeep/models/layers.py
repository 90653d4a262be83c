"""What the models are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Ids = Mapping[str, Tensor | tuple[Tensor, Tensor]]
"""Per feature one id per sample, or `(values, offsets)` as `nn.EmbeddingBag` takes them."""


class Pairs(nn.Module):
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


class DenseFields(nn.Module):
    """One vector per dense column, scaled by the column's value: `[B, N]` to `[B, N, D]`."""

    def __init__(self, columns: int, dim: int, random: torch.Generator) -> None:
        super().__init__()
        spread = 1.0 / dim**0.5
        self.vectors = nn.Parameter(
            torch.empty(columns, dim).uniform_(-spread, spread, generator=random)
        )

    def forward(self, dense_BN: Tensor) -> Tensor:
        return dense_BN.unsqueeze(2) * self.vectors


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(
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
