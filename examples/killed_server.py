"""Rows on servers, one of which is killed: its shard comes back alone, and training goes on."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import emberkeep as ek
from emberkeep.data import Reader, Synthetic
from emberkeep.models.dlrm import DLRMShape

CLICKS = Synthetic(samples=7_680, rows_total=5_000)
STEPS, KILLED_AFTER = 60, 37


def tell(event: str, details: dict[str, Any]) -> None:
    """What a keeper says on the way."""
    if event == "recovered":
        print(
            f"shard {details['shards'][0]} was back after {details['seconds']:.2f} s, with rows of "
            f"version {details['version']}; {details['pls']:.1%} of all updates are lost"
        )


def main(directory: Path) -> None:
    tables = [ek.Table(field, rows=rows, dim=8) for field, rows in CLICKS.rows.items()]
    bags = ek.EmbeddingBags(
        tables,
        optimizer=ek.RowWiseAdagrad(lr=0.05),
        cluster=ek.servers(shards=2),  # two processes of this machine, and a spare
    )
    model = ek.DLRM(bags, DLRMShape(bottom=(16, 8), top=(16, 1)))
    optimizers = [bags.optimizer, torch.optim.Adam(model.parameters(), lr=0.002)]
    with (
        Reader(CLICKS, batch_size=128) as reader,
        ek.Keeper(
            directory, model, optimizers, reader=reader, total_steps=STEPS, on_event=tell,
            strategy=ek.partial(every=10, priority=None),
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
            if keeper.steps == KILLED_AFTER:
                keeper.wait()  # the version of step 30 is there, whatever the machine's speed
                print(f"after step {keeper.steps}: kill -9 of the server with shard 1")
                os.kill(bags.cluster.launcher.pid(1), signal.SIGKILL)
        print(f"trained to step {keeper.steps}, loss {loss.item():.3f}")
        print(f"recoveries: {keeper.recoveries().partial} partial")
    bags.cluster.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
