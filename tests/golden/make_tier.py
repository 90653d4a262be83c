"""Makes the golden tiers: `python -m tests.golden.make_tier`.

Like the golden repositories, they are made once, by the release whose format they show; every later
release must bring their rows back bit for bit. Salts are random: another run makes other bytes.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

import emberkeep as ek
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.tables import Adagrad, Table, Tier
from emberkeep.tiers import durable_open
from tests.contracts.engine import grads_of, state, wanted_of

HERE = Path(__file__).parent / "tier-1"
SEGMENT_NBYTES = 8192
OPTIMIZER = Adagrad(lr=0.1)


def half(path: Path) -> LocalCluster:
    """Two shards, of which one has committed batch 3 and the other one only prepared it."""
    tier = Tier(path, memory=2 * 60 * 96)
    tables = [
        Table("fixed", rows=200, dim=6, tier=tier),
        Table("dynamic", rows=None, capacity=40, dim=6, on_full="evict_oldest", tier=tier),
    ]
    return local(shards=2, threads=1).open(tables, OPTIMIZER, seed=1)


def train(cluster: LocalCluster, seed: int) -> None:
    random = np.random.default_rng(seed)
    batch = {
        "fixed": random.choice(200, 40, replace=False).tolist(),
        "dynamic": random.choice(90, 9, replace=False).tolist(),
    }
    grads = {name: random.standard_normal((len(ids), 6)) for name, ids in batch.items()}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


class Kept:
    """A model that its tier keeps, saved at step 4."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        tables = [ek.Table("a", rows=60, dim=4, tier=ek.Tier(path, memory="1MB"))]
        self.bags = ek.EmbeddingBags(tables, optimizer=ek.Adagrad(lr=0.1), cluster=ek.local())
        self.top = nn.Linear(4, 1)
        self.model = nn.ModuleList([self.bags, self.top])
        self.optimizers = [self.bags.optimizer, torch.optim.Adam(self.top.parameters(), lr=0.01)]
        self.keeper = ek.TierKeeper(self.model, self.optimizers, every="1000 steps")

    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = (torch.arange(8) * 7 + self.keeper.steps * 5) % 60
            self.top(self.bags({"a": ids.reshape(4, 2)})).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.keeper.step()

    def digest(self) -> str:
        weights = b"".join(p.detach().numpy().tobytes() for p in self.top.parameters())
        return xxhash.xxh3_128_hexdigest(digest(self.bags.cluster).encode() + weights)


def digest(cluster: Any) -> str:
    held = {
        table: {plane: xxhash.xxh3_128_hexdigest(values) for plane, values in planes.items()}
        for table, planes in state(cluster).items()
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(held, sort_keys=True).encode())


def make() -> None:
    durable_open.SEGMENT_NBYTES = SEGMENT_NBYTES
    expected = {}
    with tempfile.TemporaryDirectory() as top:
        path = Path(top) / "half"
        cluster = half(path)
        for batch in (1, 2, 3):
            for seed in range(6):
                train(cluster, 10 * batch + seed)
            if batch == 2:
                cluster.delete("fixed", np.arange(0, 200, 3))
            expected["half"] = digest(cluster)
            for future in cluster.prepare_tiers(batch):
                future.result(60)
            if batch < 3:
                cluster.commit_tiers()
        (slab,) = cluster.shards[1].tiers()
        slab.commit(slab.log.prepared.nonce)
        for shard in cluster.shards:
            shard.kill()
        _keep(path)
        path = Path(top) / "kept"
        kept = Kept(path)
        kept.train(4)
        kept.keeper.checkpoint()
        kept.keeper.wait()
        expected["kept"] = kept.digest()
        kept.bags.cluster.close()
        _keep(path)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def _keep(path: Path) -> None:
    for file in sorted(path.rglob("*")):
        if file.is_file():
            copy = HERE / path.name / f"{file.relative_to(path)}.gz"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(gzip.compress(file.read_bytes(), mtime=0))


def unpack(name: str, path: Path) -> None:
    """The golden tier of that name, as files below `path`."""
    for file in sorted((HERE / name).rglob("*.gz")):
        target = path / file.relative_to(HERE / name).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.decompress(file.read_bytes()))


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    make()
