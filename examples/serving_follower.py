"""A follower serves the newest version while training goes on: whole versions, without waiting."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import emberkeep as ek
from emberkeep.data import Reader, Synthetic
from emberkeep.models.dlrm import DLRMShape

CLICKS = Synthetic(samples=7_680, rows_total=5_000)
FIELD = "C3"


def main(directory: Path) -> None:
    tables = [ek.Table(field, rows=rows, dim=8) for field, rows in CLICKS.rows.items()]
    bags = ek.EmbeddingBags(tables, optimizer=ek.RowWiseAdagrad(lr=0.05))
    model = ek.DLRM(bags, DLRMShape(bottom=(16, 8), top=(16, 1)))
    optimizers = [bags.optimizer, torch.optim.Adam(model.parameters(), lr=0.002)]

    # Usually another process, on another machine: it reads from storage alone.
    follower: ek.Follower | None = None
    looked_up = np.arange(5)

    with (
        Reader(CLICKS, batch_size=128) as reader,
        ek.Keeper(
            directory, model, optimizers, reader=reader,
            strategy=ek.incremental(every=15, layout="consecutive"),
        ) as keeper,
    ):  # fmt: skip
        keeper.resume()
        for batch in reader:
            ids = {field: torch.from_numpy(values) for field, values in batch.ids.items()}
            logits = model(torch.from_numpy(batch.dense), ids)
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, torch.from_numpy(batch.labels)
            )
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            keeper.step()
            if keeper.steps % 15 == 0:
                keeper.wait()  # for the example: the version of this step is committed
                follower = follower or ek.Follower(directory)
                version = follower.refresh()  # reads what is new; None if nothing is
                view = follower.view()  # several lookups of one version
                weights = view.lookup(FIELD, looked_up)
                present = bags.cluster.read(FIELD, looked_up)["weight"]
                print(
                    f"step {keeper.steps}: version {version} of step {view.manifest.step}, "
                    f"the trainer's bits: {np.array_equal(weights, present)}"
                )
    assert follower is not None
    print(f"dense parameters served: {len(follower.dense())}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
