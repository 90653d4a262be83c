"""Every pair of choices in one run each: kill, resume, and the same bits where they are promised.

A covering array: whatever two values of two different choices, some case has both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from tests.contracts.engine import state
from tests.servers import Farm, OnFarm

CHOICES: dict[str, list[Any]] = {
    "kind": ["fixed", "dynamic", "evicting"],
    "layout": ["full", "one_shot", "intermittent", "consecutive", "grid"],
    "bits": [None, 8],
    "parity": [None, (3, 1), (2, 2)],
    "shards": [1, 4],
    "cluster": ["local", "servers"],
    "optimizer": [
        ek.SGD(lr=0.1),
        ek.Momentum(lr=0.1),
        ek.Adagrad(lr=0.1),
        ek.RowWiseAdagrad(lr=0.1),
        ek.Adam(lr=0.1),
    ],
}
TABLE = {
    "fixed": ek.Table("t", rows=80, dim=4),
    "dynamic": ek.Table("t", rows=None, capacity=120, dim=4),
    "evicting": ek.Table("t", rows=None, capacity=40, dim=4, on_full="evict_oldest"),
}
Case = tuple[Any, ...]


def possible(case: Case) -> bool:
    chosen = dict(zip(CHOICES, case, strict=True))
    return chosen["parity"] is None or chosen["shards"] >= sum(chosen["parity"])


def pairs_of(case: Case) -> set[tuple[int, int, int, int]]:
    at = [CHOICES[name].index(value) for name, value in zip(CHOICES, case, strict=True)]
    return {(i, at[i], j, at[j]) for i, j in combinations(range(len(at)), 2)}


def covering() -> list[Case]:
    """Cases, each the one that covers most pairs not covered yet."""
    every = [(c, pairs_of(c)) for c in product(*CHOICES.values()) if possible(c)]
    missing = set().union(*(pairs for _, pairs in every))
    chosen = []
    while missing:
        best, pairs = max(every, key=lambda case: len(case[1] & missing))
        missing -= pairs
        chosen.append(best)
    return chosen


@pytest.fixture(scope="module")
def servers(farm: Farm) -> Iterator[dict[int, list[OnFarm]]]:
    """Two clusters of each size: one for the process that ends, one for the next."""
    opened = {shards: [OnFarm(farm, shards) for _ in range(2)] for shards in CHOICES["shards"]}
    yield opened
    for cluster in chain(*opened.values()):
        cluster.hosts.end()


def kill(bags: ek.EmbeddingBags, shards: list[int]) -> None:
    for shard in shards:
        if isinstance(bags.cluster, FlightCluster):
            bags.cluster.launcher.kill(shard)  # type: ignore[attr-defined]
        else:
            bags.cluster.kill(shard)


def build(case: dict[str, Any], on: OnFarm | None = None) -> tuple[ek.EmbeddingBags, Any]:
    bags = ek.EmbeddingBags(
        [TABLE[case["kind"]]],
        optimizer=case["optimizer"],
        cluster=on or ek.local(shards=case["shards"]),
    )
    if case["layout"] == "grid":
        strategy: Any = ek.all_versions(every=3, bits=case["bits"])
    else:
        strategy = ek.incremental(every=3, layout=case["layout"], bits=case["bits"])
    if case["parity"] is not None:
        k, r = case["parity"]
        bags.cluster.protect(ek.Parity(k=k, r=r, chunk_rows=16))
    return bags, strategy


def train(bags: ek.EmbeddingBags, steps: range, keeper: ek.Keeper | None = None) -> None:
    for step in steps:
        random = np.random.default_rng(step)
        ids = torch.from_numpy(random.choice(80, 9, replace=False))
        bags({"t": ids}).pow(2).sum().backward()
        bags.optimizer.step()
        if keeper is not None:
            keeper.step()


def named(case: Case) -> str:
    kind, layout, bits, parity, shards, cluster, optimizer = case
    return f"{kind}-{layout}-{bits}-{parity}-{shards}-{cluster}-{optimizer.name}"


@pytest.mark.parametrize("values", covering(), ids=named)
def test_every_pair_survives(
    values: Case, tmp_path: Path, servers: dict[int, list[OnFarm]]
) -> None:
    case = dict(zip(CHOICES, values, strict=True))
    first, second = servers[case["shards"]] if case["cluster"] == "servers" else (None, None)
    plain, _ = build({**case, "parity": None})
    train(plain, range(12))
    bags, strategy = build(case, first)
    lost = [] if case["parity"] is None else list(range(case["parity"][1]))
    with ek.Keeper(tmp_path / "run", bags, bags.optimizer, strategy=strategy) as keeper:
        train(bags, range(4), keeper)
        kill(bags, lost)
        train(bags, range(4, 8), keeper)
        if lost:
            bags.cluster.rebuild()
    # The process ends here; another one goes on.
    again, strategy = build(case, second)
    with ek.Keeper(tmp_path / "run", again, again.optimizer, strategy=strategy) as keeper:
        keeper.resume()
        assert state(again.cluster) == state(bags.cluster)  # the last version is exact
        kill(again, lost)
        train(again, range(8, 12), keeper)
        assert state(again.cluster) == state(plain.cluster)
    for used in (bags, again):
        if isinstance(used.cluster, FlightCluster):
            used.cluster.close()


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    tier = ek.Tier(str(tmp_path / "tier"), memory=2**20)
    table = ek.Table("t", rows=1000, dim=4, tier=tier)
    with pytest.raises(ek.EmberkeepError, match="tier"):
        ek.EmbeddingBags(
            [table],
            optimizer=ek.SGD(lr=0.1),
            cluster=ek.local(shards=3, parity=ek.Parity(k=2, r=1)),
        )
    with pytest.raises(ek.EmberkeepError, match="needs 4 shards"):
        ek.local(shards=3, parity=ek.Parity(k=3, r=1))
