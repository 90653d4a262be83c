"""What `benchmarks/tier.py` compares a tier with: the same rows to the bit, by other ways."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import emberkeep as ek
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.tables import Table, Tier
from emberkeep.tiers import durable_open
from tests.contracts.engine import grads_of, state, wanted_of

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from _baselines import SLABS, Kind, ListedFrames, LocalOf
from _emulated import SHARE, embedding_share

OPTIMIZER = ek.Adagrad(lr=0.1)
FRAMES = 120


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 32 * 1024)


def tables(tier: Tier | None) -> list[Table]:
    return [Table("a", rows=400, dim=4, tier=tier), Table("b", rows=300, dim=4, tier=tier)]


def train(cluster: LocalCluster, steps: int = 30) -> list[bytes]:
    """Everything that the pulls brought."""
    random = np.random.default_rng(0)
    pulled: list[bytes] = []
    for _ in range(steps):
        ids = {
            "a": np.unique(random.zipf(1.3, 40) % 400),
            "b": np.unique(random.integers(300, size=20)),
        }
        wanted = wanted_of(cluster, {name: some.tolist() for name, some in ids.items()})
        cluster.fetch(wanted, ahead=True)
        cluster.fetch(wanted)
        pulled += [rows.tobytes() for rows in cluster.pull(wanted)]
        grads = {name: random.standard_normal((i.size, 4), np.float32) for name, i in ids.items()}
        cluster.push(wanted, grads_of(cluster, grads), lr=0.1)
    return pulled


@pytest.mark.parametrize("kind", SLABS)
def test_every_baseline_has_the_rows_of_memory_to_the_bit(tmp_path: Path, kind: Kind) -> None:
    plain = local().open(tables(None), OPTIMIZER, seed=0)
    tier = Tier(tmp_path, memory=FRAMES * (4 * 8 + 48))
    behind = LocalOf(kind).open(tables(tier), OPTIMIZER, seed=0)
    assert train(behind) == train(plain)
    assert state(behind) == state(plain)
    (status,) = behind.tier_status()
    assert status.reads > 0
    behind.close()


def test_no_cache_keeps_no_row_and_reads_every_one_twice(tmp_path: Path) -> None:
    tier = Tier(tmp_path, memory=FRAMES * (4 * 8 + 48))
    cluster = LocalOf("hash").open(tables(tier), OPTIMIZER, seed=0)
    train(cluster)
    (slab,) = cluster.shards[0].tiers()
    assert slab.frames.free == slab.frames.count
    known = wanted_of(cluster, {"a": cluster.touched_ids("a")[:10].tolist()})
    before = slab.log.reads
    cluster.fetch(known)
    cluster.pull(known)
    assert slab.log.reads == before + 10
    cluster.push(known, [np.ones((10, 4), np.float32)], lr=0.1)
    assert slab.log.reads == before + 20
    assert slab.frames.free == slab.frames.count
    cluster.close()


def test_the_list_gives_the_least_recently_used_away_first() -> None:
    frames = ListedFrames(4, 10)
    bound = frames.bind(np.array([7, 8, 9]))
    frames.turn = 2
    frames.move_to_end(bound)
    frames.move_to_end(bound[:1])  # row 7 again
    assert frames.row_of[frames.least(2, before=9)].tolist() == [8, 9]
    assert frames.row_of[frames.least(2, before=9)].tolist() == [7]


def test_the_wait_follows_from_the_papers_scaling() -> None:
    assert [round(embedding_share(gpus), 2) for gpus in (4, 8, 16)] == [0.15, 0.26, 0.41]
    assert embedding_share(16) == SHARE
