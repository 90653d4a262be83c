"""A table larger than the memory it gets: rows in files, the hot ones in memory, kept in place."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

import emberkeep as ek

ROWS, DIM, BATCH = 200_000, 32, 512


class Clicks:
    """Half of the lookups go to 2,000 items, the others anywhere."""

    def __init__(self, batches: int) -> None:
        self.batches, self.place = batches, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.place < self.batches:
            random = np.random.default_rng(self.place)
            hot, cold = random.integers(0, 2_000, BATCH), random.integers(0, ROWS, BATCH)
            ids = np.where(random.random(BATCH) < 0.5, hot, cold)
            self.place += 1
            yield torch.from_numpy(ids), torch.from_numpy((ids % 2).astype(np.float32))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def train(directory: Path, batches: int) -> None:
    tier = ek.Tier(directory, memory="1MB")  # room for 7,000 rows
    bags = ek.EmbeddingBags(
        [ek.Table("item", rows=ROWS, dim=DIM, tier=tier)], optimizer=ek.RowWiseAdagrad(lr=0.1)
    )
    model = nn.Sequential(bags, nn.Flatten(), nn.Linear(DIM, 1), nn.Flatten(0))
    optimizers = [bags.optimizer, torch.optim.SGD(model[2].parameters(), lr=0.1)]
    clicks = Clicks(batches)
    # No repository: the run is kept in the files that the rows live in anyway.
    with ek.Keeper(
        None, model, optimizers, reader=clicks, strategy=ek.incremental(every=20)
    ) as keeper:
        durable = keeper.resume()
        print(f"starts after step {0 if durable is None else durable.step}")
        for ids, labels in clicks:
            loss = nn.functional.binary_cross_entropy_with_logits(model({"item": ids}), labels)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            keeper.step()
    (status,) = bags.cluster.tier_status()
    trained = bags.cluster.touched_ids("item").size
    size = sum(file.stat().st_size for file in directory.glob("*.tier"))
    print(f"ends after step {keeper.steps}, loss {loss.item():.3f}")
    print(f"{trained:,} rows trained, {size / 1e6:.0f} MB in the file, 1 MB in memory")
    print(f"{status.reads:,} rows were read from the file, {status.appended:,} written to it")
    bags.cluster.close()


def main(directory: Path) -> None:
    train(directory, batches=60)
    train(directory, batches=90)  # another life: opens the files and goes on


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
