"""Emberkeep's tables: ids of 64 bits, a table that two features share, a version in 4 bits."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import emberkeep as ek

TABLES = [
    ek.Table("user", rows=None, capacity=100_000, dim=16),  # any 64-bit id
    ek.Table("item", rows=200_000_000, dim=16, features=["viewed", "bought"]),
]


class Clicks:
    """Your own data. A keeper needs nothing of it but its place, to resume there."""

    def __init__(self, batches: int) -> None:
        self.batches, self.place = batches, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        while self.place < self.batches:
            random = np.random.default_rng(self.place)
            user = random.zipf(1.3, 256) * 2**40  # as sparse as hashes are
            viewed = torch.from_numpy(random.integers(0, 50_000, 256))
            lengths = random.integers(0, 5, 256)  # some bought nothing, some four things
            offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()[:-1]]))
            bought = torch.from_numpy(random.integers(0, 50_000, lengths.sum()))
            labels = torch.from_numpy((user % 3 == 0).astype(np.float32))
            self.place += 1
            features = {
                "user": torch.from_numpy(user), "viewed": viewed, "bought": (bought, offsets)
            }  # fmt: skip
            yield features, labels

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def main(directory: Path) -> None:
    bags = ek.EmbeddingBags(TABLES, optimizer=ek.RowWiseAdagrad(lr=0.1))
    model = nn.Sequential(bags, nn.Flatten(), nn.Linear(3 * 16, 1), nn.Flatten(0))
    optimizers = [bags.optimizer, torch.optim.Adam(model[2].parameters(), lr=0.01)]
    clicks = Clicks(batches=60)
    strategy = ek.incremental(every=25, bits=4)
    losses = []
    with ek.Keeper(directory, model, optimizers, reader=clicks, strategy=strategy) as keeper:
        keeper.resume()
        for features, labels in clicks:
            loss = nn.functional.binary_cross_entropy_with_logits(model(features), labels)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()  # bags.optimizer: the rows, each once
                optimizer.zero_grad()
            keeper.step()
            losses.append(loss.item())
    costs = keeper.costs()
    for table in TABLES:
        ids = bags.cluster.touched_ids(table.name)
        print(f"{table.name}: {ids.size:,} rows trained, of {table.slots:,}")
    print(f"loss: {np.mean(losses[:10]):.3f}, then {np.mean(losses[-10:]):.3f}")
    print(f"versions: {costs.versions}, {costs.written_nbytes / 1e6:.1f} MB written")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
