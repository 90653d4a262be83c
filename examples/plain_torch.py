"""Torch's own embeddings, kept by three lines: stopped half-way and resumed, with the same bits."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import emberkeep as ek
from emberkeep.data import Batch, Reader, Synthetic

CLICKS = Synthetic(samples=7_680, rows_total=5_000)  # 26 fields of ids, 13 numbers, a label
DIM = 8


class Model(nn.Module):
    """A table for each field, and a small network over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {field: nn.EmbeddingBag(rows, DIM) for field, rows in CLICKS.rows.items()}
        )
        width = 13 + DIM * len(self.tables)
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        vectors = [
            self.tables[field](torch.from_numpy(ids)[:, None]) for field, ids in batch.ids.items()
        ]
        return self.head(torch.cat([torch.from_numpy(batch.dense), *vectors], dim=1))[:, 0]


def train(path: Path, *, seed: int, stop_after: int | None = None) -> Model:
    """One life of a training process."""
    torch.manual_seed(seed)
    model = Model()
    optimizers = [
        torch.optim.Adagrad(model.tables.parameters(), lr=0.05),
        torch.optim.Adam(model.head.parameters(), lr=0.002),
    ]
    with Reader(CLICKS, batch_size=128) as reader:
        keeper = ek.Keeper(
            path, model, optimizers, reader=reader, strategy=ek.incremental(every=20)
        )
        version = keeper.resume()  # the newest version, or None on a fresh start
        print(f"  starts after step {0 if version is None else version.step}")
        for batch in reader:
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(batch), torch.from_numpy(batch.labels)
            )
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            keeper.step()
            if keeper.steps == stop_after:
                keeper.close(save=False)  # as if the process had been killed right here
                return model
        keeper.close()
    return model


def main(directory: Path) -> None:
    print("undisturbed:")
    expected = train(directory / "undisturbed", seed=1)
    print("stopped after step 45 of 60, then started again:")
    train(directory / "stopped", seed=1, stop_after=45)
    resumed = train(directory / "stopped", seed=2)  # other initial values: they are replaced
    bits, resumed_bits = expected.state_dict(), resumed.state_dict()
    same = all(torch.equal(bits[name], resumed_bits[name]) for name in bits)
    print(f"the same bits: {same}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
