"""What a head has to say may be of any length; files of the first format open as they did."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emberkeep as ek
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import ConfigError, DamageError, FormatError, StateError
from emberkeep.tables import Adagrad, Table, Tier, Uniform
from emberkeep.tiers import durable_open, superblock
from emberkeep.tiers.superblock import SLOT_NBYTES, START, read_head
from tests.contracts.engine import grads_of, state, wanted_of
from tests.faults.test_tier_faults import end, make_durable, start, train
from tests.golden import make_tier
from tests.unit.tiers.test_tiered_slab import Unsynced

OPTIMIZER = Adagrad(lr=0.1)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 8192)
    monkeypatch.setattr(durable_open, "DISK", Unsynced)


def many(path: Path, count: int, shards: int = 1) -> LocalCluster:
    tier = Tier(path, memory="4MB")
    tables = [Table(f"a rather long name of a table {i}", rows=20, dim=2, tier=tier)
              for i in range(count)]  # fmt: skip
    return local(shards=shards, threads=1).open(tables, OPTIMIZER, seed=0)


def train_all(cluster: LocalCluster, seed: int) -> None:
    random = np.random.default_rng(seed)
    batch = {t.name: random.choice(20, 2, replace=False).tolist() for t in cluster.tables}
    grads = {name: random.standard_normal((2, 2)) for name in batch}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


@pytest.mark.parametrize("count", [370, pytest.param(700, marks=pytest.mark.soak)])
def test_any_number_of_tables_is_saved_and_comes_back(tmp_path: Path, count: int) -> None:
    """Over several lives, and with steps of many digits: nothing that grows fills the head."""
    batch, before = 0, None
    for life in range(2 if count == 370 else 4):
        cluster = many(tmp_path / "t", count)
        assert (cluster.tier_batch() or 0) == batch
        assert before in (None, state(cluster))
        for _ in range(3):
            train_all(cluster, 10 * life + batch)
            batch = batch * 1000 + 999
            before = make_durable(cluster, batch)
        train_all(cluster, 1)
        end(cluster)
    file = tmp_path / "t" / "rows-0-0.tier"
    assert len(superblock.encode(read_head(str(file))[0])) > (count > 330) * SLOT_NBYTES


def test_files_of_earlier_releases_open_however_whole_numbers_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(**changes: Any) -> LocalCluster:
        table = Table(
            "t", rows=20, dim=2, tier=Tier(tmp_path / "t", memory="4MB"), init=Uniform(-1, 1)
        )
        return local(threads=1).open([replace(table, **changes)], OPTIMIZER, seed=0)

    with monkeypatch.context() as release:
        release.setattr(
            Table, "origin", lambda table, seed: table._origin(seed, "Uniform(low=-1, high=1)")
        )
        cluster = opened()
        train_all(cluster, 0)
        before = make_durable(cluster, 1)
        end(cluster)
    cluster = opened(init=Uniform(-1.0, 1.0))
    assert state(cluster) == before
    end(cluster)
    with pytest.raises(StateError, match="seed and init"):
        opened(init=Uniform(-1.0, 1.5))


def test_a_long_head_that_is_torn_leaves_the_other_one(tmp_path: Path) -> None:
    cluster = many(tmp_path / "t", 500)
    train_all(cluster, 0)
    before = make_durable(cluster, 1)
    end(cluster)
    file = tmp_path / "t" / "rows-0-0.tier"
    content = file.read_bytes()
    head, sequence = read_head(str(file))
    newest, older = head.areas[(sequence - 1) % 2], head.areas[sequence % 2]
    assert newest
    assert older
    assert not {*newest} & {*older}
    for areas, message in (((newest,), None), ((newest, older), "no readable head")):
        spoiled = bytearray(content)
        for area in areas:
            at = START + area[0] * 8192 + 77
            spoiled[at] ^= 1
        file.write_bytes(spoiled)
        if message is None:
            # The one before it: the same batch, as it was prepared.
            found, earlier = read_head(str(file))
            assert earlier == sequence - 1
            assert found.prepared is not None
            assert found.prepared.batch == 1
        else:
            with pytest.raises(DamageError, match=message):
                many(tmp_path / "t", 500)
    file.write_bytes(content)
    cluster = many(tmp_path / "t", 500)
    assert state(cluster) == before
    end(cluster)


def test_very_many_segments_fit(tmp_path: Path) -> None:
    """A file of 1.7 TB has 400,000 segments, free and used ones in any order."""
    random = np.random.default_rng(0)
    free = random.random(400_000) < 0.5
    cluster = start(tmp_path / "t")
    train(cluster, 0)
    make_durable(cluster, 1)
    (slab,) = cluster.shards[0].tiers()
    log = slab.log
    with slab.lock:
        log.reserve_head(segments=400_000, free=superblock.pack_bits(free))
    log.write_head(segments=400_000, free=superblock.pack_bits(free))
    head, _ = read_head(log.path)
    assert np.array_equal(superblock.unpack_bits(head.free, 400_000), free)
    end(cluster)


def test_the_advice_for_a_larger_cache_works_when_it_is_followed(tmp_path: Path) -> None:
    for dims, rows in (((6,), 40), ((6, 3), 35), ((64, 2, 16), 1), ((4,), 3001)):
        memory: int | str = 64
        for attempt in range(8):
            tier = ek.Tier(tmp_path / f"{dims}-{attempt}", memory=memory)
            tables = [Table(f"t{i}", rows=5000, dim=dim, tier=tier) for i, dim in enumerate(dims)]
            cluster = local(shards=2, threads=1).open(tables, OPTIMIZER, seed=0)
            batch = {table.name: list(range(rows)) for table in tables}
            grads = {table.name: np.ones((rows, table.dim)) for table in tables}
            try:
                cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)
            except ConfigError as refused:
                named = re.search(r"to ([0-9.]+ MiB) or more", str(refused))
                assert named is not None
                memory = named[1]
                # One refusal for each shard of each slab at most: the size it names is enough.
                assert attempt < 2 * len(dims)
                continue
            finally:
                end(cluster)
            break
        else:
            raise AssertionError("the advice never helped")


def test_more_rows_than_a_file_can_hold_are_refused_at_once(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "t", memory="1MB")
    with pytest.raises(ConfigError, match=r"2,?147,?483,?\d+ .*shards"):
        local(shards=2, threads=1).open(
            [Table("a", rows=2**32 + 10, dim=2, tier=tier)], OPTIMIZER, seed=0
        )
    assert not (tmp_path / "t").exists()


# -- the first format ----------------------------------------------------------------------------

EXPECTED = json.loads((make_tier.HERE / "expected.json").read_text())


def format_of(path: Path) -> Any:
    content = path.read_bytes()
    slots = [content[at + 32 : at + SLOT_NBYTES].rstrip(b"\0") for at in (0, SLOT_NBYTES)]
    return {json.loads(slot)["format"] for slot in slots if slot}


def test_a_tier_of_the_first_format_comes_back_by_the_old_rule_once(tmp_path: Path) -> None:
    make_tier.unpack("half", tmp_path)
    files = [tmp_path / f"rows-{shard}-0.tier" for shard in (0, 1)]
    assert [format_of(file) for file in files] == [{1}, {1}]
    cluster = make_tier.half(tmp_path)
    assert cluster.tier_batch() == 3
    assert make_tier.digest(cluster) == EXPECTED["half"]
    make_tier.train(cluster, 99)
    before = make_durable(cluster, 4)
    end(cluster)
    assert [format_of(file) for file in files] == [{2}, {2}]
    cluster = make_tier.half(tmp_path)
    assert cluster.tier_batch() == 4
    assert state(cluster) == before
    end(cluster)


def test_a_kept_tier_of_the_first_format_resumes(tmp_path: Path) -> None:
    make_tier.unpack("kept", tmp_path)
    kept = make_tier.Kept(tmp_path)
    assert kept.keeper.resume() == 4
    assert kept.digest() == EXPECTED["kept"]
    kept.train(2)
    kept.keeper.close()
    digest = kept.digest()
    kept.bags.cluster.close()
    again = make_tier.Kept(tmp_path)
    assert again.keeper.resume() == 6
    assert again.digest() == digest
    again.bags.cluster.close()


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(superblock, "FORMAT", 3)
        end(start(tmp_path / "t"))
    before = (tmp_path / "t" / "rows-0-0.tier").read_bytes()
    with pytest.raises(FormatError, match="newer release"):
        start(tmp_path / "t")
    assert (tmp_path / "t" / "rows-0-0.tier").read_bytes() == before
    assert os.path.exists(tmp_path / "t" / "lock")
